package integration

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// journalsReach waits until every node has all that concerns it up to now.
func (w *world) journalsReach() *dormousev1.CatalogStatus {
	w.Helper()
	st, err := w.Client.CatalogStatus(w.ctx)
	w.ok(err)
	want := st.GetHead()
	w.await("the journals have what the catalog has", func() error {
		if st, err = w.Client.CatalogStatus(w.ctx); err != nil {
			return err
		}
		for _, j := range st.GetJournals() {
			if p := j.GetPoint(); p.GetIncarnation() != want.GetIncarnation() || p.GetSeq() < want.GetSeq() {
				return fmt.Errorf("node %s has %v, want %v", j.GetNode(), p, want)
			}
		}
		return nil
	})
	return st
}

// rewindRedis gives Redis the data of an earlier copy.
func (w *world) rewindRedis(kept string) {
	w.Helper()
	w.ok(w.KillRedis(w.ctx))
	w.ok(w.RewindRedis(kept))
	w.ok(w.StartRedis(w.ctx))
}

// Redis comes back older: with everything that happened since lost. It is noticed, nothing is written, and once every node is
// there the catalog is rebuilt from their journals: what was made is there again, what was deleted is not, what
// was done is not done again.
func TestC21CatalogComesBackOlder(t *testing.T) {
	w := enter(t)
	old := w.volume("")
	s := w.create(w.spec())
	w.journalsReach()
	kept := filepath.Join(t.TempDir(), "redis")
	w.ok(w.KillRedis(w.ctx))
	w.ok(w.CopyRedis(kept))
	w.ok(w.StartRedis(w.ctx))
	w.nodesOnline()

	snap := w.checkpoint(s)
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Name: "since", Spec: w.spec()}
	since, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	w.ok(old.Delete(w.ctx, ""))
	before := w.journalsReach()
	w.ok(snap.Refresh(w.ctx))
	wantSnap := proto.CloneOf(snap.Last)

	away := w.nodeOf(s)%w.Nodes + 1
	w.ok(w.KillAgentd(w.ctx, away))
	w.rewindRedis(kept)
	raw := dormousev1.NewVolumeServiceClient(w.raw(w.key))
	w.await("the loss is noticed", func() error {
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && st.GetSuspended() == nil {
			err = fmt.Errorf("in service: %v", st)
		}
		return err
	})
	if _, err := raw.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Name: "not now"}); errs.ReasonOf(err) != errs.CatalogRewound {
		t.Errorf("a write: %v", err)
	}
	if err := s.Refresh(w.ctx); err != nil {
		t.Errorf("a read: %v", err)
	}
	// What the node that is away has is not known.
	op := w.sub(t)
	op.key = w.operatorKey()
	if out := op.said(0, "admin", "catalog", "status"); !strings.Contains(out, "SUSPENDED") || !strings.Contains(out, "away") {
		t.Errorf("status:\n%s", out)
	}
	if out, code := op.dormouse("admin", "catalog", "repair", "--accept-loss"); code == 0 || !strings.Contains(out, string(errs.CatalogRewound)) || !strings.Contains(out, fmt.Sprint("node-", away)) {
		t.Errorf("repair gave %d:\n%s", code, out)
	}
	if out, code := w.dormouse("admin", "catalog", "status"); code == 0 || !strings.Contains(out, string(errs.NotAllowed)) {
		t.Errorf("a user sees the catalog: %d\n%s", code, out)
	}
	w.ok(w.StartAgentdReady(w.ctx, away))
	w.await("it is repaired by itself", func() error {
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && (st.GetSuspended() != nil || st.GetHead().GetIncarnation() == before.GetHead().GetIncarnation()) {
			err = fmt.Errorf("%v", st)
		}
		return err
	})
	w.nodesOnline()

	w.ok(snap.Refresh(w.ctx))
	snap.Last.GetMeta().UpdateTime, wantSnap.GetMeta().UpdateTime = nil, nil // when it was written, which it was again
	if !proto.Equal(snap.Last, wantSnap) {
		t.Errorf("the snapshot is %v,\nwas %v", snap.Last, wantSnap)
	}
	w.sh(since, "true")
	again, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	if again.UID != since.UID {
		t.Errorf("the operation made %s, its replay %s", since.UID, again.UID)
	}
	if all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{})); err != nil || len(all) != 2 {
		t.Errorf("%d sandboxes, %v; want 2", len(all), err)
	}
	if err := old.Refresh(w.ctx); errs.ReasonOf(err) != errs.ObjectNotFound {
		t.Errorf("what was deleted: %v", err)
	}
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.sh(restored, "true")
	w.journalsReach()
	op.said(0, "admin", "catalog", "verify") // 1 if it finds anything
	if out := op.said(0, "admin", "catalog", "status"); !strings.Contains(out, "in service") {
		t.Errorf("status:\n%s", out)
	}
	op.said(0, "admin", "catalog", "repair") // nothing to do
	op.said(0, "admin", "catalog", "compact")
}

// A server that lost everything is another catalog: nothing of the nodes is deleted for that, and it is rebuilt.
func TestC21CatalogIsLostWholly(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	v := w.volume("")
	w.journalsReach()
	w.rewindRedis(t.TempDir())
	w.await("the loss is noticed", func() error {
		_, err := w.Client.CatalogStatus(w.ctx)
		return err
	})
	w.await("it is in service, rebuilt", func() error {
		err := s.Refresh(w.ctx)
		if err == nil && s.Last.GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
			err = fmt.Errorf("phase %s", s.Last.GetStatus().GetPhase())
		}
		return err
	})
	w.nodesOnline()
	w.sh(s, "true")
	w.ok(v.Refresh(w.ctx))
	w.ok(v.Delete(w.ctx, ""))
}
