package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// row is one death, or several: an operation, and the points that the daemon is killed at, one after the other.
type row struct {
	name   string
	daemon string
	do     scenario
	points []string
	// may: the point may not be passed, because operations differ in how many commits they take.
	may bool
	// boot: the daemon is restarted with the point armed; nothing is asked of it.
	boot bool
	// late: the point comes after the operation's end.
	late bool
}

func (r row) String() string { return r.daemon + "/" + r.name + "/" + strings.Join(r.points, "+") }

const agentd, coordinator = "agentd1", "coordinator"

// matrix lists every row.
func matrix() []row {
	var all []row
	add := func(daemon, name string, do scenario, points ...string) {
		for _, p := range points {
			all = append(all, row{name: name, daemon: daemon, do: do, points: strings.Split(p, "+"), late: p == "wake.dropped.after"})
		}
	}
	of := func(prefixes ...string) (out []string) {
		for _, p := range fault.Agentd() {
			if slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(p, prefix) }) {
				out = append(out, p)
			}
		}
		return out
	}
	add(agentd, "create", create, of("start.", "runtime.recorded", "runtime.group", "runtime.launched", "runtime.attached", "volume.attach", "image.hold", "command.")...)
	add(agentd, "restore", restore, of("restore.")...)
	add(agentd, "checkpoint", capture, of("checkpoint.", "artefact.")...)
	running := slices.DeleteFunc(of("delete.", "runtime.killed", "runtime.deleted", "runtime.ungrouped", "runtime.forgotten", "volume.detach", "image.release"), func(p string) bool { return p == "delete.artefact.after" }) // of a hibernated one
	add(agentd, "delete", remove, running...)
	// The first turn of a checkpoint is its pause, the second its resume.
	add(agentd, "checkpoint", capture, "runtime.turn.before", "runtime.save.before", "runtime.turn.after", "runtime.turned.after", "runtime.turn.before#2", "runtime.turn.after#2")
	add(agentd, "pause", pause, append(of("pause.", "runtime.turn"), "runtime.turn.before+runtime.unturned.after", "runtime.turn.after+runtime.turned.after")...)
	add(agentd, "resume", resume, append(of("resume.", "runtime.turn"), "runtime.turn.before+runtime.unturned.after", "runtime.turn.after+runtime.turned.after")...)
	add(agentd, "claim", claimReady, "resume.intent.after", "runtime.turn.after", "resume.thawed.after", "claim.told.after", "resume.record.after",
		"command.keep.before", "resume.thawed.after+claim.told.after")
	add(agentd, "hibernate", hibernate, append(of("hibernate."), "checkpoint.save.after", "artefact.stage.after", "artefact.manifest.after", "artefact.rename.after",
		"runtime.killed.after", "runtime.forgotten.after", "command.keep.before", "command.keep.after")...)
	add(agentd, "wake", wake, append(of("wake."), "restore.network.after", "restore.runtime.before", "restore.runtime.after", "restore.guest.after",
		"restore.running.before", "restore.running.after", "runtime.launched.after", "command.keep.before")...)
	add(agentd, "delete-hibernated", removeHibernated, "delete.intent.after", "delete.artefact.after", "delete.record.after")
	add(agentd, "checkpoint-paused", capturePaused, "checkpoint.freezing.after", "checkpoint.save.after", "checkpoint.record.after")
	add(agentd, "delete-snapshot", dropSnapshot, of("snapshot.")...)
	add(agentd, "end", ending, of("stop.")...)
	add(agentd, "create-outbound", createOutbound, append(of("network.policy"), "network.link.after", "start.intent.after", "start.network.after", "start.runtime.after",
		"network.policy.after+network.unpolicy.after", "start.network.after+network.unlink.after")...)
	add(agentd, "restore-outbound", restoreOutbound, "network.policy.after", "restore.network.after", "restore.runtime.after")
	add(agentd, "delete-outbound", removeOutbound, of("network.unpolicy", "network.unlink")...)
	add(agentd, "update-egress", updateEgress, append(of("egress."), "network.repolicy.after", "command.keep.before", "command.keep.after",
		"egress.intent.after+network.table.after", "egress.policy.after+egress.intent.after")...)
	add(agentd, "update-egress-hibernated", updateEgressHibernated, of("egress.")...)
	for _, p := range []string{"network.table.after", "network.link.after"} {
		all = append(all, row{name: "boot", daemon: agentd, do: nothing, points: []string{p}, boot: true})
	}
	made := of("volume.record", "volume.stage", "volume.fill", "volume.meta", "volume.rename")
	add(agentd, "create-volume", createVolume, made...)
	add(agentd, "rewind", rewind, "journal.apply.before", "journal.apply.after")
	add(agentd, "clone-volume", cloneVolume, made...)
	add(agentd, "delete-volume", dropVolume, of("volume.trash", "volume.emptied", "volume.forget")...)
	add(agentd, "pull", pull, of("image.pull", "image.stage", "image.build", "image.file", "image.record", "image.alias")...)
	add(agentd, "delete-image", dropImage, of("image.unrecord", "image.unlink", "image.layers")...)
	add(agentd, "fork", fork, "checkpoint.save.after", "artefact.rename.after", "volume.fill.after", "restore.runtime.after", "restore.running.before#2", "command.keep.before#3")
	// Twice in a row, and in the middle of what the first death left to do.
	add(agentd, "checkpoint", capture, "checkpoint.save.after+recover.resume.after", "artefact.rename.after+recover.snapshot.after",
		"artefact.manifest.after+recover.snapshot.after+recover.resume.after", "checkpoint.record.after+recover.reconcile.after")
	add(agentd, "pause", pause, "pause.frozen.after+recover.resume.after", "pause.intent.after+pause.frozen.after+recover.sandbox.after")
	add(agentd, "hibernate", hibernate, "hibernate.frozen.after+hibernate.saved.after", "artefact.rename.after+hibernate.record.after+recover.sandbox.after")
	add(agentd, "wake", wake, "restore.runtime.after+hibernate.released.after", "wake.intent.after+restore.running.after+wake.dropped.after")
	add(agentd, "create", create, "start.runtime.after+delete.runtime.after", "start.running.before+delete.volumes.after+recover.sandbox.after",
		"start.guest.before+recover.reconcile.before", "runtime.launched.after+runtime.killed.after", "start.running.after+recover.sandbox.after")
	add(agentd, "delete", remove, "delete.runtime.after+delete.volumes.after+delete.record.after", "delete.intent.after+delete.intent.after")
	add(agentd, "pull", pull, "image.build.after+recover.images.before", "image.file.after+recover.images.after")
	for _, p := range []string{"restore.runtime.after", "restore.running.before", "restore.running.after", "command.keep.before"} {
		all = append(all, row{name: "fill-pool", daemon: agentd, do: fillPool, points: []string{p}, late: true})
	}
	for _, p := range of("session.", "recover.images", "recover.volumes", "recover.artefacts", "recover.reconcile", "recover.sandbox") {
		all = append(all, row{name: "boot", daemon: agentd, do: nothing, points: []string{p}, boot: true})
	}
	return slices.Concat(all, coordinatorRows(), orphanRows())
}

func coordinatorRows() []row {
	var all []row
	verbs := []struct {
		name  string
		do    scenario
		nodes []string
	}{
		{"create", create, []string{"start"}},
		{"restore", restore, []string{"restore"}},
		{"checkpoint", capture, []string{"checkpoint"}},
		{"pause", pause, []string{"pause"}},
		{"resume", resume, []string{"resume"}},
		{"hibernate", hibernate, []string{"hibernate"}},
		{"wake", wake, []string{"resume"}},
		{"update-egress", updateEgress, []string{"update"}},
		{"fork", fork, []string{"checkpoint", "volume", "restore"}},
		{"delete", remove, []string{"delete"}},
		{"delete-snapshot", dropSnapshot, []string{"delete-snapshot"}},
		{"create-volume", createVolume, []string{"volume"}},
		{"clone-volume", cloneVolume, []string{"volume"}},
		{"delete-volume", dropVolume, []string{"delete-volume"}},
		{"create-template", createTemplate, []string{"start", "setup", "checkpoint", "delete"}},
		{"delete-template", dropTemplate, []string{"delete-snapshot"}},
		{"claim", claimReady, []string{"claim"}},
		{"delete-pool", dropPool, []string{"delete"}},
	}
	for _, v := range verbs {
		points := []string{"operation.drive.before", "operation.drive.after", "operation.reply.before"}
		for _, n := range v.nodes {
			points = append(points, "node."+n+".before", "node."+n+".after")
		}
		for _, p := range points {
			all = append(all, row{name: v.name, daemon: coordinator, do: v.do, points: []string{p}})
		}
		for n := range 4 {
			for _, side := range []string{"before", "after"} {
				all = append(all, row{name: v.name, daemon: coordinator, do: v.do, points: []string{fmt.Sprintf("commit.send.%s#%d", side, n+1)}, may: n > 0})
			}
		}
	}
	// A pool fills after the call that made it.
	for _, p := range []string{"node.restore.before", "node.restore.after", "commit.send.after#2", "commit.send.before#3", "operation.drive.after"} {
		all = append(all, row{name: "fill-pool", daemon: coordinator, do: fillPool, points: []string{p}, late: true})
	}
	for _, p := range []string{"catalog.suspend.before", "catalog.suspend.after", "repair.commit.before", "repair.commit.after", "repair.commit.after#2",
		"catalog.resume.before", "catalog.resume.after", "repair.commit.after+repair.commit.after"} {
		all = append(all, row{name: "rewind", daemon: coordinator, do: rewind, points: strings.Split(p, "+")})
	}
	for _, p := range []string{"catalog.renew.before", "catalog.renew-asked.after", "catalog.renew.after", "catalog.renew-asked.after+commit.send.before"} {
		all = append(all, row{name: "new-server", daemon: coordinator, do: newServer, points: strings.Split(p, "+")})
	}
	for _, p := range []string{"restore.begin.before", "restore.begin.after", "restore.records.before", "restore.records.after", "restore.end.before",
		"restore.end.after", "restore.begin.after+restore.records.after+restore.end.before"} {
		all = append(all, row{name: "put-back", daemon: coordinator, do: putBack, points: strings.Split(p, "+")})
	}
	for _, p := range []string{"term.lead.after", "term.load.after"} {
		all = append(all, row{name: "boot", daemon: coordinator, do: nothing, points: []string{p}, boot: true})
	}
	return append(all, row{name: "create", daemon: coordinator, do: create, points: []string{"commit.send.after", "term.load.after", "node.start.after"}})
}

func nothing(*world) operation {
	return operation{run: func(context.Context) error { return nil }, check: func() {}, clean: func() {}}
}

// TestF10CrashMatrix kills a daemon at each point.
func TestF10CrashMatrix(t *testing.T) {
	w := enter(t)
	for _, r := range chosen(t, matrix(), 12) {
		t.Run(r.String(), func(t *testing.T) {
			s := w.sub(t)
			began := time.Now()
			defer func() {
				if t.Failed() {
					s.sweep()
				}
			}()
			s.strike(r)
			w.asked = s.asked
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
}

// strike runs the operation of a row and kills the daemon where the row says.
func (w *world) strike(r row) {
	w.Helper()
	o := r.do(w)
	w.arm(r.daemon, r.points)
	done := make(chan error, 1)
	go func() { done <- w.insist(o.run) }()
	if r.boot {
		w.ok(w.kill(r.daemon))
		w.restart(r.daemon)
	} else {
		w.struck(r, done)
	}
	if err := <-done; err != nil {
		w.Fatalf("the same operation id does not lead to its end: %v", err)
	}
	w.disarm(r.daemon)
	if w.Running(r.daemon) {
		w.online()
	}
	if o.id != "" {
		op, err := w.api.GetOperation(w.ctx, o.id)
		w.ok(err)
		if op.GetState() != dormousev1.OperationState_OPERATION_STATE_SUCCEEDED {
			w.Fatalf("the call succeeded, the operation is %v", op)
		}
		w.ok(w.insist(o.run)) // and says the same for ever
	}
	o.check()
	w.lives()
	o.clean()
	w.settled()
}

// struck waits for the deaths, and starts the daemon again after each.
func (w *world) struck(r row, done chan error) {
	w.Helper()
	var ended error
	w.await("the daemon reaches "+r.points[0], func() error {
		if !w.Running(r.daemon) {
			return nil
		}
		select {
		case ended = <-done:
			done <- ended
			if r.late {
				return errors.New("the daemon lives")
			}
			return nil
		default:
			return errors.New("the daemon lives and the operation goes on")
		}
	})
	if len(w.armed(r.daemon)) == len(r.points) {
		if !r.may {
			w.Fatalf("%s was not passed; the operation ended with %v", r.points[0], ended)
		}
		return
	}
	w.restart(r.daemon)
	for len(w.armed(r.daemon)) > 0 {
		// Some of what is left is only reached by what the client asks again.
		next := w.armed(r.daemon)
		w.await("the daemon reaches "+next[0], func() error {
			select {
			case ended = <-done:
				done <- ended
				return nil
			default:
			}
			if w.Running(r.daemon) {
				return errors.New("the daemon lives")
			}
			return nil
		})
		if len(w.armed(r.daemon)) == len(next) {
			w.Fatalf("%s was not passed; the operation ended with %v", next[0], ended)
		}
		w.restart(r.daemon)
	}
}

// insist asks until there is an answer that is final.
func (w *world) insist(run func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	var final error
	err := poll(ctx, func() error {
		err := run(ctx)
		var e *errs.Error
		if errors.As(err, &e) && (e.Retry == errs.Never || e.IsAnswer()) {
			final = err
			return nil
		}
		return err
	})
	return errors.Join(final, err)
}

// ---- daemons --------------------------------------------------------------------

func (w *world) faultFile(daemon string) string {
	if daemon == coordinator {
		return filepath.Join(w.Dir, "fault")
	}
	return filepath.Join(w.NodeDir(1), "fault")
}

func (w *world) arm(daemon string, points []string) {
	w.Helper()
	// In one step, so that the daemon never reads half of it.
	tmp := w.faultFile(daemon) + ".new"
	w.ok(os.WriteFile(tmp, []byte(strings.Join(points, "\n")), 0o600))
	w.ok(os.Rename(tmp, w.faultFile(daemon)))
}

func (w *world) disarm(daemon string) {
	w.Helper()
	if err := os.Remove(w.faultFile(daemon)); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Fatal(err)
	}
}

// armed lists the points that have not been passed.
func (w *world) armed(daemon string) []string {
	w.Helper()
	data, err := os.ReadFile(w.faultFile(daemon))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Fatal(err)
	}
	return strings.Fields(string(data))
}

func (w *world) kill(daemon string) error {
	if daemon == coordinator {
		return w.KillCoordinator(w.ctx)
	}
	return w.KillAgentd(w.ctx, 1)
}

// restart starts a dead daemon until it stays: points that are left kill it while it starts.
func (w *world) restart(daemon string) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	for tries := 3; ; {
		left := len(w.armed(daemon))
		var err error
		if daemon == coordinator {
			err = w.StartCoordinatorReady(ctx)
		} else {
			err = w.StartAgentdReady(ctx, 1)
		}
		if err == nil {
			return
		}
		// A process whose last threads are still ending holds its sockets: who starts daemons tries again.
		if len(w.armed(daemon)) == left && (ctx.Err() != nil || tries == 0) {
			w.Fatalf("%s does not start again: %v", daemon, err)
		} else if len(w.armed(daemon)) == left {
			tries--
		}
		w.ok(w.kill(daemon)) // it is dead; this forgets it
	}
}

// online waits until the node is in session.
func (w *world) online() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	w.ok(online(ctx, w.Cluster))
}
