package guest

import (
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// TestListIsBoundedInBytes: the parts of a list together are bounded, and the end of that is told once.
func TestListIsBoundedInBytes(t *testing.T) {
	l := &listing{call: &call{want: guestwire.TypeListed, ch: make(chan result, 512)}}
	part := make([]byte, 200<<10)
	for range 1000 {
		l.deliver(guestwire.TypeListed, part)
	}
	held, failures := 0, 0
	for len(l.ch) > 0 {
		res := <-l.ch
		held += len(res.payload)
		if res.err != nil {
			failures++
		}
	}
	if held > maxListedBytes || failures == 0 {
		t.Fatalf("%d bytes are held, %d failures are told", held, failures)
	}
}

// TestListedIsBoundedInStructs: two bytes on the wire cannot become a struct each without end.
func TestListedIsBoundedInStructs(t *testing.T) {
	payload := guestwire.Marshal(&guestwire.Listed{Processes: make([]guestwire.ProcessInfo, 125_000)})
	var m guestwire.Listed
	if err := guestwire.Unmarshal(payload, &m); err == nil || len(m.Processes) > maxListed {
		t.Fatalf("%d processes out of %d bytes, %v", len(m.Processes), len(payload), err)
	}
}

// TestWasteIsSlowed: what nobody asked for adds up to pauses; what was asked for does not.
func TestWasteIsSlowed(t *testing.T) {
	var w waste
	if w.more(wasteStep - 1) {
		t.Fatal("less than a step is slowed")
	}
	w.parts = guestwire.MaxMessage // of a message that may become whole
	if w.more(wasteStep - 1) {
		t.Fatal("an honest message is slowed")
	}
	w.parts++
	if !w.more(wasteStep - 1) {
		t.Fatal("a message without an end is not slowed")
	}
}

// TestClosedInputsAreForgotten: a Conn does not grow with the processes that had an input.
func TestClosedInputsAreForgotten(t *testing.T) {
	c := newSandbox(t).open(t)
	for _, id := range []string{"a", "b"} {
		r := subject(id, "cat")
		r.Stdin = true
		_, err := c.Start(ctx(t), r)
		must(t, err)
		_, err = c.WriteStdin(ctx(t), id, []byte("x"))
		must(t, err)
		must(t, c.CloseStdin(ctx(t), id))
		if _, err := c.WriteStdin(ctx(t), id, []byte("y")); !errs.Has(err, errs.WrongPhase) {
			t.Fatalf("write to a closed input: %v", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.inputs) != 0 {
		t.Fatalf("%d inputs are remembered", len(c.inputs))
	}
}
