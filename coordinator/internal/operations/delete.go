package operations

import (
	"context"
	"strconv"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// ender makes the write that ends the operation, to go with the commit of its last step.
type ender func(*Operation) (catalog.Put, error)

// DeleteSandbox ends a sandbox in whatever phase, and returns when its node no longer has it.
func (e *Engine) DeleteSandbox(ctx context.Context, c Call, req Delete) (*Operation, error) {
	return e.submit(ctx, c, KindDeleteSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		sb, _, err := e.findSandbox(ctx, r, "uid", op.Tenant, req.UID)
		if err != nil {
			return writes{}, err
		}
		op.Plan.Target = req.UID
		if err := enterSandbox(sb, sandbox.Deleting); err != nil {
			return writes{}, err
		}
		var p puts
		p.add(sb.Put())
		return writes{puts: p.all}, p.err
	})
}

// DeleteSnapshot ends a snapshot that nothing is being restored from.
func (e *Engine) DeleteSnapshot(ctx context.Context, c Call, req Delete) (*Operation, error) {
	return e.submit(ctx, c, KindDeleteSnapshot, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := e.find(ctx, r, "uid", records.SnapshotKey(op.Tenant, req.UID))
		if err != nil {
			return writes{}, err
		}
		snap, err := records.SnapshotOf(rec)
		if err != nil {
			return writes{}, err
		}
		if snap.Status.Phase == snapshot.Preparing {
			return writes{}, wrongPhase(rec.Key, rec.Phase, "Ready; wait for the checkpoint to end")
		}
		if err := e.unused(ctx, r, rec.Key); err != nil {
			return writes{}, err
		}
		op.Plan.Target = req.UID
		if err := enterSnapshot(snap, snapshot.Deleting); err != nil {
			return writes{}, err
		}
		var p puts
		p.add(snap.Put())
		return writes{puts: p.all, checks: []catalog.Check{catalog.Unreferenced(rec.Key)}}, p.err
	})
}

// DeleteVolume ends a volume that no sandbox holds and no snapshot refers to.
func (e *Engine) DeleteVolume(ctx context.Context, c Call, req Delete) (*Operation, error) {
	return e.submit(ctx, c, KindDeleteVolume, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := e.find(ctx, r, "uid", records.VolumeKey(op.Tenant, req.UID))
		if err != nil {
			return writes{}, err
		}
		v, err := records.VolumeOf(rec)
		if err != nil {
			return writes{}, err
		}
		if v.Status.Phase == volume.Creating {
			return writes{}, wrongPhase(rec.Key, rec.Phase, "Ready; wait for its creation to end")
		}
		if err := e.unused(ctx, r, rec.Key); err != nil {
			return writes{}, err
		}
		op.Plan.Target = req.UID
		if err := enterVolume(v, volume.Deleting); err != nil {
			return writes{}, err
		}
		var p puts
		p.add(v.Put())
		return writes{puts: p.all, checks: []catalog.Check{catalog.Unreferenced(rec.Key)}}, p.err
	})
}

// unused refuses with who holds the object, attachments first. It names uids, at most as many
// as the catalog itself would.
func (e *Engine) unused(ctx context.Context, r catalog.Reader, key catalog.Key) error {
	h, err := r.Referrers(ctx, key, "", 100)
	if err != nil || h.Count == 0 {
		return err
	}
	var names string
	for i, holder := range h.Holders {
		if holder.Mode.Attaches() {
			return errs.New(errs.AlreadyAttached, "%s %s is attached to sandbox %s; delete that first", key.Kind, key.UID, holder.Key.UID).
				With("volume", key.UID).With("holder", holder.Key.UID)
		}
		if i < catalog.MaxHolders {
			if names != "" {
				names += ","
			}
			names += holder.Key.UID
		}
	}
	return errs.New(errs.StillReferenced, "%s %s is still needed by %d %ss (%s); delete those first", key.Kind, key.UID, h.Count, h.Holders[0].Key.Kind, names).
		With("uid", key.UID).With("references", names).With("count", strconv.Itoa(h.Count))
}

func (e *Engine) driveDelete(ctx context.Context, t *task, absent func(context.Context, *task, string, ender) error) error {
	if err := absent(ctx, t, t.op.Plan.Target, func(op *Operation) (catalog.Put, error) { return e.ended(op, nil, nil) }); err != nil {
		return err
	}
	if err := e.reload(ctx, t); err != nil || t.op.State != Pending {
		return err
	}
	return e.finish(ctx, t, nil, nil) // another deletion was quicker
}

// removeSandbox is sandboxAbsent as a part of a larger operation.
func (e *Engine) removeSandbox(ctx context.Context, t *task, u string) error {
	return e.sandboxAbsent(ctx, t, u, nil)
}

// sandboxAbsent brings a sandbox to its end: the intent, the end of a start in flight, the observed
// absence on its node, the tombstone.
func (e *Engine) sandboxAbsent(ctx context.Context, t *task, u string, fin ender) error {
	sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, u)
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if sb.Status.Phase != sandbox.Deleting {
		if _, err := e.changeSandbox(ctx, sb.Tenant, u, func(sb *records.Sandbox) ([]catalog.Put, error) {
			return nil, enterSandbox(sb, sandbox.Deleting)
		}); err != nil {
			return absentIsDone(err)
		}
	}
	if err := e.interrupt(ctx, u); err != nil {
		return err
	}
	// Only now is it certain where it was placed: no start is in flight that could still commit.
	if sb, err = e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, u); err != nil {
		return absentIsDone(err)
	}
	if sb.Status.Node != "" {
		if err := e.deleteOnNode(ctx, t, sb); err != nil {
			return err
		}
	}
	err = e.bury(ctx, t, records.SandboxKey(sb.Tenant, u), fin)
	if err == nil {
		e.forget(u)
	}
	return err
}

func absentIsDone(err error) error {
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	return err
}

func (e *Engine) deleteOnNode(ctx context.Context, t *task, sb *records.Sandbox) error {
	return e.insist(ctx, t, sb.Status.Node, "delete:"+sb.UID, func(ctx context.Context, c Command) error {
		_, err := e.cfg.Agents.DeleteSandbox(ctx, sb.Status.Node, c, sb.UID)
		return err
	})
}

// bury replaces a record in phase Deleting by its tombstone. References to it (a checkpoint that
// is still being taken) are waited for.
func (e *Engine) bury(ctx context.Context, t *task, key catalog.Key, fin ender) error {
	delay := e.cfg.RetryMin
	for {
		_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
			return e.burial(ctx, r, t, key, fin)
		})
		if !errs.Has(err, errs.StillReferenced) {
			return err
		}
		t.last.Store(errs.From(err))
		if delay = e.pause(ctx, delay); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func (e *Engine) burial(ctx context.Context, r catalog.Reader, t *task, key catalog.Key, fin ender) (catalog.Commit, error) {
	rec, err := r.Get(ctx, key)
	if errs.Has(err, errs.ObjectNotFound) {
		return catalog.Commit{}, errNothing
	}
	if err != nil {
		return catalog.Commit{}, err
	}
	if err := leave(rec); err != nil {
		return catalog.Commit{}, err
	}
	trace, err := records.EncodeTrace(e.trace(rec, t.op.ID))
	if err != nil {
		return catalog.Commit{}, err
	}
	var p puts
	p.add(e.event(key, "Deleted", "", false))
	if fin != nil {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		p.add(fin(op))
	}
	return catalog.Commit{Owner: e.owner(), Puts: p.all,
		Deletes: []catalog.Delete{{Key: key, ExpectRevision: rec.Revision, Tombstone: true, Body: trace}}}, p.err
}

func (e *Engine) trace(rec catalog.Record, operation string) records.Trace {
	tr := records.Trace{Name: rec.Name, OperationID: operation, Created: rec.Created}
	if rec.Kind == catalog.KindSnapshot {
		if s, err := records.SnapshotOf(rec); err == nil {
			tr.Name, tr.Source, tr.Created = s.Name, s.SourceSandboxUID, s.Created
		}
	}
	return tr
}

// snapshotAbsent brings a snapshot to its end.
func (e *Engine) snapshotAbsent(ctx context.Context, t *task, u string, fin ender) error {
	key := records.SnapshotKey(t.op.Tenant, u)
	var snap *records.Snapshot
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		rec, err := r.Get(ctx, key)
		if err != nil {
			return catalog.Commit{}, err
		}
		if snap, err = records.SnapshotOf(rec); err != nil {
			return catalog.Commit{}, err
		}
		if snap.Status.Phase == snapshot.Deleting {
			return catalog.Commit{}, errNothing
		}
		if err := enterSnapshot(snap, snapshot.Deleting); err != nil {
			return catalog.Commit{}, err
		}
		put, err := snap.Put()
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	if err != nil {
		return absentIsDone(err)
	}
	nodes := snap.Status.Nodes
	if len(nodes) == 0 && snap.SourceNode != "" {
		nodes = []string{snap.SourceNode}
	}
	for _, node := range nodes {
		err := e.insist(ctx, t, node, "delete-snapshot:"+u, func(ctx context.Context, c Command) error {
			_, err := e.cfg.Agents.DeleteSnapshot(ctx, node, c, u)
			return err
		})
		if err != nil {
			return err
		}
	}
	return e.bury(ctx, t, key, fin)
}

// volumeAbsent brings a volume to its end.
func (e *Engine) volumeAbsent(ctx context.Context, t *task, u string, fin ender) error {
	key := records.VolumeKey(t.op.Tenant, u)
	var v *records.Volume
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		rec, err := r.Get(ctx, key)
		if err != nil {
			return catalog.Commit{}, err
		}
		if v, err = records.VolumeOf(rec); err != nil {
			return catalog.Commit{}, err
		}
		if v.Status.Phase == volume.Deleting {
			return catalog.Commit{}, errNothing
		}
		if err := enterVolume(v, volume.Deleting); err != nil {
			return catalog.Commit{}, err
		}
		put, err := v.Put()
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	if err != nil {
		return absentIsDone(err)
	}
	if node := v.Status.Node; node != "" {
		err := e.insist(ctx, t, node, "delete-volume:"+u, func(ctx context.Context, c Command) error {
			_, err := e.cfg.Agents.DeleteVolume(ctx, node, c, u)
			return err
		})
		if err != nil {
			return err
		}
	}
	return e.bury(ctx, t, key, fin)
}
