package runner

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// points runs what a life of a sandbox has and lists the fault points that it passes, in order.
func points(t *testing.T) []string {
	t.Helper()
	a, req, snap := checkpointed(t)
	var mu sync.Mutex
	var seen []string
	a.Fault = func(point string) error {
		mu.Lock()
		defer mu.Unlock()
		if !slices.Contains(seen, point) {
			seen = append(seen, point)
		}
		return nil
	}
	other := startRequest()
	must(t, second(a.Start(ctx(t), other)))
	must(t, second(a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "c"})))
	must(t, a.Delete(ctx(t), req.UID))
	must(t, second(a.Restore(ctx(t), restoreRequest(snap, req.Spec.Volumes[0].VolumeUID))))
	must(t, a.DeleteSnapshot(ctx(t), snap.UID))
	return seen
}

// TestCrashAtEveryPoint stops agentd dead at each fault point in turn and starts a new one on the same
// records and machine: every sandbox is then as its record says or cleanly gone, and so is
// every snapshot.
func TestCrashAtEveryPoint(t *testing.T) {
	all := points(t)
	if len(all) < 40 {
		t.Fatalf("only %d points: %v", len(all), all)
	}
	for _, point := range all {
		t.Run(point, func(t *testing.T) {
			a, req, snap := checkpointed(t)
			a.w.mu.Lock()
			a.w.at = point
			a.w.mu.Unlock()
			fresh := startRequest()
			_, startErr := a.Start(ctx(t), fresh)
			snap2 := uid.New()
			_, saveErr := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: snap2, Tenant: "t", CommandID: "c"})
			deleteErr := a.Delete(ctx(t), req.UID)
			rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
			_, restoreErr := a.Restore(ctx(t), rr)
			dropErr := a.DeleteSnapshot(ctx(t), snap.UID)
			if errors.Join(startErr, saveErr, deleteErr, restoreErr, dropErr) == nil {
				t.Fatal("the point was not passed")
			}
			b := a.reboot()
			for id, err := range map[string]error{fresh.UID: startErr, rr.UID: restoreErr} {
				b.consistent(id)
				if _, known := b.store.Sandbox(id); err == nil && known != nil {
					t.Errorf("%s was reported as running and is gone", id)
				}
			}
			b.consistent(req.UID)
			if _, known := b.store.Sandbox(req.UID); deleteErr == nil && known == nil {
				t.Error("it was reported as deleted and is there")
			}
			b.consistentSnapshot(snap.UID, false)
			b.consistentSnapshot(snap2, saveErr == nil)
			for _, id := range []string{fresh.UID, rr.UID, req.UID} {
				must(t, b.Delete(ctx(t), id))
				b.wantGone(id)
			}
			for _, id := range []string{snap.UID, snap2} {
				must(t, b.DeleteSnapshot(ctx(t), id))
			}
			if seen, err := b.Snapshots.Observe(); err != nil || len(seen.Published)+len(seen.Staging)+len(seen.Trash) > 0 || len(b.w.holds) > 0 {
				t.Fatalf("left: %+v %v %v", seen, b.w.holds, err)
			}
		})
	}
}

// consistent fails unless the sandbox runs as recorded, or nothing of it is left.
func (a *agent) consistent(id string) {
	t := a.w.t
	t.Helper()
	rec, err := a.store.Sandbox(id)
	if errs.Has(err, errs.ObjectNotFound) {
		a.wantGone(id)
		return
	}
	must(t, err)
	if rec.Intent != nodestate.IntentKeep || rec.Phase != sandbox.Running || rec.Capture != nil {
		t.Fatalf("after the restart: %s", text(rec))
	}
	if _, ok := a.w.host.Count(id); !ok {
		t.Fatalf("%s is recorded as running and does not run", id)
	}
	if _, err := a.Guest(id); err != nil || a.w.guests[id].quiet {
		t.Fatalf("the channel of %s: %v", id, err)
	}
}

func (a *agent) consistentSnapshot(id string, reported bool) {
	t := a.w.t
	t.Helper()
	rec, err := a.store.Snapshot(id)
	if errs.Has(err, errs.ObjectNotFound) {
		if reported {
			t.Errorf("snapshot %s was reported and is gone", id)
		}
		if _, err := a.Snapshots.Load(id); !errs.Has(err, errs.ObjectNotFound) {
			t.Errorf("snapshot %s has an artefact and no record: %v", id, err)
		}
		return
	}
	must(t, err)
	if _, err := a.Snapshots.Load(id); rec.State != nodestate.SnapshotReady || err != nil || a.w.holds[id] == "" || rec.Status.SizeBytes == 0 {
		t.Errorf("snapshot %s: %s, %v, holds %v", id, text(rec), err, a.w.holds)
	}
}
