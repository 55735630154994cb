package integration

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A snapshot whose node goes away while it is deleted stays Deleting and keeps its artefact and its
// volume; when the node is back, in another session, the deletion that began is finished.
func TestC12NodeAwayWhileASnapshotIsDeleted(t *testing.T) {
	w := enter(t)
	v := w.volume("node-1")
	spec := w.spec("sleep", "100000")
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	source := w.create(spec)
	snap := w.checkpoint(source)
	w.ok(source.Delete(w.ctx, ""))
	artefact := filepath.Join(w.NodeDir(1), "snapshots", snap.UID)
	_, err := os.Stat(artefact)
	w.ok(err)

	w.ok(w.KillAgentd(w.ctx, 1))
	back := false
	t.Cleanup(func() {
		if !back {
			w.ok(w.StartAgentdReady(context.Background(), 1))
		}
	})
	w.away(1)
	short, leave := context.WithCancel(w.ctx)
	defer leave()
	snapshots := dormousev1.NewSnapshotServiceClient(w.raw(w.key))
	deletion := uid.New()
	said := make(chan error, 1)
	go func() {
		_, err := snapshots.DeleteSnapshot(short, &dormousev1.DeleteSnapshotRequest{OperationId: deletion, Uid: snap.UID})
		said <- err
	}()
	w.await("the deletion is accepted", func() error {
		_, err := w.api.GetOperation(w.ctx, deletion)
		return err
	})
	leave()
	err = <-said
	if e := errs.From(err); err == nil || e.Outcome != errs.Unknown {
		t.Fatalf("the deletion said %v", err)
	}
	w.ok(snap.Refresh(w.ctx))
	if p := snap.Last.GetStatus().GetPhase(); p != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_DELETING {
		t.Errorf("phase %s", p)
	}
	if e := w.refusal(v.Delete(w.ctx, ""), errs.StillReferenced); e.Details["references"] != snap.UID {
		t.Errorf("the refusal names %v", e.Details)
	}
	_, err = os.Stat(artefact)
	w.ok(err)

	w.ok(w.StartAgentdReady(w.ctx, 1))
	back = true
	_, err = snapshots.DeleteSnapshot(w.ctx, &dormousev1.DeleteSnapshotRequest{OperationId: deletion, Uid: snap.UID})
	w.ok(err)
	if _, err := os.Stat(artefact); !os.IsNotExist(err) {
		t.Errorf("the artefact is still there (%v)", err)
	}
	w.ok(v.Delete(w.ctx, ""))
}
