package runner

import (
	"context"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

func TestCommandsRunOnce(t *testing.T) {
	a := newWorld(t).boot()
	session := nodestate.Epochs{Session: 7}
	c := NewCommands(a.store, func() fence.Epoch { return session.Session })
	defer c.Close()
	runs := 0
	run := func(context.Context) ([]byte, error) { runs++; return []byte("done"), nil }
	cmd := Command{Coordinator: 3, Session: 7, ID: "x", Kind: "k", Digest: "d"}
	for range 2 {
		got, err := c.Do(ctx(t), cmd, run)
		if err != nil || string(got) != "done" || runs != 1 {
			t.Fatalf("%q %v after %d runs", got, err, runs)
		}
	}
	other := cmd
	other.Digest = "e"
	wantReason(t, second(c.Do(ctx(t), other, run)), errs.OperationBodyMismatch)
	stale := Command{Coordinator: 2, Session: 7, ID: "y", Kind: "k"}
	wantReason(t, second(c.Do(ctx(t), stale, run)), errs.Fenced)
	wantReason(t, second(c.Do(ctx(t), Command{Coordinator: 9, Session: 6, ID: "y", Kind: "k"}, run)), errs.Fenced)
	if e, err := a.store.Epochs(); err != nil || e.Coordinator != 9 {
		t.Fatalf("the newer epoch was not persisted first: %v %v", e, err)
	}
	// A failure that is final is kept; one that may pass is not.
	cmd.Coordinator = 9
	for reason, kept := range map[errs.Reason]int{errs.ImageNotFound: 1, errs.DiskFull: 2} {
		runs = 0
		cmd.ID = string(reason)
		for range 2 {
			_, err := c.Do(ctx(t), cmd, func(context.Context) ([]byte, error) { runs++; return nil, errs.New(reason, "no") })
			wantReason(t, err, reason)
		}
		if runs != kept {
			t.Errorf("%s ran %d times, want %d", reason, runs, kept)
		}
	}
	// What the records would answer again is answered from what waits to be written; its failures are written.
	cmd.ID, cmd.Repeats, runs = "again", true, 0
	for range 2 {
		got, err := c.Do(ctx(t), cmd, run)
		if err != nil || string(got) != "done" || runs != 1 {
			t.Fatalf("%q %v after %d runs", got, err, runs)
		}
	}
	cmd.ID, runs = "failed", 0
	for range 2 {
		_, err := c.Do(ctx(t), cmd, func(context.Context) ([]byte, error) { runs++; return nil, errs.New(errs.ImageNotFound, "no") })
		wantReason(t, err, errs.ImageNotFound)
	}
	if runs != 1 {
		t.Errorf("ran %d times", runs)
	}
	cmd.Repeats = false
	// A caller that goes away loses nothing.
	cmd.ID = "gone"
	call, cancel := context.WithCancel(ctx(t))
	release := make(chan struct{})
	first := make(chan error, 1)
	go func() {
		first <- second(c.Do(call, cmd, func(work context.Context) ([]byte, error) {
			cancel()
			<-release
			return []byte("late"), work.Err()
		}))
	}()
	wantReason(t, <-first, errs.CallCancelled)
	close(release)
	got, err := c.Do(ctx(t), cmd, run)
	if err != nil || string(got) != "late" {
		t.Fatalf("%q %v", got, err)
	}
}

// A start that was held up on its way in, and that its caller gave up and deleted meanwhile, begins nothing.
func TestWhatNobodyWaitsForDoesNotBegin(t *testing.T) {
	a := newWorld(t).boot()
	caller, leave := context.WithCancel(ctx(t))
	c := NewCommands(a.store, func() fence.Epoch { leave(); return 7 })
	defer c.Close()
	_, err := c.Do(caller, Command{Coordinator: 3, Session: 7, ID: "x", Kind: "k"}, func(context.Context) ([]byte, error) {
		t.Error("it ran")
		return nil, nil
	})
	wantReason(t, err, errs.CallCancelled)
	c.Close()

	// The caller leaves between that look and the sandbox's own goroutine.
	req := startRequest()
	must(t, a.Delete(ctx(t), req.UID))
	_, err = a.Start(context.WithValue(ctx(t), callerKey{}, caller), req)
	wantReason(t, err, errs.CallCancelled)
	if e := errs.From(err); e.Outcome != errs.NotStarted {
		t.Errorf("the outcome is %s", e.Outcome)
	}
	a.wantGone(req.UID)
	// What was made is given to whoever asks, whether he waits or not.
	_, err = a.Start(ctx(t), req)
	must(t, err)
	_, err = a.Start(context.WithValue(ctx(t), callerKey{}, caller), req)
	must(t, err)
	must(t, a.Delete(ctx(t), req.UID))
}
