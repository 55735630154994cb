package runner

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Few sandboxes are ended at a time, and those that do not end hold up the others for a bounded time only.
func TestEndsArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnds()
		var leaves []func()
		for range cap(e.slots) {
			leaves = append(leaves, e.enter(t.Context()))
		}
		entered := make(chan func(), 2)
		go func() { entered <- e.enter(t.Context()) }()
		synctest.Wait()
		if len(entered) > 0 {
			t.Fatal("one more than there are places")
		}
		leaves[0]()
		synctest.Wait()
		if len(entered) == 0 {
			t.Fatal("a free place was not taken")
		}
		(<-entered)()

		e.enter(t.Context()) // all places are taken again, and none is ever left
		go func() { entered <- e.enter(t.Context()) }()
		time.Sleep(gatePatience + time.Millisecond)
		synctest.Wait()
		if len(entered) == 0 {
			t.Fatal("those that do not end hold up the others")
		}
		(<-entered)()
		for _, leave := range leaves {
			leave() // long after its place was taken away
		}
		if n := len(e.slots); n != 0 {
			t.Fatalf("%d places are taken and nobody is there", n)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		for range 2 * cap(e.slots) {
			e.enter(gone)
		}
		time.Sleep(gatePatience + time.Millisecond)
	})
}

// full takes all places of a gate until the test ends or they are freed.
func full(g *gate) (free func()) {
	for range cap(g.slots) {
		g.slots <- struct{}{}
	}
	return func() {
		for range cap(g.slots) {
			<-g.slots
		}
	}
}

// A start that waits has its intent recorded and nothing else done, is ended by a deletion, and otherwise goes on.
func TestAStartWaitsBeforeItsSteps(t *testing.T) {
	w := newWorld(t)
	a := w.boot()
	free := full(a.makes)
	dropped, kept := startRequest(), startRequest()
	done := map[string]chan error{dropped.UID: make(chan error, 1), kept.UID: make(chan error, 1)}
	for _, req := range []StartRequest{dropped, kept} {
		go func() {
			_, err := a.Start(ctx(t), req)
			done[req.UID] <- err
		}()
		eventually(t, "the intent", func() bool { _, err := a.store.Sandbox(req.UID); return err == nil })
		if left := slices.DeleteFunc(w.leftOf(req.UID), func(s string) bool { return strings.HasPrefix(s, "address") }); len(left) > 0 {
			t.Fatalf("made before its turn: %v", left)
		}
	}
	must(t, a.Delete(ctx(t), dropped.UID))
	wantReason(t, <-done[dropped.UID], errs.WrongPhase)
	a.wantGone(dropped.UID)
	free()
	must(t, <-done[kept.UID])
	rec, err := a.store.Sandbox(kept.UID)
	must(t, err)
	if rec.Phase != sandbox.Running || rec.StartQueued <= 0 {
		t.Errorf("%s after a wait of %s, want Running and the wait told", rec.Phase, rec.StartQueued)
	}
}

// A capture that waits holds no image and has asked its guest nothing, and leaves nothing when it is ended.
func TestACaptureWaitsBeforeItReads(t *testing.T) {
	w := newWorld(t)
	a := w.boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	free := full(a.captures)
	id, done := uid.New(), make(chan error, 1)
	go func() {
		_, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: id, CommandID: "c1"})
		done <- err
	}()
	eventually(t, "the intent", func() bool { _, err := a.store.Snapshot(id); return err == nil })
	wantReason(t, a.DeleteSnapshot(ctx(t), id), errs.WrongPhase)
	w.mu.Lock()
	holds := w.holds[id]
	w.mu.Unlock()
	if holds != "" {
		t.Error("the image is held before the turn")
	}
	must(t, a.Delete(ctx(t), req.UID))
	wantReason(t, <-done, errs.WrongPhase)
	a.wantGone(req.UID)
	if _, err := a.store.Snapshot(id); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("the snapshot's record: %v", err)
	}
	free()
}

// Restores have their share of the turns, and a start goes past those that wait for one.
func TestL02RestoresHaveTheirShareOfTheTurns(t *testing.T) {
	for _, c := range []struct{ width, restores, all, share int }{{0, 0, 1, 1}, {4, 0, 4, 4}, {4, 2, 4, 2}, {2, 5, 2, 2}} {
		if got := newTurns(c.width, c.restores); cap(got.all) != c.all || cap(got.restores) != c.share {
			t.Errorf("%d and %d: %d turns, %d for restores", c.width, c.restores, cap(got.all), cap(got.restores))
		}
	}
	turns := newTurns(3, 2)
	var leaves []func()
	take := func(restore bool) {
		t.Helper()
		leave, err := turns.take(ctx(t), restore)
		must(t, err)
		leaves = append(leaves, leave)
	}
	over, cancel := context.WithCancelCause(t.Context())
	cancel(errs.New(errs.WrongPhase, "deleted"))
	refused := func(restore bool) {
		t.Helper()
		all, restores := len(turns.all), len(turns.restores)
		leave, err := turns.take(over, restore)
		if err == nil {
			leave()
			t.Fatal("it has a turn that there is not")
		}
		wantReason(t, err, errs.WrongPhase)
		if len(turns.all) != all || len(turns.restores) != restores {
			t.Fatal("who went away took a turn along")
		}
	}
	take(true)
	take(true)
	refused(true)
	take(false) // the third
	refused(false)
	leaves[0]()
	take(false)
	refused(true) // its share is free, and no turn is
	for _, leave := range leaves[1:] {
		leave()
	}
	if turns.taken() || len(turns.restores) > 0 {
		t.Error("turns are taken, and nobody has one")
	}
}

// A restore that waits for the restores before it has no turn that a start could have.
func TestL02AStartGoesPastARestoreThatWaits(t *testing.T) {
	a, source, snap := checkpointed(t)
	must(t, a.Delete(ctx(t), source.UID))
	prepared := make(chan struct{})
	a.Measure = func(verb, step string, _ time.Duration, _ error) {
		if verb == "restore" && step == "spec" {
			close(prepared)
		}
	}
	a.turns.restores <- struct{}{} // somebody else's
	rr, done := restoreRequest(snap, source.Spec.Volumes[0].VolumeUID), make(chan error, 1)
	go func() {
		_, err := a.Restore(ctx(t), rr)
		done <- err
	}()
	<-prepared
	_, err := a.Start(ctx(t), startRequest()) // there is one turn at a time
	must(t, err)
	if _, runs := a.w.host.Count(rr.UID); runs {
		t.Error("it was restored out of turn")
	}
	<-a.turns.restores
	must(t, <-done)
}
