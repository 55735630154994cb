package hostile

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestHostilePrograms: programs in ordinary sandboxes that take whatever they can, all at the same time.
func TestHostilePrograms(t *testing.T) {
	w := enter(t)
	limited := func(spec *dormousev1.SandboxSpec) {
		spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 192 * mib, CpuLimitMillis: 500, DiskLimitBytes: 64 * mib}
	}
	lines := map[string]string{
		"forks":     "f() { f | f & }; f; sleep 1000",
		"processes": "i=0; while [ $i -lt 600 ]; do sleep 1000 & i=$((i+1)); done; wait",
		"floods":    "yes flood >&2 & yes flood",
		"clock":     "date -s 2001-01-01; hwclock -w; adjtimex -t 9000; while :; do date; done",
		"deep":      "i=0; while [ $i -lt 300 ]; do mkdir d && cd d || break; i=$((i+1)); done; cd /; i=0; while [ $i -lt 3000 ]; do : > /tmp/f$i; i=$((i+1)); done; sleep 1000",
		"channel":   "for n in 0 1 2; do cat /dev/zero > /proc/1/fd/$n & cat /proc/1/fd/$n & done; wait",
	}
	boxes := make(map[string]*client.Sandbox)
	for name, line := range lines {
		boxes[name] = w.create(name, limited)
		w.begin(boxes[name], line)
	}
	boxes["kills"] = w.create("kills", limited)
	w.beginOnceAnswered(boxes["kills"], "while :; do kill -9 1; kill -9 -1; kill -STOP 1; done")
	for range 3 {
		w.neighbour()
	}
	for name, s := range boxes {
		ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
		snap, err := s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
		cancel()
		w.ok(s.Refresh(w.ctx))
		t.Logf("checkpoint of %s: %v; it is %s %s", name, err, s.Last.GetStatus().GetPhase(), s.Last.GetStatus().GetReason())
		if name == "processes" && errs.Has(err, errs.SandboxFailed) {
			w.eventually("the save that its memory was too small for is called so", func() bool {
				w.ok(s.Refresh(w.ctx))
				return s.Last.GetStatus().GetReason() == "OOMKilled"
			})
		}
		if err == nil {
			w.ok(snap.Delete(w.ctx, ""))
		}
		w.ok(s.Delete(w.ctx, ""))
	}
	w.neighbour()
}

// TestHostileDiskFilled: a full writable layer is ENOSPC inside, and costs nobody his sandbox.
func TestHostileDiskFilled(t *testing.T) {
	w := enter(t)
	s := w.create("fills", func(spec *dormousev1.SandboxSpec) {
		spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 256 * mib, DiskLimitBytes: 64 * mib}
	})
	out := w.sh(s, "dd if=/dev/zero of=/fill bs=1M count=1000 2>&1; i=0; while : > /f$i 2>/dev/null; do i=$((i+1)); [ $i -lt 20000 ] || break; done; echo; df -m / | tail -1")
	if !strings.Contains(out, "No space left on device") {
		t.Fatalf("dd says %q", out)
	}
	if got := w.sh(s, "rm -f /fill && echo well > /tmp/x && cat /tmp/x"); got != "well\n" {
		t.Fatalf("afterwards %q", got)
	}
	w.neighbour()
}

// TestB26OutOfMemory: the counter of the control group says OOMKilled; a kill is a kill.
func TestB26OutOfMemory(t *testing.T) {
	w := enter(t)
	ended := func(s *client.Sandbox) (reason string) {
		w.ok(s.Await(w.ctx, func(p *dormousev1.Sandbox) bool {
			reason = p.GetStatus().GetReason()
			return p.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED
		}))
		return reason
	}
	greedy := w.create("greedy", func(spec *dormousev1.SandboxSpec) {
		spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 64 * mib, DiskLimitBytes: 8 * mib}
	})
	w.beginOnceAnswered(greedy, "dd if=/dev/zero of=/dev/null bs=500M count=1")
	if reason := ended(greedy); reason != "OOMKilled" {
		t.Errorf("out of memory is called %s", reason)
	}
	killed := w.create("killed", nil)
	w.ok(unix.Kill(w.sentry(killed), unix.SIGKILL))
	if reason := ended(killed); reason != "Killed" {
		t.Errorf("a killed sandbox is called %s", reason)
	}
	for _, s := range []*client.Sandbox{greedy, killed} {
		w.ok(s.Delete(w.ctx, ""))
	}
}

// sentry finds the process of a sandbox.
func (w *world) sentry(s *client.Sandbox) int {
	w.Helper()
	found := 0
	w.eventually("the sandbox's process", func() bool {
		found = processWith("boot", "--root="+w.NodeDir(1), s.UID)
		return found != 0
	})
	return found
}

// TestB27CheckpointUnderLoad: output floods and input lies unread while the sandbox is captured. Nothing
// of either is lost, in the source or in a fork, and nothing comes twice.
func TestB27CheckpointUnderLoad(t *testing.T) {
	w := enter(t)
	s := w.create("busy", nil)
	counter := w.begin(s, "i=0; while [ ! -e /tmp/end ]; do echo $i; i=$((i+1)); done")
	reader := w.begin(s, "while [ ! -e /tmp/go ]; do sleep 0.05; done; cat > /tmp/got")
	unread := bytes.Repeat([]byte("0123456789abcde\n"), 2500) // 40 kB: the process's pipe and more
	w.ok(reader.Write(w.ctx, unread, false))
	follow := func(p *client.Process) (*numbers, chan error) {
		n, done := &numbers{seen: make(chan struct{})}, make(chan error, 1)
		go func() {
			_, err := p.Follow(w.ctx, &client.Output{Stdout: n, Gap: n.gap}, true)
			done <- err
		}()
		return n, done
	}
	source, sourceDone := follow(counter)
	var snap *client.Snapshot
	for range 3 {
		<-source.seen
		var err error
		snap, err = s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
		w.ok(err)
	}
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SnapshotUid: snap.UID, Count: 2})
	w.ok(err)
	for _, box := range append(copies, s) {
		n, done := source, sourceDone
		if box != s {
			n, done = follow(box.Process(counter.ID))
		}
		w.ok(box.Process(reader.ID).Write(w.ctx, []byte("the end\n"), true))
		w.sh(box, "touch /tmp/go /tmp/end")
		w.ok(<-done)
		if n.bad != "" {
			t.Errorf("%s: %s", box.UID, n.bad)
		}
		t.Logf("%s counted to %d, %d bytes were gone before they were read", box.UID, n.next, n.gone)
		if exit, err := box.Process(reader.ID).Wait(w.ctx); err != nil || exit.GetCode() != 0 {
			t.Errorf("the reader: %v %v", exit, err)
		}
		if got := w.sh(box, "cat /tmp/got"); got != string(unread)+"the end\n" {
			t.Errorf("%s read %d bytes of %d", box.UID, len(got), len(unread)+8)
		}
	}
	w.neighbour()
}

// numbers is a writer that wants one number after the other. A reader that is slower than the flood is
// told how much is gone: that is no loss, and the numbers go on behind it.
type numbers struct {
	rest  []byte
	next  int
	jump  bool
	gone  uint64
	bad   string
	seen  chan struct{}
	lines int
}

func (n *numbers) gap(_ dormousev1.OutputStream, bytes uint64) { n.jump, n.gone = true, n.gone+bytes }

func (n *numbers) Write(b []byte) (int, error) {
	n.rest = append(n.rest, b...)
	if n.jump { // the first whole line after a gap
		i := bytes.IndexByte(n.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		n.rest, n.jump, n.next = n.rest[i+1:], false, -1
	}
	for {
		line, rest, ok := bytes.Cut(n.rest, []byte("\n"))
		if !ok {
			break
		}
		n.rest = rest
		got, err := strconv.Atoi(string(line))
		if n.next < 0 {
			n.next = got
		}
		if (err != nil || got != n.next) && n.bad == "" {
			n.bad = fmt.Sprintf("after %d comes %q", n.next-1, line)
		}
		n.next = got + 1
		n.lines++
	}
	select {
	case n.seen <- struct{}{}:
	default:
	}
	return len(b), nil
}

// TestB28DivergedVolume: a file that the guest held open is gone: the restore says which, and succeeds
// once it is back.
func TestB28DivergedVolume(t *testing.T) {
	w := enter(t)
	v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Name: "data"})
	w.ok(err)
	with := func(spec *dormousev1.SandboxSpec) {
		spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: v.UID, Path: "/data"}}
	}
	s := w.create("holder", with)
	holder := w.begin(s, "mkdir -p /data/sub; echo kept > /data/sub/file; exec 3< /data/sub/file; echo ready; while [ ! -e /tmp/go ]; do sleep 0.05; done; cat <&3")
	w.eventually("it holds the file", func() bool { return w.output(holder) == "ready\n" })
	snap, err := s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	w.sh(s, "mv /data/sub/file /data/elsewhere")
	w.ok(s.Delete(w.ctx, ""))

	_, err = snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Name: "diverged"})
	if errs.ReasonOf(err) != errs.VolumeDiverged || !strings.Contains(errs.From(err).Details["path"], "file") {
		t.Fatalf("restore over a removed file: %v, details %v", err, errs.From(err).Details)
	}
	mender := w.create("mender", with)
	w.sh(mender, "mv /data/elsewhere /data/sub/file")
	w.ok(mender.Delete(w.ctx, ""))
	back, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Name: "back"})
	w.ok(err)
	w.sh(back, "touch /tmp/go")
	w.eventually("it reads the file", func() bool { return w.output(back.Process(holder.ID)) == "ready\nkept\n" })
}

// output reads what there is of a process's standard output.
func (w *world) output(p *client.Process) string {
	w.Helper()
	var out bytes.Buffer
	_, err := p.Follow(w.ctx, &client.Output{Stdout: &out}, false)
	w.ok(err)
	return out.String()
}

// TestB29StuckSentry: looking does not wait for a sentry that stands still, and deleting ends it.
func TestB29StuckSentry(t *testing.T) {
	w := enter(t)
	s := w.create("stuck", nil)
	big := w.create("big", func(spec *dormousev1.SandboxSpec) {
		spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 3 << 30, DiskLimitBytes: 1200 * mib}
	})
	w.sh(big, "dd if=/dev/urandom of=/big bs=1M count=1024 2>/dev/null")
	snap, err := big.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	w.ok(unix.Kill(w.sentry(s), unix.SIGSTOP))
	look := func() {
		t.Helper()
		// What waits for the sentry ends with DEADLINE_EXPIRED; what does not has time, on a busy machine too.
		ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
		defer cancel()
		w.ok(s.Refresh(ctx))
		if _, err := client.Collect(w.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})); err != nil {
			t.Fatal(err)
		}
	}
	look()
	stuck := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
		defer cancel()
		_, err := s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
		stuck <- err
	}()
	restored := make(chan error, 1)
	go func() {
		copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Name: "copy"})
		if err == nil {
			err = copied.Delete(w.ctx, "")
		}
		restored <- err
	}()
	for {
		look()
		if _, err := w.Overview(w.ctx, 1); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-restored:
			w.ok(err)
		default:
			continue
		}
		break
	}
	if err := <-stuck; err == nil {
		t.Error("a stuck sandbox was captured")
	}
	look()
	w.neighbour()
	w.ok(s.Delete(w.ctx, ""))
}
