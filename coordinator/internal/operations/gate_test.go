package operations

import (
	"context"
	"runtime"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Requests beyond the gate's width wait, beyond its bound they are refused, and what ends a wait has started nothing.
func TestGate(t *testing.T) {
	term, end := context.WithCancel(t.Context())
	defer end()
	g := newGate(1, 1)
	leave, err := g.enter(t.Context(), term, "a")
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() {
		leave, err := g.enter(t.Context(), term, "a")
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
	if _, err := g.enter(t.Context(), term, "a"); !errs.Has(err, errs.QueueFull) || !errs.NotStartedFor(err) {
		t.Errorf("one too many: %v", err)
	}
	leave()
	if err := <-second; err != nil {
		t.Errorf("the one that waited: %v", err)
	}

	leave, err = g.enter(t.Context(), term, "a")
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.enter(gone, term, "b"); !errs.Has(err, errs.CallCancelled) || !errs.NotStartedFor(err) {
		t.Errorf("a caller that left: %v", err)
	}
	end()
	if _, err := g.enter(t.Context(), term, "a"); !errs.Has(err, errs.NoLeader) || !errs.NotStartedFor(err) {
		t.Errorf("the term ended: %v", err)
	}
	if n := g.waiting.Load(); n != 0 {
		t.Errorf("%d wait", n)
	}
}

// A crowd of one tenant's requests delays another tenant's by one of them, not by all.
func TestTenantsTakeTurnsAtTheGate(t *testing.T) {
	g := newGate(1, 100)
	leave, err := g.enter(t.Context(), t.Context(), "crowd")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan string, 11)
	for i := range 11 {
		tenant := "crowd"
		if i == 10 { // the last one
			tenant = "other"
		}
		go func() {
			leave, err := g.enter(t.Context(), t.Context(), tenant)
			if err != nil {
				tenant = err.Error()
			}
			served <- tenant
			leave()
		}()
		for g.inLine() <= i { // until it is in line
			runtime.Gosched()
		}
	}
	leave()
	first, second := <-served, <-served
	if first != "crowd" || second != "other" {
		t.Errorf("served were %s and %s", first, second)
	}
	for range 9 {
		if who := <-served; who != "crowd" {
			t.Errorf("served was %s", who)
		}
	}
}

func (g *gate) inLine() (n int) {
	g.turns.mu.Lock()
	defer g.turns.mu.Unlock()
	for _, w := range g.turns.lines[""].waiting {
		n += len(w)
	}
	return n
}
