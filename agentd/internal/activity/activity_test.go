package activity

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// world is a node with one sandbox and a clock.
type world struct {
	now   time.Time
	boxes []Box
	cpu   time.Duration
	path  string
}

func newWorld(t *testing.T) *world {
	return &world{now: time.Unix(1_000_000, 0), boxes: []Box{{"box", sandbox.Running}}, path: filepath.Join(t.TempDir(), "uses.json")}
}

func (w *world) open() *Tracker {
	return Open(Options{Path: w.path, Boxes: func() ([]Box, error) { return w.boxes, nil },
		Box: w.box, CPU: func(context.Context, string) (time.Duration, error) { return w.cpu, nil }, Now: func() time.Time { return w.now }})
}

func (w *world) box(uid string) (Box, error) {
	for _, b := range w.boxes {
		if b.UID == uid {
			return b, nil
		}
	}
	return Box{}, errs.New(errs.ObjectNotFound, "no sandbox %s", uid)
}

func (w *world) pass(d time.Duration) { w.now = w.now.Add(d) }

func unused(t *testing.T, tr *Tracker, want time.Duration) {
	t.Helper()
	for _, u := range tr.News(true) {
		if u.UID == "box" {
			if u.UnusedFor != want || want > 0 && (!tr.Unused(t.Context(), "box", want) || tr.Unused(t.Context(), "box", want+1)) {
				t.Fatalf("unused for %s, not %s", u.UnusedFor, want)
			}
			return
		}
	}
	t.Fatal("it is not told of")
}

func TestCallsAreUse(t *testing.T) {
	w := newWorld(t)
	tr := w.open()
	tr.Look(t.Context())
	w.pass(time.Minute)
	unused(t, tr, time.Minute)
	first, second := tr.Use("box"), tr.Use("box")
	first()
	w.pass(time.Hour)
	unused(t, tr, 0)
	if tr.Unused(t.Context(), "box", time.Second) {
		t.Fatal("a call goes on")
	}
	second()
	second()
	w.pass(time.Second)
	unused(t, tr, time.Second)
}

func TestCPUIsUseAboveATrickle(t *testing.T) {
	w := newWorld(t)
	tr := w.open()
	tr.Look(t.Context())
	w.pass(10 * time.Second)
	w.cpu += 100 * time.Millisecond // 1 % of a core
	tr.Look(t.Context())
	unused(t, tr, 10*time.Second)
	w.pass(10 * time.Second)
	w.cpu += 300 * time.Millisecond
	tr.Look(t.Context())
	unused(t, tr, 0)
	w.pass(time.Second)
	w.cpu += time.Second
	if tr.Unused(t.Context(), "box", time.Second) {
		t.Fatal("it computes at the last moment")
	}
}

// TestUnmeasuredIsNotUnused: a sandbox that was last seen while it started, one of an agentd before, and one whose counter began anew are not taken for
// unused before their CPU was measured.
func TestUnmeasuredIsNotUnused(t *testing.T) {
	w := newWorld(t)
	w.boxes[0].Phase = sandbox.Starting
	tr := w.open()
	tr.Look(t.Context())
	is := func(want bool) {
		t.Helper()
		w.pass(time.Second)
		if got := tr.Unused(t.Context(), "box", time.Second); got != want {
			t.Fatalf("unused: %t", got)
		}
	}
	w.boxes[0].Phase, w.cpu = sandbox.Running, time.Second
	is(false) // it was never measured
	is(true)
	w.cpu += time.Second
	is(false)
	is(true)
	w.cpu = 0
	is(false)
	is(true)
	w.boxes[0].Phase = sandbox.Paused
	is(true)
	tr = w.open()
	is(true) // its times were kept
	w.boxes[0].Phase = sandbox.Running
	is(false) // it was just resumed, and no round has seen it
	is(true)
}

func TestTimesOutliveARestart(t *testing.T) {
	w := newWorld(t)
	tr := w.open()
	tr.Look(t.Context())
	tr.Use("box")()
	w.pass(time.Minute)
	tr.Look(t.Context())
	w.boxes = append(w.boxes, Box{"new", sandbox.Running})
	tr = w.open()
	tr.Look(t.Context())
	unused(t, tr, time.Minute)
	if tr.Unused(t.Context(), "new", 1) {
		t.Fatal("what is not known counts as used now")
	}
	w.boxes = nil
	tr.Look(t.Context())
	if got := tr.News(true); len(got) != 0 {
		t.Fatalf("told of what is gone: %v", got)
	}
}

func TestAResumeIsUse(t *testing.T) {
	w := newWorld(t)
	tr := w.open()
	tr.Look(t.Context())
	w.boxes[0].Phase = sandbox.Paused
	w.pass(time.Minute)
	w.cpu += time.Minute
	tr.Look(t.Context())
	unused(t, tr, time.Minute)
	w.boxes[0].Phase = sandbox.Running
	tr.Look(t.Context())
	unused(t, tr, 0)
}

func TestOnlyNewsIsTold(t *testing.T) {
	w := newWorld(t)
	tr := w.open()
	tr.Look(t.Context())
	if len(tr.News(false)) != 1 || len(tr.News(false)) != 0 || len(tr.News(true)) != 1 {
		t.Fatal("a new sandbox is news once")
	}
	done := tr.Use("box")
	for range 2 {
		if len(tr.News(false)) != 1 {
			t.Fatal("one in use is news each time")
		}
	}
	done()
	if len(tr.News(false)) != 1 || len(tr.News(false)) != 0 {
		t.Fatal("the end of a use is news once")
	}
}
