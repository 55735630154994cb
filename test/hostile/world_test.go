package hostile

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

const (
	mib = 1 << 20
	// bound is how long one test may take on a busy machine.
	bound = 6 * time.Minute
	// What an attack may cost agentd in memory and descriptors, over what it had before.
	memoryBound, descriptorBound = 160 * mib, 150
	// logTail is how much of agentd's log a failed test shows.
	logTail = 8 << 10
)

// world is one test's: the cluster, a sandbox of somebody else's, and a watch over agentd.
type world struct {
	*cluster.Cluster
	*testing.T
	ctx    context.Context //nolint:containedctx // of the test, like t.Context
	api    *client.Client
	honest *client.Sandbox
	agentd int
	watch  *usage
}

func enter(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: up(t), T: t}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	w.ctx, w.agentd = ctx, w.AgentdPID(1)
	w.api = w.ClientOf(t, strings.ToLower(t.Name()))
	t.Cleanup(func() {
		defer cancel()
		w.leave()
	})
	w.honest = w.create("neighbour", nil)
	w.neighbour()
	w.watch = watchUsage(w.agentd)
	return w
}

// create makes a sandbox that has to run.
func (w *world) create(name string, change func(*dormousev1.SandboxSpec)) *client.Sandbox {
	w.Helper()
	s, err := w.try(name, change)
	w.ok(err)
	return s
}

func (w *world) try(name string, change func(*dormousev1.SandboxSpec)) (*client.Sandbox, error) {
	spec := &dormousev1.SandboxSpec{Image: shared.image, Resources: &dormousev1.Resources{MemoryLimitBytes: 256 * mib}}
	if change != nil {
		change(spec)
	}
	return w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: name, Spec: spec})
}

func (w *world) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// sh runs a shell line in a sandbox; it has to succeed.
func (w *world) sh(s *client.Sandbox, line string) string {
	w.Helper()
	out, err := cluster.Exec(w.ctx, s, "sh", "-c", line)
	if err != nil {
		w.Fatalf("%s: %v", line, err)
	}
	return string(out)
}

// begin starts a shell line in a sandbox and leaves it alone.
func (w *world) begin(s *client.Sandbox, line string) *client.Process {
	w.Helper()
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", line}, Stdin: true}, "")
	w.ok(err)
	return p
}

// beginOnceAnswered is begin for what may be the end of its sandbox: it begins once its start was answered. Whether the word that lets it
// begin is answered too does not matter.
func (w *world) beginOnceAnswered(s *client.Sandbox, line string) {
	w.Helper()
	p := w.begin(s, "read word; "+line)
	ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
	defer cancel()
	if err := p.Write(ctx, []byte("go\n"), false); err != nil {
		w.Logf("%s: %v", line, err)
	}
}

// neighbour asks the honest sandbox, and checkpoints it.
func (w *world) neighbour() {
	w.Helper()
	began := time.Now()
	if got := w.sh(w.honest, "echo $((6*7))"); got != "42\n" {
		w.Fatalf("the neighbour says %q", got)
	}
	answered := time.Now()
	snap, err := w.honest.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	w.Logf("the neighbour answers after %s and is captured in %s", answered.Sub(began).Round(time.Millisecond), time.Since(answered).Round(time.Millisecond))
	w.ok(snap.Delete(w.ctx, ""))
}

// leave deletes everything, and looks for what the attack cost.
func (w *world) leave() {
	w.ctx = context.WithoutCancel(w.ctx)
	ctx, cancel := context.WithTimeout(w.ctx, 4*time.Minute)
	defer cancel()
	sandboxes, err := client.Collect(w.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	w.note(err)
	for _, s := range sandboxes {
		w.note(gone(w.api.Sandbox(s.GetMeta().GetUid()).Delete(ctx, "")))
	}
	snapshots, err := client.Collect(w.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	w.note(err)
	for _, s := range snapshots {
		w.note(gone(w.api.Snapshot(s.GetMeta().GetUid()).Delete(ctx, "")))
	}
	volumes, err := client.Collect(w.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	w.note(err)
	for _, v := range volumes {
		w.note(gone(w.api.Volume(v.GetMeta().GetUid()).Delete(ctx, "")))
	}
	found, err := w.Doctor(ctx, 1)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for looks := 0; looks < 300 && err == nil && len(found) > 0; looks++ { // what is being removed is no leftover yet
		<-tick.C
		found, err = w.Doctor(ctx, 1)
	}
	w.note(err)
	for _, f := range found {
		w.Errorf("the doctor finds %s %s: recorded %s, observed %s", f.GetKind(), f.GetName(), f.GetRecorded(), f.GetObserved())
	}
	if w.Failed() {
		data, err := os.ReadFile(w.Cluster.Log("agentd1"))
		w.Logf("agentd said (%v):\n%s", err, data[max(0, len(data)-logTail):])
	}
	if w.AgentdPID(1) != w.agentd {
		w.Error("agentd is another process than before")
	}
	if w.watch != nil {
		w.watch.check(w.T)
	}
}

func (w *world) note(err error) {
	w.Helper()
	if err != nil {
		w.Error(err)
	}
}

// gone takes a deletion that came second for done.
func gone(err error) error {
	if errs.Has(err, errs.ObjectNotFound) || errs.Has(err, errs.StaleUID) {
		return nil
	}
	return err
}

// eventually polls until the condition holds.
func (w *world) eventually(what string, holds func() bool) {
	w.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.Fatalf("never: %s", what)
		}
	}
}

// usage watches a process's memory and descriptors.
type usage struct {
	pid               int
	memory, files     int // before
	maxMemory, maxFds int
	stop              chan struct{}
	done              sync.WaitGroup
}

func watchUsage(pid int) *usage {
	u := &usage{pid: pid, memory: resident(pid), files: descriptors(pid), stop: make(chan struct{})}
	u.done.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			u.maxMemory, u.maxFds = max(u.maxMemory, resident(pid)), max(u.maxFds, descriptors(pid))
			select {
			case <-tick.C:
			case <-u.stop:
				return
			}
		}
	})
	return u
}

// check ends the watch and tells whether the bounds held.
func (u *usage) check(t *testing.T) {
	t.Helper()
	close(u.stop)
	u.done.Wait()
	t.Logf("agentd: %d MiB, at most %d; %d descriptors, at most %d", u.memory/mib, u.maxMemory/mib, u.files, u.maxFds)
	if u.maxMemory > u.memory+memoryBound {
		t.Errorf("agentd took %d MiB, %d before the attack", u.maxMemory/mib, u.memory/mib)
	}
	if u.maxFds > u.files+descriptorBound {
		t.Errorf("agentd had %d descriptors, %d before the attack", u.maxFds, u.files)
	}
	// Of the deleted sandboxes nothing is left open.
	tick, enough := time.NewTicker(20*time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for descriptors(u.pid) > u.files+10 {
		select {
		case <-tick.C:
		case <-enough:
			t.Errorf("agentd keeps %d descriptors, %d before the attack", descriptors(u.pid), u.files)
			return
		}
	}
}

// resident is how much memory a process has, in bytes; 0 when it is gone.
func resident(pid int) int {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	defer f.Close()
	for scan := bufio.NewScanner(f); scan.Scan(); {
		if rest, ok := strings.CutPrefix(scan.Text(), "VmRSS:"); ok {
			kb, _ := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(rest, "kB")))
			return kb << 10
		}
	}
	return 0
}

func descriptors(pid int) int {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0
	}
	return len(entries)
}

// processWith finds the process whose arguments hold all of the words, each as a part of one.
func processWith(words ...string) int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		data, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil {
			continue // it has ended
		}
		all := true
		for _, word := range words {
			all = all && strings.Contains(string(data), word)
		}
		if all {
			return pid
		}
	}
	return 0
}
