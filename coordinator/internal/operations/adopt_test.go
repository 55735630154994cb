package operations_test

import (
	"context"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// A volume that a sandbox holds which no record names, since a repair went on without it: who deletes the volume is told so, and by which command it is removed, and the
// deletion ends once it is.
func TestGivenUpHolderIsToldToWhoDeletes(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	v, holder := madeVolume(t, e, "data"), uid.New()
	refuse := func(verb, _ string) error {
		if verb == "delete-volume" {
			return errs.New(errs.StillReferenced, "in use by %s", holder).With("references", holder)
		}
		return nil
	}
	w.node.mu.Lock()
	w.node.fail = refuse
	w.node.mu.Unlock()
	for range 2 { // each of its callers
		deletion := call(uid.New())
		_, err := e.DeleteVolume(ctx, deletion, operations.Delete{UID: v})
		env := wantEnvelope(t, err, errs.StillReferenced)
		if env.Outcome != errs.Unknown || env.OperationID != deletion.OperationID || !strings.Contains(env.Message, "dormouse admin catalog drop --node n1 "+holder) {
			t.Fatalf("%+v", env)
		}
	}
	w.node.mu.Lock()
	w.node.fail = nil
	w.node.mu.Unlock()
	for {
		_, err := e.DeleteVolume(ctx, call(uid.New()), operations.Delete{UID: v})
		if errs.Has(err, errs.ObjectNotFound) {
			break
		}
		if err != nil && !errs.Has(err, errs.StillReferenced) { // it was not asked again yet
			t.Fatal(err)
		}
	}
	w.agree(e)
}

// unrecorded takes the record of something away, as a server does that came back older.
func (w *world) unrecorded(rec catalog.Record) {
	w.t.Helper()
	lease := must(w.store.Leader(context.Background()))(w.t)
	c := catalog.Commit{Owner: fence.Owner{Coordinator: lease.Epoch}, Deletes: []catalog.Delete{{Key: rec.Key, ExpectRevision: rec.Revision}}}
	res, err := w.store.Commit(context.Background(), []catalog.Commit{c})
	if err != nil || res[0].Err != nil {
		w.t.Fatal(err, res)
	}
}

// What a repair gave up gets its record again, once, and what does not fit any more is refused.
func TestAdopt(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	ctx := context.Background()
	v := madeVolume(t, e, "data")
	box := madeSandbox(t, e, v)
	e.stop()
	volumeRec, boxRec := must(w.store.Get(ctx, records.VolumeKey(tenant, v)))(t), must(w.store.Get(ctx, records.SandboxKey(tenant, box)))(t)
	w.unrecorded(boxRec)
	w.unrecorded(volumeRec)
	e = w.lead()
	_, err := e.Adopt(ctx, boxRec) // its volume has to be there
	wantReason(t, err, errs.StaleUID)
	other := madeVolume(t, e, "data")
	for range 2 {
		if name := must(e.Adopt(ctx, volumeRec))(t); name != "" {
			t.Errorf("it has the name %q, which another has", name)
		}
	}
	must(e.Adopt(ctx, boxRec))(t)
	deleting := boxRec
	deleting.Phase, deleting.UID = "Deleting", uid.New()
	_, err = e.Adopt(ctx, deleting)
	wantReason(t, err, errs.WrongPhase)
	forged := volumeRec
	forged.UID = uid.New()
	_, err = e.Adopt(ctx, forged)
	wantReason(t, err, errs.InvariantBroken)
	e.stop()
	e = w.lead() // which reads it
	defer e.stop()
	_, err = e.DeleteVolume(ctx, call(""), operations.Delete{UID: v})
	wantReason(t, err, errs.AlreadyAttached)
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: box}))(t)
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: v}))(t)
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: other}))(t)
	_, err = e.Adopt(ctx, volumeRec) // it was deleted
	wantReason(t, err, errs.StaleUID)
	w.agree(e)
}
