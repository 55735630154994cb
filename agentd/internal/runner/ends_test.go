package runner

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
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
		time.Sleep(endsPatience + time.Millisecond)
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
		time.Sleep(endsPatience + time.Millisecond)
	})
}
