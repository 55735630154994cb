package runner

import (
	"math"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/uid"
)

func TestTrimsNow(t *testing.T) {
	spare := func(n int64) func() int64 { return func() int64 { return n } }
	for name, tc := range map[string]struct {
		due   int
		busy  bool
		spare int64
		want  int
	}{
		"nothing due":                {0, false, 0, 0},
		"idle":                       {3, false, math.MaxInt64, 3},
		"idle, many":                 {500, false, math.MaxInt64, trimsAtOnce},
		"busy, with memory":          {500, true, math.MaxInt64, 0},
		"busy, more than may lie":    {4, true, 2 * leavingsShare * leavings, 2},
		"busy, nothing to spare":     {3, true, 0, 3},
		"busy, less than is to be":   {3, true, -1 << 30, 3},
		"busy, many with no memory":  {500, true, 0, trimsAtOnce},
		"busy, fewer than may lie":   {1, true, 2 * leavingsShare * leavings, 0},
		"idle, though nothing spare": {1, false, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := trimsNow(tc.due, tc.busy, spare(tc.spare)); got != tc.want {
				t.Errorf("trimsNow = %d, want %d", got, tc.want)
			}
		})
	}
}

func TestTrimmedAfterACapture(t *testing.T) {
	w := newWorld(t)
	a := w.boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	_, err = a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), CommandID: "c1"})
	must(t, err)
	eventually(t, "the trim after a capture", func() bool { return w.host.Trims(req.UID) == 1 })

	// One that is gone meanwhile is passed over, and those after it are not.
	gone := startRequest()
	_, err = a.Start(ctx(t), gone)
	must(t, err)
	_, err = a.Checkpoint(ctx(t), CaptureRequest{UID: gone.UID, SnapshotUID: uid.New(), CommandID: "c2"})
	must(t, err)
	must(t, a.Delete(ctx(t), gone.UID))
	_, err = a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), CommandID: "c3"})
	must(t, err)
	eventually(t, "the trim after another", func() bool { return w.host.Trims(req.UID) == 2 })
}
