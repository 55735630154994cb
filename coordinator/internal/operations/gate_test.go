package operations

import (
	"context"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Requests beyond the gate's width wait, beyond its bound they are refused, and what ends a wait has started nothing.
func TestGate(t *testing.T) {
	term, end := context.WithCancel(t.Context())
	defer end()
	g := newGate(1, 1)
	leave, err := g.enter(t.Context(), term)
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() {
		leave, err := g.enter(t.Context(), term)
		if err == nil {
			leave()
		}
		second <- err
	}()
	for g.waiting.Load() == 0 { // it stands at the gate
		if t.Context().Err() != nil {
			t.Fatal("nobody waits")
		}
	}
	if _, err := g.enter(t.Context(), term); !errs.Has(err, errs.QueueFull) || !errs.NotStartedFor(err) {
		t.Errorf("one too many: %v", err)
	}
	leave()
	if err := <-second; err != nil {
		t.Errorf("the one that waited: %v", err)
	}

	leave, err = g.enter(t.Context(), term)
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.enter(gone, term); !errs.Has(err, errs.CallCancelled) || !errs.NotStartedFor(err) {
		t.Errorf("a caller that left: %v", err)
	}
	end()
	if _, err := g.enter(t.Context(), term); !errs.Has(err, errs.NoLeader) || !errs.NotStartedFor(err) {
		t.Errorf("the term ended: %v", err)
	}
	if n := g.waiting.Load(); n != 0 {
		t.Errorf("%d wait", n)
	}
}
