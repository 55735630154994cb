package operations

import (
	"context"
	"slices"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// atRest are the phases in which something can be adopted: no operation had it in hand.
var atRest = map[catalog.Kind][]string{
	catalog.KindSandbox:  {string(sandbox.Running), string(sandbox.Paused), string(sandbox.Hibernated), string(sandbox.Stopped), string(sandbox.Failed)},
	catalog.KindSnapshot: {string(snapshot.Ready)},
	catalog.KindVolume:   {string(volume.Ready)},
}

// Adopt gives a record again to what a node holds and a repair of the catalog gave up. It is checked like any other: what it refers to has to
// be there, and unattached. The name is what it has now: none, if another has it. What a sandbox is by now is its node's to tell, once a term has begun
// that has read the record.
func (e *Engine) Adopt(ctx context.Context, rec catalog.Record) (name string, err error) {
	if !slices.Contains(atRest[rec.Kind], rec.Phase) {
		return "", wrongPhase(rec.Key, rec.Phase, "at rest; drop it instead")
	}
	fault.At("orphan.adopt.before")
	name, err = e.adopt(ctx, rec, true)
	if errs.Has(err, errs.NameTaken) {
		name, err = e.adopt(ctx, rec, false)
	}
	fault.At("orphan.adopt.after")
	return name, err
}

func (e *Engine) adopt(ctx context.Context, rec catalog.Record, named bool) (name string, err error) {
	_, err = e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		if now, err := r.Get(ctx, rec.Key); err == nil {
			name = now.Name
			return catalog.Commit{}, errNothing
		} else if !errs.Has(err, errs.ObjectNotFound) {
			return catalog.Commit{}, err
		}
		if _, err := e.cfg.Catalog.Tombstone(ctx, rec.Key); err == nil {
			return catalog.Commit{}, errs.New(errs.StaleUID, "%s %s was deleted meanwhile", rec.Kind, rec.UID).With("uid", rec.UID)
		} else if !errs.Has(err, errs.ObjectNotFound) {
			return catalog.Commit{}, err
		}
		put, err := anew(rec, named)
		if err != nil {
			return catalog.Commit{}, err
		}
		name = put.Record.Name
		message := "node " + rec.Node + " still had it, and an operator took it back after a repair of the catalog went on without it"
		if name != rec.Name {
			message += "; another has its name " + rec.Name + " by now"
		}
		ev, err := e.event(rec.Key, "Adopted", message, true)
		return catalog.Commit{Puts: []catalog.Put{put, ev}}, err
	})
	return name, err
}

// anew makes the write that creates the object of the record once more.
func anew(rec catalog.Record, named bool) (put catalog.Put, err error) {
	switch rec.Kind {
	case catalog.KindSandbox:
		var sb *records.Sandbox
		if sb, err = records.SandboxOf(rec); err != nil {
			return put, err
		}
		if sb.Hidden() {
			return put, errs.New(errs.NotSupported, "sandbox %s is a pool's or a template's, which is made anew; drop it", rec.UID).With("feature", "adoption of what pools and templates made")
		}
		sb.Meta, sb.Captures = records.Meta{}, nil // nobody takes them any more
		if !named {
			sb.Name = ""
		}
		put, err = sb.Put()
	case catalog.KindSnapshot:
		var snap *records.Snapshot
		if snap, err = records.SnapshotOf(rec); err != nil {
			return put, err
		}
		snap.Meta = records.Meta{}
		if !named {
			snap.Name = ""
		}
		put, err = snap.Put()
	default:
		var v *records.Volume
		if v, err = records.VolumeOf(rec); err != nil {
			return put, err
		}
		v.Meta = records.Meta{}
		if !named {
			v.Name = ""
		}
		put, err = v.Put()
	}
	if err == nil && (put.Record.Key != rec.Key || put.Record.Node != rec.Node) {
		err = errs.New(errs.InvariantBroken, "the journal of node %s has %s with the body of another", rec.Node, rec.Key).With("kind", string(rec.Kind)).With("uid", rec.UID)
	}
	return put, err
}
