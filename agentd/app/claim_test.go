package app

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const (
	running = dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	paused  = dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED
)

// golden gives a snapshot of a sandbox that was set up by a line.
func (b *bench) golden(line string) string {
	b.t.Helper()
	box, snap := b.start(), uid.New()
	if out, code := b.sh(box.GetUid(), line); code != 0 {
		b.t.Fatalf("set up: %q %d", out, code)
	}
	_, err := b.agent.CheckpointSandbox(ctx(b.t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box.GetUid(), SnapshotUid: snap})
	must(b.t, err)
	b.delete(box.GetUid())
	return snap
}

// park restores a sandbox ahead of need.
func (b *bench) park(snapshot string) string {
	b.t.Helper()
	resp, err := b.agent.RestoreSandbox(ctx(b.t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), Generation: 1, SnapshotUid: snapshot, Parked: true})
	must(b.t, err)
	if resp.GetSandbox().GetPhase() != paused {
		b.t.Fatalf("parked it is %s", resp.GetSandbox().GetPhase())
	}
	return resp.GetSandbox().GetUid()
}

func (b *bench) claim(uid, name string) *nodev1.ClaimSandboxRequest {
	return &nodev1.ClaimSandboxRequest{Command: b.cmd(), Uid: uid, Name: name, Generation: 2, Env: map[string]string{"CLAIMED": name}}
}

// claimed checks that a sandbox knows who it is and that its processes have docker's capabilities, and gives what no other may have.
func (b *bench) claimed(id, name string) []string {
	b.t.Helper()
	out, code := b.sh(id, `hostname; cat /etc/hostname /etc/machine-id /run/dormouse/identity.json; echo $CLAIMED; grep -c "$(hostname)" /etc/hosts; grep CapBnd /proc/self/status; head -c 16 /dev/urandom | base64; cat /tmp/seed`)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	machine := strings.ReplaceAll(id, "-", "")
	identity := fmt.Sprintf(`{"sandbox_uid":%q,"hostname":%q,"generation":3}`, id, name)
	if code != 0 || len(lines) != 9 || !slices.Equal(lines[:7], []string{name, name, machine, identity, name, "1", "CapBnd:\t00000000a80405fb"}) {
		b.t.Fatalf("sandbox %s says %q (%d)", id, lines, code)
	}
	return []string{lines[0], lines[2], lines[7], lines[8]}
}

// hooked is a template whose hook notes who the sandbox is, and a seed of its own; while a process of it goes on.
const hooked = `mkdir -p /etc/dormouse; printf '#!/bin/sh\nhead -c 16 /dev/urandom | base64 >/tmp/seed.new; echo "$1" >>/tmp/hooked; mv /tmp/seed.new /tmp/seed\n' >/etc/dormouse/on-restore; ` +
	`chmod 755 /etc/dormouse/on-restore; echo template >/tmp/seed; (sleep 100000 & echo $! >/tmp/pid) >/dev/null 2>&1`

// TestB09ClaimsOfOneTemplate: eight sandboxes that were restored from one snapshot ahead of need, and claimed at once, differ in host name, machine id,
// random numbers and in what their hook seeded; the hook ran once in each, and not before; their processes are the template's.
func TestB09ClaimsOfOneTemplate(t *testing.T) {
	b := newBench(t)
	snap := b.golden(hooked)
	const count = 8
	var requests []*nodev1.ClaimSandboxRequest
	for i := range count {
		requests = append(requests, b.claim(b.park(snap), fmt.Sprintf("claimed-%d", i)))
	}
	var all sync.WaitGroup
	for _, req := range requests {
		all.Go(func() {
			resp, err := b.agent.ClaimSandbox(ctx(t), req)
			if err != nil || resp.GetSandbox().GetPhase() != running || resp.GetSandbox().GetObservedGeneration() != 2 {
				t.Errorf("claim: %v, %v", resp, err)
			}
		})
	}
	all.Wait()
	seen := map[string]string{}
	for i, req := range requests {
		id := req.GetUid()
		eventually(t, "the hook ran", func() bool {
			out, _ := b.sh(id, "cat /tmp/hooked 2>/dev/null; test $(cat /tmp/seed) != template && kill -0 $(cat /tmp/pid) && echo done")
			return out == id+"\ndone\n"
		})
		for _, own := range b.claimed(id, fmt.Sprintf("claimed-%d", i)) {
			if other, taken := seen[own]; taken {
				t.Errorf("%s and %s both have %q", id, other, own)
			}
			seen[own] = id
		}
		again, err := b.agent.ClaimSandbox(ctx(t), req)
		must(t, err)
		if again.GetSandbox().GetPhase() != running {
			t.Errorf("claimed again it is %v", again)
		}
		req.Command = b.cmd()
		_, err = b.agent.ClaimSandbox(ctx(t), req)
		wantReason(t, err, errs.WrongPhase)
	}
	for _, req := range requests {
		b.delete(req.GetUid())
	}
	b.doctor()
}

// TestClaimsWhileOthersAreCaptured: claims do not wait for the captures that the node is busy with, and neither fails.
func TestClaimsWhileOthersAreCaptured(t *testing.T) {
	b := newBench(t)
	snap := b.golden(hooked)
	var ready []string
	for range 4 {
		ready = append(ready, b.park(snap))
	}
	busy := b.start()
	if out, code := b.sh(busy.GetUid(), "head -c 48000000 /dev/urandom >/tmp/ballast"); code != 0 {
		t.Fatalf("%q", out)
	}
	ending, stop := context.WithCancel(ctx(t))
	captures := make(chan string, 1000)
	began := make(chan struct{}, 1)
	next := b.numbered("capture")
	done := make(chan error, 1)
	go func() {
		defer close(captures)
		for ending.Err() == nil {
			id := uid.New()
			select {
			case began <- struct{}{}:
			default:
			}
			if _, err := b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: next(), Uid: busy.GetUid(), SnapshotUid: id}); err != nil {
				done <- err
				return
			}
			captures <- id
		}
		done <- nil
	}()
	<-began
	for i, id := range ready {
		resp, err := b.agent.ClaimSandbox(ctx(t), b.claim(id, fmt.Sprintf("amid-%d", i)))
		must(t, err)
		if resp.GetSandbox().GetPhase() != running {
			t.Errorf("claimed it is %v", resp)
		}
		b.claimed(id, fmt.Sprintf("amid-%d", i))
	}
	stop()
	must(t, <-done)
	for id := range captures {
		_, err := b.agent.DeleteSnapshot(ctx(t), &nodev1.DeleteSnapshotRequest{Command: b.cmd(), Uid: id})
		must(t, err)
	}
	b.delete(busy.GetUid())
	for _, id := range ready {
		b.delete(id)
	}
	b.doctor()
}

// TestAParkedSandboxStandsOverAKill: agentd is killed while sandboxes stand ready; the next one gives them away.
func TestAParkedSandboxStandsOverAKill(t *testing.T) {
	b := newBench(t)
	id := b.park(b.golden(hooked))
	must(t, b.stack.KillAgentd(ctx(t), 1))
	b.startAgentd()
	cfg := Config{RunDir: filepath.Join(b.stack.NodeDir(1), "run")}
	if _, body := get(t, cfg, "/metrics"); !strings.Contains(body, "dormouse_agentd_parked_sandboxes 1\n") || strings.Contains(body, "dormouse_agentd_parked_bytes 0\n") {
		t.Error("the metrics do not count what stands ready")
	}
	req := b.claim(id, "after")
	resp, err := b.agent.ClaimSandbox(ctx(t), req)
	must(t, err)
	if resp.GetSandbox().GetPhase() != running {
		t.Fatalf("claimed it is %v", resp)
	}
	b.claimed(id, "after")
	_, body := get(t, cfg, "/metrics")
	for _, want := range []string{"dormouse_agentd_parked_sandboxes 0\n", "dormouse_agentd_parked_bytes 0\n", `dormouse_agentd_step_seconds_count{outcome="ok",step="guest",verb="claim"} 1`} {
		if !strings.Contains(body, want) {
			t.Errorf("the metrics do not say %q", want)
		}
	}
	b.delete(id)
	b.doctor()
}

// BenchmarkClaim tells the medians of a claim and of a pause and a resume of the same sandbox, asked for by one who stands beside agentd, and what 100
// sandboxes that stand ready take of CPU and memory:
//
//	go test -run '^$' -bench Claim -benchtime 40x ./agentd/app
func BenchmarkClaim(b *testing.B) {
	w := newBench(b)
	snap := w.golden(hooked)
	took := map[string][]time.Duration{}
	timed := func(what string, do func() error) {
		began := time.Now()
		must(b, do())
		took[what] = append(took[what], time.Since(began))
	}
	for i := range b.N {
		id := w.park(snap)
		timed("claim", func() error { _, err := w.agent.ClaimSandbox(ctx(b), w.claim(id, fmt.Sprintf("n-%d", i))); return err })
		timed("pause", func() error {
			_, err := w.agent.PauseSandbox(ctx(b), &nodev1.PauseSandboxRequest{Command: w.cmd(), Uid: id})
			return err
		})
		timed("resume", func() error {
			_, err := w.agent.ResumeSandbox(ctx(b), &nodev1.ResumeSandboxRequest{Command: w.cmd(), Uid: id})
			return err
		})
		w.delete(id)
	}
	for what, all := range took {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "ms-"+what)
		b.ReportMetric(float64(all[len(all)*95/100].Microseconds())/1000, "ms-"+what+"-p95")
	}
}

// BenchmarkParked tells what each of 100 sandboxes that stand ready takes, and what all of them take of the CPU:
//
//	go test -run '^$' -bench Parked -benchtime 1x ./agentd/app
func BenchmarkParked(b *testing.B) {
	w := newBench(b)
	snap := w.golden(hooked)
	groups, err := cgroup.Open(cgroup.Options{Parent: w.stack.CgroupParent(1)})
	must(b, err)
	const count, watched = 100, 20 * time.Second
	var all []string
	for range count {
		all = append(all, w.park(snap))
	}
	sum := func() (cpu time.Duration, memory int64) {
		for _, id := range all {
			used, err := groups.Group(id).CPU()
			must(b, err)
			held, err := groups.Group(id).InMemory()
			must(b, err)
			cpu, memory = cpu+used, memory+held
		}
		return cpu, memory
	}
	for range b.N {
		before, _ := sum()
		must(b, wait.For(ctx(b), watched))
		after, memory := sum()
		b.ReportMetric(float64((after-before).Microseconds())/watched.Seconds()/1000, "cpu-ms/s-of-all")
		b.ReportMetric(float64(memory)/count/(1<<20), "MiB-each")
	}
	for _, id := range all {
		w.delete(id)
	}
}
