package operations

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"
)

// Who stops waiting for a turn, or has got it in that very moment, leaves nothing behind.
func TestTurnsOfThoseWhoLeave(t *testing.T) {
	turns := newTurns(1)
	leave, err := turns.take(t.Context(), "n1", "a")
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("the term ended")
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := make(chan error, 2)
	for _, tenant := range []string{"a", "b"} {
		go func() {
			_, err := turns.take(ctx, "n1", tenant)
			gone <- err
		}()
	}
	if _, err := turns.take(t.Context(), "n2", "a"); err != nil { // another node's disk
		t.Fatal(err)
	}
	cancel(cause)
	for range 2 {
		if err := <-gone; !errors.Is(err, cause) {
			t.Fatal(err)
		}
	}
	leave()
	leave() // once is enough
	if leave, err = turns.take(t.Context(), "n1", "c"); err != nil {
		t.Fatal(err)
	}
	leave()
	turns.mu.Lock()
	defer turns.mu.Unlock()
	if turns.lines["n1"] != nil || turns.lines["n2"].active != 1 {
		t.Errorf("left: %+v, %+v", turns.lines["n1"], turns.lines["n2"])
	}
}

// Tenants take turns, whoever came first with however many.
func TestTurnsAreShared(t *testing.T) {
	turns := newTurns(1)
	leave, err := turns.take(t.Context(), "n1", "a")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan string, 5)
	for i, tenant := range []string{"a", "a", "a", "b", "c"} {
		go func() {
			leave, err := turns.take(t.Context(), "n1", tenant)
			if err != nil {
				tenant = err.Error()
			}
			served <- tenant
			leave()
		}()
		for waiting := 0; waiting <= i; { // until it is in line
			turns.mu.Lock()
			waiting = 0
			for _, w := range turns.lines["n1"].waiting {
				waiting += len(w)
			}
			turns.mu.Unlock()
			runtime.Gosched()
		}
	}
	leave()
	var order string
	for range 5 {
		order += <-served
	}
	if order != "abcaa" {
		t.Errorf("served in the order %s", order)
	}
}

func TestRateForgetsAfterAMinute(t *testing.T) {
	var none *rate
	if none.last(time.Unix(0, 0)) != 0 {
		t.Error("nothing happened")
	}
	r := new(rate)
	at := func(seconds int) time.Time { return time.Unix(1000+int64(seconds), 0) }
	r.add(at(0))
	r.add(at(0))
	r.add(at(30))
	for seconds, want := range map[int]int{31: 3} {
		if got := r.last(at(seconds)); got != want {
			t.Errorf("after %d s: %d, want %d", seconds, got, want)
		}
	}
	for _, step := range []struct{ at, want int }{{20, 3}, {59, 3}, {61, 1}, {200, 0}} { // a clock that was set back moves nothing
		if got := r.last(at(step.at)); got != step.want {
			t.Errorf("at %d s: %d, want %d", step.at, got, step.want)
		}
	}
}
