package app_test

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// left has the node hold a volume that no record names.
func (n *fakeNode) left() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	u := uid.New()
	n.volumes[u] = &nodev1.VolumeObservation{Uid: u, Tenant: "acme"}
	return u
}

// givesUp has the node's journal say that a repair went on without the volume.
func (r *rig) givesUp(n *fakeNode, u, name string, phase volume.Phase) {
	r.t.Helper()
	head := r.status().GetHead()
	v := &records.Volume{Volume: volume.Volume{UID: u, Name: name, Tenant: "acme"}}
	v.Status.Phase, v.Status.Node = phase, n.name
	put, err := v.Put()
	if err != nil {
		r.t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.journal == nil {
		n.journal = make(map[string]*nodev1.JournalEntry)
	}
	n.journal[put.Record.Key.String()] = &nodev1.JournalEntry{Tenant: "acme", Kind: string(catalog.KindVolume), Uid: u, Revision: 7, Seq: head.GetSeq(), Deleted: true, GivenUp: true,
		Name: name, Phase: put.Record.Phase, Node: n.name, Body: put.Record.Body,
		Point: &nodev1.CatalogPoint{Incarnation: head.GetIncarnation(), Seq: head.GetSeq(), Digest: head.GetDigest()}}
}

func (n *fakeNode) has(u string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.volumes[u] != nil
}

// What a node holds without a record is dropped at an operator's word, with a proof that it was given up, or accepting its loss. What has a record is not.
func TestOperatorDropsAnOrphan(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	ctx := context.Background()
	made, err := dormousev1.NewVolumeServiceClient(r.conn(r.user)).CreateVolume(ctx, &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Name: "data"})
	if err != nil {
		t.Fatal(err)
	}
	recorded, unproven, givenUp := made.GetVolume().GetMeta().GetUid(), n.left(), n.left()
	r.givesUp(n, givenUp, "old", volume.Ready)
	keeper := dormousev1.NewCatalogServiceClient(r.conn(r.root))
	drop := func(u string, accept bool) error {
		_, err := keeper.DropOrphan(ctx, &dormousev1.DropOrphanRequest{Node: "n1", Uid: u, AcceptLoss: accept})
		return err
	}
	for _, accept := range []bool{false, true} {
		wantReason(t, drop(recorded, accept), errs.WrongPhase)
	}
	wantReason(t, drop(unproven, false), errs.OrphanUnproven)
	if !n.has(recorded) || !n.has(unproven) {
		t.Fatal("what was refused is gone")
	}
	if err := drop(unproven, true); err != nil || n.has(unproven) {
		t.Errorf("what an operator accepted: %v", err)
	}
	for range 2 { // it may be asked again
		if err := drop(givenUp, false); err != nil || n.has(givenUp) {
			t.Errorf("what was given up: %v", err)
		}
	}
	_, err = dormousev1.NewCatalogServiceClient(r.conn(r.user)).DropOrphan(ctx, &dormousev1.DropOrphanRequest{Node: "n1", Uid: recorded})
	wantReason(t, err, errs.NotAllowed)
	_, err = keeper.DropOrphan(ctx, &dormousev1.DropOrphanRequest{Node: "n2", Uid: recorded})
	wantReason(t, err, errs.NodeAway)
	_, err = keeper.DropOrphan(ctx, &dormousev1.DropOrphanRequest{Node: "n1", Uid: "no uid"})
	wantReason(t, err, errs.InvalidField)
}

// What a repair gave up is adopted with what the node's journal has of it, and is whole again in the next term. Without that it is not.
func TestOperatorAdoptsAnOrphan(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	ctx := context.Background()
	volumes := dormousev1.NewVolumeServiceClient(r.conn(r.user))
	if _, err := volumes.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Name: "taken"}); err != nil {
		t.Fatal(err)
	}
	keeper := dormousev1.NewCatalogServiceClient(r.conn(r.root))
	unproven, half := n.left(), n.left()
	r.givesUp(n, half, "half", volume.Creating)
	_, err := keeper.AdoptOrphan(ctx, &dormousev1.AdoptOrphanRequest{Node: "n1", Uid: unproven})
	wantReason(t, err, errs.OrphanUnproven)
	_, err = keeper.AdoptOrphan(ctx, &dormousev1.AdoptOrphanRequest{Node: "n1", Uid: half})
	wantReason(t, err, errs.WrongPhase)
	_, err = keeper.AdoptOrphan(ctx, &dormousev1.AdoptOrphanRequest{Node: "n1", Uid: uid.New()})
	wantReason(t, err, errs.ObjectNotFound)
	for name, want := range map[string]string{"mine": "mine", "taken": ""} {
		u := n.left()
		r.givesUp(n, u, name, volume.Ready)
		for range 2 { // it may be asked again, also of the next term, once the node has come to it
			eventually(t, "it is adopted", func() bool {
				got, err := keeper.AdoptOrphan(ctx, &dormousev1.AdoptOrphanRequest{Node: "n1", Uid: u})
				if err == nil && (got.GetName() != want || got.GetTenant() != "acme" || got.GetKind() != "volume") {
					t.Errorf("%q became %v", name, got)
				}
				if err != nil {
					if code := errs.From(err).Code; code == errs.Conflict || code == errs.NotFound || code == errs.InvalidArgument {
						t.Fatal(err)
					}
					_ = n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) // until it leads again
				}
				return err == nil
			})
		}
		got, err := volumes.GetVolume(ctx, &dormousev1.GetVolumeRequest{Uid: u})
		if v := got.GetVolume(); err != nil || v.GetMeta().GetName() != want || v.GetStatus().GetPhase() != dormousev1.VolumePhase_VOLUME_PHASE_READY || v.GetStatus().GetNode() != "n1" {
			t.Errorf("%v, %v", got, err)
		}
	}
}
