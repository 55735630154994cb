package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

const (
	running = dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	paused  = dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED

	hibernated = dormousev1.SandboxPhase_SANDBOX_PHASE_HIBERNATED
)

// phase reads the recorded phase.
func (w *world) phase(s *client.Sandbox) dormousev1.SandboxPhase {
	w.Helper()
	w.ok(s.Refresh(w.ctx))
	return s.Last.GetStatus().GetPhase()
}

// is checks an answer and what is recorded.
func (w *world) is(s *client.Sandbox, want dormousev1.SandboxPhase) {
	w.Helper()
	answered := s.Last.GetStatus().GetPhase()
	if recorded := w.phase(s); answered != want || recorded != want {
		w.Fatalf("answered %s, recorded %s, want %s", answered, recorded, want)
	}
}

// counting is a program that counts in memory and in a file, which is there with a number or not at all.
const counting = `i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new; mv /tmp/n.new /tmp/n; usleep 10000; done`

// pid waits until a command that writes its pid down has done so.
func (w *world) pid(s *client.Sandbox) {
	w.Helper()
	w.until("its pid is known", s, "test -s /tmp/pid && echo known", "known")
}

// TestB08EditsPersistOverPauses: pause, resume, edit, five times.
func TestB08EditsPersistOverPauses(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", counting))
	for i := range 5 {
		w.ok(s.Pause(w.ctx, ""))
		w.is(s, paused)
		w.ok(s.Resume(w.ctx, ""))
		w.is(s, running)
		w.sh(s, fmt.Sprintf("echo %d >>/etc/edits; mkdir /srv/%d 2>/dev/null || mkdir -p /srv/%d", i, i, i))
	}
	w.ok(s.Pause(w.ctx, ""))
	w.ok(s.Resume(w.ctx, ""))
	if got := w.sh(s, "cat /etc/edits | tr '\n' ' '; ls /srv | tr '\n' ' '"); got != "0 1 2 3 4 0 1 2 3 4 " {
		t.Fatalf("what is left of the edits: %q", got)
	}
}

// TestB13PauseThenResumeAtOnce: the reported state is the runtime's, each time.
func TestB13PauseThenResumeAtOnce(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", counting))
	for i := range 25 {
		w.ok(s.Pause(w.ctx, ""))
		if got := s.Last.GetStatus().GetPhase(); got != paused {
			t.Fatalf("round %d: paused it is %s", i, got)
		}
		w.ok(s.Resume(w.ctx, ""))
		if got := s.Last.GetStatus().GetPhase(); got != running {
			t.Fatalf("round %d: resumed it is %s", i, got)
		}
		if got := w.sh(s, "echo here"); got != "here" {
			t.Fatalf("round %d: it says %q", i, got)
		}
	}
	w.is(s, running)
}

// TestAPausedSandboxStandsStill: it does nothing, says what to do, and outlives a kill of its agentd as it is; a program with a memory goes on
// where it was.
func TestAPausedSandboxStandsStill(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", "echo $$ >/tmp/pid; "+counting))
	w.await("it counts", func() error {
		out, err := cluster.Exec(w.ctx, s, "cat", "/tmp/n")
		if err == nil && strings.TrimSpace(string(out)) == "" {
			err = errs.New(errs.InternalError, "not yet")
		}
		return err
	})
	id := uid.New()
	w.ok(s.Pause(w.ctx, id))
	w.ok(s.Pause(w.ctx, id)) // the same answer
	w.is(s, paused)
	w.ok(s.Pause(w.ctx, ""))
	refused := func() {
		_, err := cluster.Exec(w.ctx, s, "true")
		if e := w.refusal(err, errs.SandboxPaused); !strings.Contains(e.Message, "resume") {
			t.Errorf("it does not say what to do: %v", e)
		}
	}
	refused()
	w.restartAgentd(w.nodeOf(s))
	w.nodesOnline()
	w.is(s, paused)
	refused()

	// A snapshot of it can be taken; it stays paused.
	snap := w.checkpoint(s)
	w.is(s, paused)
	copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := w.sh(copied, "cat /tmp/n"); got == "" {
		t.Error("the copy does not count")
	}
	w.ok(s.Resume(w.ctx, ""))
	w.is(s, running)
	w.ok(s.Resume(w.ctx, ""))

	// Deletion works from here too.
	w.ok(s.Pause(w.ctx, ""))
	w.ok(s.Delete(w.ctx, ""))
	w.refused(s.Pause(w.ctx, ""), errs.ObjectNotFound)
}

// artefacts lists what there is of snapshots on a node's disk, whole or not.
func (w *world) artefacts(node int) []string {
	w.Helper()
	whole, err := filepath.Glob(filepath.Join(w.NodeDir(node), "snapshots", "[^.]*"))
	w.ok(err)
	parts, err := filepath.Glob(filepath.Join(w.NodeDir(node), "snapshots", ".*", "*"))
	w.ok(err)
	return append(whole, parts...)
}

// TestB14OneGenerationOfArtefact: paused, hibernated and resumed again and again, a sandbox has one artefact while it is hibernated and none while it
// runs; it is the same sandbox with the same processes and the same volume each time.
func TestB14OneGenerationOfArtefact(t *testing.T) {
	w := enter(t)
	v := w.volume("")
	spec := w.spec("sh", "-c", "echo $$ >/tmp/pid; "+counting)
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	s := w.create(spec)
	node := w.nodeOf(s)
	host := w.sh(s, "hostname")
	w.pid(s)
	for i := range 8 {
		w.ok(s.Pause(w.ctx, ""))
		w.ok(s.Hibernate(w.ctx, ""))
		w.is(s, hibernated)
		if got := w.artefacts(node); len(got) != 1 {
			t.Fatalf("round %d: hibernated it has %v", i, got)
		}
		if err := leftCgroups(w.CgroupParent(node)); err != nil {
			t.Fatalf("round %d: hibernated it has %v", i, err)
		}
		_, err := cluster.Exec(w.ctx, s, "true")
		w.refused(err, errs.SandboxPaused)
		w.ok(s.Resume(w.ctx, ""))
		w.is(s, running)
		w.await("the artefact of a hibernation that is over is removed", func() error {
			if got := w.artefacts(node); len(got) != 0 {
				return fmt.Errorf("round %d: running it has %v", i, got)
			}
			return nil
		})
		if got := w.sh(s, fmt.Sprintf("echo %d >>/data/edits; kill -0 $(cat /tmp/pid) && hostname", i)); got != host {
			t.Fatalf("round %d: it says %q, not %q", i, got, host)
		}
	}
	if got := w.sh(s, "wc -l </data/edits"); strings.TrimSpace(got) != "8" {
		t.Fatalf("%s edits are left on the volume", got)
	}
}

// TestAHibernatedSandboxOutlivesItsAgentd: it is hibernated and comes back after agentd and coordinator were killed; its volume is held for it
// meanwhile.
func TestAHibernatedSandboxOutlivesItsAgentd(t *testing.T) {
	w := enter(t)
	v := w.volume("")
	spec := w.spec("sh", "-c", "head -c 9 /dev/urandom | base64 >/dev/shm/me; read x </dev/shm/me; mkfifo /tmp/q; while :; do read y </tmp/q; echo $x >/tmp/said; done")
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	s := w.create(spec)
	var me string
	w.await("it knows who it is", func() error {
		out, err := cluster.Exec(w.ctx, s, "cat", "/dev/shm/me")
		if me = strings.TrimSpace(string(out)); err == nil && me == "" {
			err = errs.New(errs.InternalError, "not yet")
		}
		return err
	})
	w.until("it has read that", s, "test -p /tmp/q && echo yes", "yes")
	w.sh(s, "rm /dev/shm/me")
	id := uid.New()
	w.ok(s.Hibernate(w.ctx, id))
	w.ok(s.Hibernate(w.ctx, id))
	w.refused(v.Delete(w.ctx, ""), errs.AlreadyAttached)
	w.restartAgentd(w.nodeOf(s))
	w.ok(w.KillCoordinator(w.ctx))
	w.ok(w.StartCoordinatorReady(w.ctx))
	w.nodesOnline()
	w.is(s, hibernated)
	snaps, err := client.Collect(w.api.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{}))
	w.ok(err)
	if len(snaps) != 0 {
		t.Fatalf("its artefact is listed: %v", snaps)
	}
	w.ok(s.Resume(w.ctx, ""))
	w.await("it still knows who it is", func() error {
		out, err := cluster.Exec(w.ctx, s, "sh", "-c", "echo x >/tmp/q; cat /tmp/said")
		if got := strings.TrimSpace(string(out)); err == nil && got != me {
			err = fmt.Errorf("it says %q, not %q", got, me)
		}
		return err
	})
}

// TestB11TheFreezeOfALargeSandbox: a sandbox with a dirty GiB is checkpointed and runs on; how long it stood still is measured and reported, by the
// snapshot and by the sandbox.
func TestB11TheFreezeOfALargeSandbox(t *testing.T) {
	w := enter(t)
	spec := w.spec("sh", "-c", counting)
	spec.Resources.DiskLimitBytes = 1200 * mib // the writable layer is memory, which the node adds to the limit
	s := w.create(spec)
	w.until("it counts", s, "test -s /tmp/n && echo yes", "yes")
	w.sh(s, "dd if=/dev/urandom of=/root/some bs=1M count=64 2>/dev/null; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do cat /root/some; done >/root/dirty")
	snap := w.checkpoint(s)
	freeze, size := snap.Last.GetStatus().GetFreeze().AsDuration(), snap.Last.GetStatus().GetSizeBytes()
	w.is(s, running)
	if got := s.Last.GetStatus().GetLastFreeze().AsDuration(); freeze <= 0 || got != freeze || size < 1024*mib {
		t.Fatalf("the snapshot of %d bytes reports a freeze of %s, the sandbox one of %s", size, freeze, got)
	}
	t.Logf("%d MiB, frozen for %s", size/mib, freeze)
	if got := w.sh(s, "cat /tmp/n"); got == "" {
		t.Fatal("it does not count on")
	}
}

// TestB12DeleteFromEveryState gives everything back: what is left is searched for by the world's end, and the volumes are free.
func TestB12DeleteFromEveryState(t *testing.T) {
	w := enter(t)
	for name, prepare := range map[string]func(*client.Sandbox){
		"Running":    func(*client.Sandbox) {},
		"Paused":     func(s *client.Sandbox) { w.ok(s.Pause(w.ctx, "")) },
		"Hibernated": func(s *client.Sandbox) { w.ok(s.Hibernate(w.ctx, "")) },
		"Stopped": func(s *client.Sandbox) {
			w.sh(s, "echo x >/tmp/end")
			w.ok(s.Await(w.ctx, func(seen *dormousev1.Sandbox) bool {
				return seen.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			v := w.volume("")
			spec := w.spec("sh", "-c", "mkfifo /tmp/end; read x </tmp/end")
			spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
			s := w.create(spec)
			w.await("it waits", func() error { _, err := cluster.Exec(w.ctx, s, "test", "-p", "/tmp/end"); return err })
			prepare(s)
			w.ok(s.Delete(w.ctx, ""))
			w.ok(v.Delete(w.ctx, ""))
			w.ok(w.left(w.ctx))
		})
	}
}

// TestWakeOnUse: what is asked of a paused or hibernated sandbox resumes it first, where its spec says so; several calls at once wake it once.
func TestWakeOnUse(t *testing.T) {
	w := enter(t)
	spec := w.spec("sh", "-c", "echo $$ >/tmp/pid; "+counting)
	s := w.create(spec)
	w.pid(s)
	w.ok(s.Pause(w.ctx, ""))
	_, err := cluster.Exec(w.ctx, s, "true")
	w.refused(err, errs.SandboxPaused)
	w.ok(s.Update(w.ctx, &dormousev1.UpdateSandboxRequest{WakeOnUse: true, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"wake_on_use"}}}))
	for name, sleep := range map[string]func() error{
		"paused":     func() error { return s.Pause(w.ctx, "") },
		"hibernated": func() error { return s.Hibernate(w.ctx, "") },
	} {
		w.ok(s.Resume(w.ctx, ""))
		w.ok(sleep())
		var all errgroup.Group
		for range 4 {
			all.Go(func() error {
				_, err := cluster.Exec(w.ctx, s, "sh", "-c", "kill -0 $(cat /tmp/pid)")
				return err
			})
		}
		if err := all.Wait(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.ok(s.Refresh(w.ctx))
		w.is(s, running)
	}
}

// TestLifetimeAndUpdate: labels with a precondition, over REST too; a lifetime that ends deletes the sandbox, hibernated as it is.
func TestLifetimeAndUpdate(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	w.ok(s.Refresh(w.ctx))
	rev := s.Last.GetMeta().GetRevision()
	labels := &dormousev1.UpdateSandboxRequest{IfRevision: rev, Labels: map[string]string{"a": "1"}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}}}
	w.ok(s.Update(w.ctx, labels))
	w.refused(s.Update(w.ctx, labels), errs.StaleRevision)
	if got := s.Last.GetMeta(); got.GetLabels()["a"] != "1" || got.GetGeneration() != 2 || got.GetRevision() <= rev {
		t.Fatalf("updated it is %v", got)
	}
	w.refused(s.Update(w.ctx, &dormousev1.UpdateSandboxRequest{UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"spec.image"}}}), errs.UnknownField)
	a := w.rest(w.key, "PATCH", "/v1/sandboxes/"+s.UID, fmt.Sprintf(`{"labels":{"b":"2"},"updateMask":"labels","ifRevision":"%d"}`, rev))
	w.refusedREST(a, errs.StaleRevision)
	a = w.rest(w.key, "PATCH", "/v1/sandboxes/"+s.UID, `{"labels":{"b":"2"},"updateMask":"labels"}`)
	if a.status != 200 || !strings.Contains(string(a.body), `"b"`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	w.ok(s.Hibernate(w.ctx, ""))
	w.ok(s.Update(w.ctx, &dormousev1.UpdateSandboxRequest{Lifetime: durationpb.New(time.Second), UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"lifetime"}}}))
	w.await("it is deleted", func() error {
		if err := s.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
			return fmt.Errorf("it is there (%v)", err) //nolint:errorlint // not the condition's own
		}
		return nil
	})
}

// TestIdleTimeout: a sandbox that nobody uses is hibernated, and one with a stream attached to it is not, nor one that computes; a restart of agentd
// changes nothing. What is asked of it wakes it.
func TestIdleTimeout(t *testing.T) {
	w := enter(t)
	idler := func(command ...string) *client.Sandbox {
		spec := w.spec(command...)
		spec.IdleTimeout, spec.OnIdle, spec.WakeOnUse = durationpb.New(4*time.Second), dormousev1.IdleAction_IDLE_ACTION_HIBERNATE, true
		return w.create(spec)
	}
	idle, busy, attached := idler(), idler("sh", "-c", "while :; do :; done"), idler()
	ctx, cancel := context.WithCancel(w.ctx)
	began, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _, _ = attached.Run(ctx, &dormousev1.ProcessSpec{Argv: []string{"sleep", "600"}}, nil, &client.Output{}, func(*client.Process) { close(began) }) // cut by the test
	}()
	defer func() { cancel(); <-ended }()
	select {
	case <-began:
	case <-ended:
		t.Fatal("the stream ended")
	}
	w.await("it is hibernated", func() error {
		if p := w.phase(idle); p != hibernated {
			return fmt.Errorf("it is %s", p)
		}
		return nil
	})
	for name, s := range map[string]*client.Sandbox{"busy": busy, "attached": attached} {
		if p := w.phase(s); p != running {
			t.Errorf("the one that is %s is %s", name, p)
		}
	}
	if got := w.sh(idle, "echo here"); got != "here" {
		t.Fatalf("woken it says %q", got)
	}
}

// TestB09ForksHaveIdentitiesOfTheirOwn: host name, machine id, identity file and random numbers of each copy are its own, and the image's hook ran in
// each; a pause and a hibernation change none of it and run no hook.
func TestB09ForksHaveIdentitiesOfTheirOwn(t *testing.T) {
	w := enter(t)
	source := w.create(w.spec())
	w.sh(source, `mkdir -p /etc/dormouse; printf '#!/bin/sh\necho "$1" >>/tmp/hooked\n' >/etc/dormouse/on-restore; chmod 755 /etc/dormouse/on-restore`)
	const whoami = `hostname; cat /etc/hostname /etc/machine-id; head -c 16 /dev/urandom | base64`
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: source.UID, Count: 8})
	w.ok(err)
	seen := map[string]string{}
	for _, s := range append(copies, source) {
		lines := strings.Split(w.sh(s, whoami), "\n")
		if len(lines) != 4 || lines[0] != lines[1] || lines[2] != strings.ReplaceAll(s.UID, "-", "") {
			t.Fatalf("sandbox %s says %q", s.UID, lines)
		}
		for _, l := range []string{lines[0], lines[2], lines[3]} {
			if other, taken := seen[l]; taken {
				t.Errorf("%s and %s both have %q", s.UID, other, l)
			}
			seen[l] = s.UID
		}
		if id := w.sh(s, "cat /run/dormouse/identity.json"); !strings.Contains(id, s.UID) || !strings.Contains(id, lines[0]) {
			t.Errorf("the identity of %s is %s", s.UID, id)
		}
	}
	hooked := func(s *client.Sandbox, want string) {
		t.Helper()
		w.await("the hook ran", func() error {
			out, err := cluster.Exec(w.ctx, s, "sh", "-c", "cat /tmp/hooked 2>/dev/null; true")
			if got := strings.TrimSpace(string(out)); err == nil && got != want {
				err = fmt.Errorf("it noted %q, not %q", got, want)
			}
			return err
		})
	}
	for _, s := range copies[:2] {
		hooked(s, s.UID)
	}
	hooked(source, "")
	one := copies[0]
	was := w.sh(one, "hostname; cat /etc/machine-id")
	w.ok(one.Hibernate(w.ctx, ""))
	w.ok(one.Resume(w.ctx, ""))
	if now := w.sh(one, "hostname; cat /etc/machine-id"); now != was {
		t.Errorf("woken it is %q, not %q", now, was)
	}
	hooked(one, one.UID)
}

// TestPauseOverREST: the routes are there and answer with the object.
func TestPauseOverREST(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	for _, turn := range []struct{ verb, phase string }{{"pause", "SANDBOX_PHASE_PAUSED"}, {"hibernate", "SANDBOX_PHASE_HIBERNATED"}, {"resume", "SANDBOX_PHASE_RUNNING"}} {
		a := w.rest(w.key, "POST", "/v1/sandboxes/"+s.UID+":"+turn.verb, "{}")
		if a.status != 200 || !strings.Contains(string(a.body), turn.phase) {
			t.Fatalf("%s: %d %s", turn.verb, a.status, a.body)
		}
	}
	w.refusedREST(w.rest(w.key, "POST", "/v1/sandboxes/"+uid.New()+":pause", "{}"), errs.ObjectNotFound)
}

// TestCheckpointAndHibernateAtTheCommandLine: the snapshot and what is hibernated are of the same instant, and each goes on from it.
func TestCheckpointAndHibernateAtTheCommandLine(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", "echo $$ >/tmp/pid; "+counting))
	w.await("it counts", func() error { _, err := cluster.Exec(w.ctx, s, "test", "-s", "/tmp/n"); return err })
	out, code := w.dormouse("checkpoint", "--hibernate", s.UID)
	if code != 0 {
		t.Fatalf("%d: %s", code, out)
	}
	snap := w.api.Snapshot(strings.TrimSpace(out))
	w.ok(snap.Refresh(w.ctx))
	if got := w.phase(s); got != hibernated {
		t.Fatalf("it is %s", got)
	}
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.ok(s.Resume(w.ctx, ""))
	// Both count on, from where they were and not from the beginning.
	for _, one := range []*client.Sandbox{restored, s} {
		w.sh(one, "kill -0 $(cat /tmp/pid) || exit 1; a=$(cat /tmp/n); while [ \"$(cat /tmp/n)\" -le \"$a\" ]; do usleep 1000; done 2>/dev/null")
	}
}
