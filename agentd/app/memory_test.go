package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const mib = 1 << 20

// small is a node with little memory: what its sandboxes use counts against it, whatever else the machine has.
func small(t *testing.T) *bench {
	b := newBench(t)
	must(t, b.stack.StopAgentd(ctx(t), 1))
	file := b.stack.AgentdConfig(1)
	text, err := os.ReadFile(file)
	must(t, err)
	must(t, os.WriteFile(file, append(text, "limits: {memory: 512Mi, memory_wait: 300ms}\nreserve: {memory: 64Mi}\n"...), 0o600))
	b.startAgentd()
	return b
}

func sized(request, limit int64) func(*nodev1.StartSandboxRequest) {
	return func(r *nodev1.StartSandboxRequest) {
		r.Spec.Resources = &dormousev1.Resources{MemoryRequestBytes: request, MemoryLimitBytes: limit}
	}
}

// shortOf is a refusal for want of memory, with numbers.
func shortOf(t *testing.T, err error, asked int64) {
	t.Helper()
	wantReason(t, err, errs.OutOfMemory)
	e := errs.From(err)
	left, parseErr := strconv.ParseInt(e.Details["left"], 10, 64)
	if e.Code != errs.ResourceExhausted || e.Outcome != errs.NotStarted || e.Details["resource"] != "memory" || parseErr != nil || left < 0 ||
		asked != 0 && (e.Details["asked"] != fmt.Sprint(asked) || left >= asked) {
		t.Fatalf("%+v", e)
	}
}

// TestANodeWithoutRoomRefuses: a sandbox that grew past its request takes what nobody was promised; the next one is refused with
// numbers, and started once the first is gone.
func TestANodeWithoutRoomRefuses(t *testing.T) {
	b := small(t)
	hog := b.start(sized(32*mib, 400*mib)).GetUid()
	if out, code := b.sh(hog, "dd if=/dev/urandom of=/root/fill bs=1M count=250 2>&1"); code != 0 {
		t.Fatalf("%d: %s", code, out)
	}
	next := &nodev1.StartSandboxRequest{Command: b.cmd(), Uid: uid.New(), Generation: 1, Spec: &dormousev1.SandboxSpec{Image: b.image}}
	sized(256*mib, 300*mib)(next)
	_, err := b.agent.StartSandbox(ctx(t), next)
	shortOf(t, err, 256*mib)
	b.start(sized(16*mib, 64*mib))

	b.sandboxesGoFirst(hog)
	b.agentdIsProtected()

	b.delete(hog)
	_, err = b.agent.StartSandbox(ctx(t), next) // the same command
	must(t, err)
	b.doctor()
}

// sandboxesGoFirst looks at the kernel's order of whom to kill. Processes come and go: a command that is just being started is as its parent was for
// a moment.
func (b *bench) sandboxesGoFirst(uid string) {
	b.t.Helper()
	eventually(b.t, "all processes of a sandbox have an oom_score_adj of 500", func() bool {
		seen, right := 0, 0
		for _, mount := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup"} {
			lists, err := filepath.Glob(mount + b.stack.CgroupParent(1) + "/" + uid + "/cgroup.procs")
			must(b.t, err)
			for _, list := range lists {
				pids, err := os.ReadFile(list)
				must(b.t, err)
				for _, pid := range strings.Fields(string(pids)) {
					score, err := os.ReadFile("/proc/" + pid + "/oom_score_adj")
					if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
						continue // it is gone
					}
					must(b.t, err)
					seen++
					if strings.TrimSpace(string(score)) == "500" {
						right++
					}
				}
			}
		}
		return seen > 0 && right == seen
	})
}

// agentdIsProtected looks for agentd in a group of its own. On v2 it stays where it was started, unless that is the root.
func (b *bench) agentdIsProtected() {
	b.t.Helper()
	dir := "/sys/fs/cgroup/memory" + b.stack.CgroupParent(1) + "-agentd"
	low, err := os.ReadFile(filepath.Join(dir, "memory.soft_limit_in_bytes"))
	if os.IsNotExist(err) {
		if _, v2 := os.Stat("/sys/fs/cgroup/cgroup.controllers"); v2 == nil {
			return
		}
	}
	must(b.t, err)
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	must(b.t, err)
	if strings.TrimSpace(string(low)) != strconv.Itoa(128*mib) || !slices.Contains(strings.Fields(string(procs)), strconv.Itoa(b.stack.PID("agentd1"))) {
		b.t.Errorf("the group %s has %s and the processes %q, agentd is %d", dir, low, procs, b.stack.PID("agentd1"))
	}
}

// TestABurstOfRestoresIsBounded: each brings far more memory than it requested, none has touched it when the next one asks, and all that were let in
// live.
func TestABurstOfRestoresIsBounded(t *testing.T) {
	b := small(t)
	box := b.start(sized(16*mib, 256*mib)).GetUid()
	if out, code := b.sh(box, "dd if=/dev/urandom of=/root/fill bs=1M count=80 2>&1; sha256sum /root/fill > /root/sum"); code != 0 {
		t.Fatalf("%d: %s", code, out)
	}
	snap := uid.New()
	_, err := b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box, SnapshotUid: snap})
	must(t, err)
	b.delete(box)

	const copies = 12
	var all sync.WaitGroup
	uids, failed := make([]string, copies), make([]error, copies)
	for i := range copies {
		req := &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), Generation: 1, SnapshotUid: snap}
		all.Go(func() {
			c, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			_, failed[i] = b.agent.RestoreSandbox(c, req)
			uids[i] = req.GetUid()
		})
	}
	all.Wait()
	in := 0
	for i, err := range failed {
		if err != nil {
			shortOf(t, err, 0)
			continue
		}
		in++
		if out, code := b.sh(uids[i], "sha256sum -c /root/sum"); code != 0 {
			t.Errorf("restored %d: %d: %s", i, code, out)
		}
	}
	// 448 MiB are to be given, 80 and what it takes to run are brought by each.
	if in < 2 || in > 5 {
		t.Errorf("%d of %d were let in", in, copies)
	}
	b.doctor()
}
