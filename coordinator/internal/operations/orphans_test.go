package operations_test

import (
	"context"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
)

// What is deleted in its turn while a node is read was there when the node answered, and has a tombstone when the catalog is asked. It is no orphan: it would
// be removed a second time, with an event that is not true. A look that begins later, and finds it still, has the proof.
func TestWhatGoesWhileANodeIsReadIsNoOrphan(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	snap := madeSnapshot(t, e, madeSandbox(t, e))
	keys := []catalog.Key{records.SnapshotKey(tenant, snap)}
	moment := must(e.Moment(ctx))(t)
	must(e.DeleteSnapshot(ctx, call(""), operations.Delete{UID: snap}))(t)
	if verdict := must(e.Judge(ctx, moment, keys))(t)[keys[0]]; verdict != operations.Owned {
		t.Errorf("deleted after the look began: %s", verdict)
	}
	if verdict := must(e.Judge(ctx, must(e.Moment(ctx))(t), keys))(t)[keys[0]]; verdict != operations.Deleted {
		t.Errorf("deleted before the look began: %s", verdict)
	}
}
