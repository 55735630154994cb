package operations_test

import (
	"context"
	"math"
	"slices"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// A snapshot whose node is away while it is deleted keeps what it owns, also under the next leader
// and in the node's next session: its artefact is nobody's orphan and its volume cannot go.
func TestC12DeletingSnapshotOwnsItsArtefact(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	ctx := context.Background()
	v := madeVolume(t, e, "data")
	box := madeSandbox(t, e, v)
	snap := madeSnapshot(t, e, box)
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: box}))(t)
	w.setAway(func(verb string) error {
		if verb == "delete-snapshot" {
			return errs.New(errs.NodeAway, "away").With("node", "n1")
		}
		return nil
	})
	deletion := call(uid.New())
	err := inTime(func(ctx context.Context) error {
		_, err := e.DeleteSnapshot(ctx, deletion, operations.Delete{UID: snap})
		return err
	})
	if env := wantEnvelope(t, err, errs.NodeAway); env.Outcome != errs.Unknown {
		t.Fatalf("%+v", env)
	}
	w.stillOwns(t, e, snap, v)
	e.stop()
	e = w.lead() // and with it another session of the node
	defer e.stop()
	w.stillOwns(t, e, snap, v)

	w.setAway(nil)
	must(e.DeleteSnapshot(ctx, deletion, operations.Delete{UID: snap}))(t)
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: v}))(t)
	if len(w.node.snapshots)+len(w.node.volumes) != 0 {
		t.Fatalf("the node keeps %v and %v", w.node.snapshots, w.node.volumes)
	}
	w.agree(e)
}

func (w *world) setAway(away func(verb string) error) {
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	w.node.away = away
}

func (w *world) stillOwns(t *testing.T, e *term, snap, v string) {
	t.Helper()
	ctx := context.Background()
	key := records.SnapshotKey(tenant, snap)
	rec := must(w.store.Get(ctx, key))(t)
	if rec.Phase != string(snapshot.Deleting) {
		t.Fatalf("phase %s", rec.Phase)
	}
	if !slices.ContainsFunc(rec.Refs, func(r catalog.Ref) bool { return r.Target == records.VolumeKey(tenant, v) }) {
		t.Fatalf("it refers to %v, not to its volume", rec.Refs)
	}
	if verdict := must(e.Judge(ctx, math.MaxUint64, []catalog.Key{key}))(t)[key]; verdict != operations.Owned {
		t.Fatalf("its artefact is taken for an orphan: %s", verdict)
	}
	_, err := e.DeleteVolume(ctx, call(""), operations.Delete{UID: v})
	if env := wantEnvelope(t, err, errs.StillReferenced); env.Details["references"] != snap {
		t.Fatalf("%v names %v", env, env.Details)
	}
	_, err = e.RestoreSandbox(ctx, call(""), operations.RestoreSandbox{SnapshotUID: snap})
	wantReason(t, err, errs.WrongPhase)
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	if !w.node.snapshots[snap] || !w.node.volumes[v] {
		t.Fatal("the artefact or its volume is gone from the node")
	}
}
