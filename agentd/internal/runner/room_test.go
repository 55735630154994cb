package runner

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// ledger is a room that notes who is in it, and how.
type ledger struct {
	mu     sync.Mutex
	in     map[string]string
	refuse error
	waits  bool
}

func (l *ledger) Enter(ctx context.Context, uid string, request, expect int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waits {
		l.mu.Unlock()
		<-ctx.Done()
		l.mu.Lock()
		return context.Cause(ctx)
	}
	if l.refuse != nil {
		return l.refuse
	}
	if l.in[uid] == "" {
		l.in[uid] = fmt.Sprintf("entered for %d, %v", request>>20, expect > restoreOverhead)
	}
	return nil
}

func (l *ledger) Settle(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.in[uid] != "" {
		l.in[uid] += ", settled"
	}
}

func (l *ledger) Leave(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.in, uid)
}

func (l *ledger) Spare() int64 { return 0 }

func (l *ledger) of(uid string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.in[uid]
}

func (l *ledger) set(change func(l *ledger)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
}

func roomWorld(t *testing.T) (*agent, *ledger) {
	w, l := newWorld(t), &ledger{in: map[string]string{}}
	w.room = l
	return w.boot(), l
}

// TestASandboxHasItsRoom: from before anything of it is recorded until its processes are gone.
func TestASandboxHasItsRoom(t *testing.T) {
	a, l := roomWorld(t)
	is := func(id, want string) {
		t.Helper()
		if got := l.of(id); got != want {
			t.Fatalf("the room says %q, want %q", got, want)
		}
	}
	const started, restored = "entered for 32, false, settled", "entered for 32, true, settled"
	req := startRequest()
	must(t, second(a.Start(ctx(t), req)))
	is(req.UID, started)
	must(t, second(a.Pause(ctx(t), req.UID)))
	is(req.UID, started)
	must(t, second(a.Hibernate(ctx(t), req.UID)))
	is(req.UID, "")
	full := errs.New(errs.OutOfMemory, "no room").With("asked", "2").With("left", "1")
	l.set(func(l *ledger) { l.refuse = full })
	wantReason(t, second(a.Resume(ctx(t), req.UID)), errs.OutOfMemory)
	a.sleeps(req)
	is(req.UID, "")
	l.set(func(l *ledger) { l.refuse = nil })
	must(t, second(a.Resume(ctx(t), req.UID)))
	is(req.UID, restored)

	snap, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: req.Tenant, CommandID: "save-1"})
	must(t, err)
	must(t, a.Delete(ctx(t), req.UID))
	is(req.UID, "")
	back := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
	must(t, second(a.Restore(ctx(t), back)))
	is(back.UID, restored)
	a.w.host.Exit(back.UID, runtime.Exit{Known: true, Signal: syscall.SIGKILL})
	eventually(t, "its room is free", func() bool { return l.of(back.UID) == "" })
	must(t, a.Delete(ctx(t), back.UID))
}

// TestARefusedSandboxLeavesNothing: neither a record nor anything else, whatever it was that there is too little of.
func TestARefusedSandboxLeavesNothing(t *testing.T) {
	a, l := roomWorld(t)
	l.set(func(l *ledger) { l.refuse = errs.New(errs.OutOfMemory, "no room") })
	req := startRequest()
	err := second(a.Start(ctx(t), req))
	wantReason(t, err, errs.OutOfMemory)
	if e := errs.From(err); e.Outcome != errs.NotStarted || e.Code != errs.ResourceExhausted {
		t.Fatalf("%+v", e)
	}
	a.wantGone(req.UID)
	// The same command again, once there is room.
	l.set(func(l *ledger) { l.refuse = nil })
	must(t, second(a.Start(ctx(t), req)))
	must(t, a.Delete(ctx(t), req.UID))

	// What fails later gives its room back.
	for _, what := range []string{"network", "start"} {
		req = startRequest()
		a.w.setFail(what, errs.New(errs.InternalError, "no"))
		a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
			if string(op) == what {
				return errs.New(errs.SandboxFailed, "no")
			}
			return nil
		})
		if err := second(a.Start(ctx(t), req)); err == nil || l.of(req.UID) != "" {
			t.Fatalf("%v, the room says %q", err, l.of(req.UID))
		}
		a.w.setFail(what, nil)
		a.w.host.SetHook(nil)
	}
}

// TestWaitingForRoomEnds: with the caller's time, or with a deletion.
func TestWaitingForRoomEnds(t *testing.T) {
	a, l := roomWorld(t)
	l.set(func(l *ledger) { l.waits = true })
	req := startRequest()
	short, cancel := context.WithTimeout(ctx(t), 20*time.Millisecond)
	defer cancel()
	if err := second(a.Start(short, req)); err == nil {
		t.Fatal("it was started")
	}
	must(t, a.Delete(ctx(t), req.UID))
	a.wantGone(req.UID)

	req = startRequest()
	ended := make(chan error, 1)
	go func() { ended <- second(a.Start(ctx(t), req)) }()
	eventually(t, "the deletion ended it", func() bool { return a.Delete(ctx(t), req.UID) == nil && len(ended) == 1 })
	wantReason(t, <-ended, errs.WrongPhase)
	a.wantGone(req.UID)
}

// owner gives the goroutine of a sandbox, nil if there is none.
func (a *agent) owner(uid string) *owner {
	a.Node.mu.Lock()
	defer a.Node.mu.Unlock()
	return a.owners[uid]
}

// endsFor ends what runs, as a deletion does that never arrives.
func (o *owner) endsFor(cause error) {
	t := &task{ends: cause}
	o.announce(t)
	o.arrived(t)
}

// A start that waits for room is ended by a deletion that came before it began, too.
func TestWhatBeginsBeforeADeletionEndsForIt(t *testing.T) {
	a, l := roomWorld(t)
	l.set(func(l *ledger) { l.waits = true })
	req := startRequest()
	busy, free := make(chan struct{}), make(chan struct{})
	first, started, deleted := make(chan error, 1), make(chan error, 1), make(chan error, 1)
	go func() {
		first <- a.do(ctx(t), req.UID, false, func(context.Context, *owner) error {
			close(busy)
			<-free
			return nil
		})
	}()
	<-busy
	o := a.owner(req.UID)
	go func() { started <- second(a.Start(ctx(t), req)) }()
	eventually(t, "the start is in line", func() bool { return len(o.inbox) == 1 })
	go func() { deleted <- a.Delete(ctx(t), req.UID) }()
	eventually(t, "the deletion is in line", func() bool { return len(o.inbox) == 2 })
	close(free)
	must(t, <-first)
	wantReason(t, <-started, errs.WrongPhase)
	must(t, <-deleted)
	a.wantGone(req.UID)
	// What begins after the deletion does not end for it.
	l.set(func(l *ledger) { l.waits = false })
	must(t, second(a.Start(ctx(t), req)))
}
