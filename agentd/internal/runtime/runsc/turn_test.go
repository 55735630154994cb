package runsc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

// B18: an agent dies in the middle of a pause or a resume. The next one finds out what became of it, and the sandbox, whose
// stops are counted, goes on as if nothing had been.
func TestB18_AgentKilledDuringTurn(t *testing.T) {
	for name, tc := range map[string]struct {
		turn   turn
		asked  bool // the sandbox was asked before the end
		halves bool // only a part of the intent was written
		want   runtime.Phase
	}{
		"pause meant":           {turn: halt, want: runtime.Running},
		"pause half meant":      {turn: halt, halves: true, want: runtime.Running},
		"pause done, not told":  {turn: halt, asked: true, want: runtime.Paused},
		"resume meant":          {turn: goOn, want: runtime.Paused},
		"resume done, not told": {turn: goOn, asked: true, want: runtime.Running},
		"resume half meant":     {turn: goOn, halves: true, want: runtime.Paused},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			cfg := n.config(t, runtimetest.NewID(t), nil)
			n.deleteAtEnd(t, cfg.ID)
			h, err := n.d.Start(bounded(t), cfg)
			must(t, err)
			before := n.count(t, cfg.ID)
			if tc.turn == goOn {
				must(t, n.d.Pause(bounded(t), cfg.ID))
			}
			must(t, n.d.intendTurn(cfg.ID, tc.turn))
			if tc.halves {
				must(t, os.Truncate(n.d.turnPath(cfg.ID), 20))
			}
			if tc.asked {
				must(t, n.d.call(bounded(t), cfg.ID, tc.turn.method, struct{}{}, &struct{}{}))
			}
			next := n.testEnv.open(t)
			st, err := next.Recover(bounded(t), h)
			must(t, err)
			if st.Phase != tc.want {
				t.Errorf("recovered %s, want %s", st.Phase, tc.want)
			}
			if _, err := os.Lstat(n.d.turnPath(cfg.ID)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the intent is still there: %v", err)
			}
			must(t, next.Resume(bounded(t), cfg.ID))
			must(t, next.Pause(bounded(t), cfg.ID))
			must(t, next.Resume(bounded(t), cfg.ID))
			if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
				t.Errorf("the guest is %+v, was %+v", after, before)
			}
			must(t, next.Close())
		})
	}
}

// B18: a call that the dead agent sent and that the sandbox has not looked at yet is waited for: what it does comes before the
// next agent asks how the sandbox is.
func TestB18_TurnOnItsWayIsWaitedFor(t *testing.T) {
	n := newNode(t)
	cfg := n.config(t, runtimetest.NewID(t), nil)
	n.deleteAtEnd(t, cfg.ID)
	h, err := n.d.Start(bounded(t), cfg)
	must(t, err)
	before := n.count(t, cfg.ID)
	st, err := n.d.State(bounded(t), cfg.ID)
	must(t, err)
	must(t, unix.Kill(st.Pid, unix.SIGSTOP))
	lock, err := n.d.lockState(bounded(t), cfg.ID)
	must(t, err)
	must(t, n.d.intendTurn(cfg.ID, halt))
	gone, end := context.WithTimeout(t.Context(), 3*time.Second) // it is sent by then
	defer end()
	if err := n.d.call(gone, cfg.ID, halt.method, struct{}{}, &struct{}{}, lock.fd); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a sandbox that is stopped answered: %v", err)
	}
	lock.close() // as the end of the agent does

	next := n.testEnv.open(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := next.Recover(short, h); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v while the call was on its way, want the deadline", err)
	}
	must(t, unix.Kill(st.Pid, unix.SIGCONT))
	got, err := next.Recover(bounded(t), h)
	must(t, err)
	if got.Phase != runtime.Paused {
		t.Fatalf("recovered %+v, want it paused", got)
	}
	must(t, next.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
	must(t, next.Close())
}

// B18: a save that the dead agent asked for is waited for, and only then is anything said to the guest: what it was sent before would be taken by the
// save. The files are gone by then, as what nobody published is.
func TestB18_SaveOnItsWayIsWaitedFor(t *testing.T) {
	n := newNode(t)
	cfg := n.config(t, runtimetest.NewID(t), nil)
	n.deleteAtEnd(t, cfg.ID)
	first := n.testEnv.open(t)
	h, err := first.Start(bounded(t), cfg)
	must(t, err)
	before := n.count(t, cfg.ID)
	must(t, first.Pause(bounded(t), cfg.ID))
	st, err := first.State(bounded(t), cfg.ID)
	must(t, err)
	must(t, unix.Kill(st.Pid, unix.SIGSTOP))
	dir := filepath.Join(t.TempDir(), "staged")
	must(t, os.Mkdir(dir, 0o700))
	gone, end := context.WithTimeout(t.Context(), 3*time.Second) // it is sent by then
	defer end()
	if err := first.Save(gone, cfg.ID, runtime.SaveOptions{Dir: dir, Direct: true}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a sandbox that is stopped answered: %v", err)
	}
	must(t, first.Close())
	must(t, os.RemoveAll(dir))

	next := n.testEnv.open(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := next.Recover(short, h); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v while the save was on its way, want the deadline", err)
	}
	must(t, unix.Kill(st.Pid, unix.SIGCONT))
	got, err := next.Recover(bounded(t), h)
	must(t, err)
	if got.Phase != runtime.Paused {
		t.Fatalf("recovered %+v, want it paused", got)
	}
	if _, err := os.Lstat(next.savePath(cfg.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the note is still there: %v", err)
	}
	must(t, next.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
	must(t, next.Close())
}

// runsc itself finds what a turn left, and a turn what runsc left: an operator's hand and an agentd of another version
// go by the same file and lock.
func TestTurnsAndRunscAgree(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	rec, err := n.d.known(cfg.ID)
	must(t, err)
	byHand := func(what string) {
		t.Helper()
		must(t, n.d.run(bounded(t), command{rec: rec, args: []string{what, cfg.ID}}))
	}
	before := n.count(t, cfg.ID)
	must(t, n.d.Pause(bounded(t), cfg.ID))
	byHand("resume")
	n.wantPhase(t, cfg.ID, runtime.Running)
	byHand("pause")
	n.wantPhase(t, cfg.ID, runtime.Paused)
	must(t, n.d.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
}

func (n *node) wantPhase(t *testing.T, id string, want runtime.Phase) {
	t.Helper()
	st, err := n.d.State(bounded(t), id)
	must(t, err)
	if st.Phase != want {
		t.Fatalf("it is %s, want %s", st.Phase, want)
	}
}
