package operations

import (
	"context"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// CheckpointSandbox takes a snapshot and returns when it is Ready: durable in the catalog, synced on
// the node's disk. The sandbox runs on, also when it fails.
func (e *Engine) CheckpointSandbox(ctx context.Context, c Call, req CheckpointSandbox) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	return e.submit(ctx, c, KindCheckpointSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		sb, err := e.source(ctx, r, op.Tenant, "uid", req.UID)
		if err != nil {
			return writes{}, err
		}
		return e.reserveSnapshot(op, sb, req.Name, req.Labels)
	})
}

// source reads a sandbox that can be captured.
func (e *Engine) source(ctx context.Context, r catalog.Reader, tenant, field, u string) (*records.Sandbox, error) {
	sb, rec, err := e.findSandbox(ctx, r, field, tenant, u)
	if err == nil && sb.Status.Phase != sandbox.Running && sb.Status.Phase != sandbox.Paused {
		err = wrongPhase(rec.Key, rec.Phase, string(sandbox.Running))
	}
	return sb, err
}

// reserveSnapshot makes the records of a snapshot to be taken: itself, with its references, and the
// source, which says that it is being captured.
func (e *Engine) reserveSnapshot(op *Operation, sb *records.Sandbox, name string, labels map[string]string) (writes, error) {
	op.Plan.SnapshotUID, op.Plan.MakesSnapshot = uid.New(), true
	return e.snapshotOf(op, sb, op.Plan.SnapshotUID, name, labels)
}

// snapshotOf makes the records of a snapshot of that uid.
func (e *Engine) snapshotOf(op *Operation, sb *records.Sandbox, u, name string, labels map[string]string) (writes, error) {
	snap := &records.Snapshot{SourceSpec: sb.Spec.Clone(), SourceNode: sb.Status.Node}
	snap.UID, snap.Tenant, snap.Name, snap.Labels = u, op.Tenant, name, labels
	snap.Generation, snap.Created, snap.OperationID = 1, op.Created, op.ID
	snap.SourceSandboxUID = sb.UID
	if err := enterSnapshot(snap, snapshot.Preparing); err != nil {
		return writes{}, err
	}
	snap.Status.Image = sb.Spec.Image
	for _, m := range sb.Spec.Volumes {
		snap.Status.Volumes = append(snap.Status.Volumes, snapshot.VolumeReference{VolumeUID: m.VolumeUID, Path: m.Path, ReadOnly: m.ReadOnly})
	}
	sb.Captures = append(sb.Captures, snap.UID)
	e.capturing(sb, "Checkpoint", "snapshot "+snap.UID)
	var p puts
	p.add(snap.Put())
	p.add(sb.Put())
	return writes{puts: p.all}, p.err
}

// capturing sets the condition to what Captures says.
func (e *Engine) capturing(sb *records.Sandbox, reason, message string) {
	sb.Status.SetCondition(sandbox.Condition{Type: "Capturing", Status: len(sb.Captures) > 0, Reason: reason, Message: message, LastTransitionTime: e.now()})
}

func (e *Engine) driveCheckpoint(ctx context.Context, t *task) error {
	if t.op.Error == nil {
		err := e.makeSnapshot(ctx, t, t.op.Plan.SnapshotUID, func(op *Operation, snap *records.Snapshot) (catalog.Put, error) {
			done := *snap
			done.Revision++
			return e.ended(op, nil, func(r *Result) { r.Snapshot = &done })
		})
		env, failed := isFinal(err)
		if err != nil && !failed {
			return err
		}
		if !failed {
			return e.endedElsewhere(ctx, t)
		}
		if err := e.undoing(ctx, t, env); err != nil || t.op.State != Pending {
			return err
		}
	}
	if err := e.snapshotAbsent(ctx, t, t.op.Plan.SnapshotUID, nil); err != nil {
		return err
	}
	return e.finish(ctx, t, t.op.Error, nil)
}

// endedElsewhere reloads an operation that its last step has ended. One that is still Pending did
// its work in an earlier term, before it could say so.
func (e *Engine) endedElsewhere(ctx context.Context, t *task) error {
	if err := e.reload(ctx, t); err != nil || t.op.State != Pending {
		return err
	}
	res := new(Result)
	switch {
	case t.op.Kind == KindCheckpointSandbox:
		rec, err := e.cfg.Catalog.Get(ctx, records.SnapshotKey(t.op.Tenant, t.op.Plan.SnapshotUID))
		if err != nil {
			return err
		}
		if res.Snapshot, err = records.SnapshotOf(rec); err != nil {
			return err
		}
	case t.op.Plan.VolumeUID != "":
		rec, err := e.cfg.Catalog.Get(ctx, records.VolumeKey(t.op.Tenant, t.op.Plan.VolumeUID))
		if err != nil {
			return err
		}
		if res.Volume, err = records.VolumeOf(rec); err != nil {
			return err
		}
	}
	return e.finish(ctx, t, nil, func(r *Result) { *r = *res })
}

// makeSnapshot brings a Preparing snapshot to Ready. When the node has given up, the snapshot is
// Failed, its source is no longer being captured, and the error is final.
func (e *Engine) makeSnapshot(ctx context.Context, t *task, u string, fin func(*Operation, *records.Snapshot) (catalog.Put, error)) error {
	rec, err := e.cfg.Catalog.Get(ctx, records.SnapshotKey(t.op.Tenant, u))
	if err != nil {
		if errs.Has(err, errs.ObjectNotFound) {
			return finally(errs.New(errs.WrongPhase, "snapshot %s was deleted before it was ready", u).With("uid", u))
		}
		return err
	}
	snap, err := records.SnapshotOf(rec)
	if err != nil {
		return err
	}
	switch snap.Status.Phase {
	case snapshot.Ready:
		return nil
	case snapshot.Preparing:
	default:
		return finally(errs.New(errs.WrongPhase, "snapshot %s is %s: %s", u, snap.Status.Phase, snap.Status.Message).With("uid", u).With("phase", string(snap.Status.Phase)))
	}
	var got snapshot.Status
	var session fence.Epoch
	err = e.call(ctx, t, snap.SourceNode, "checkpoint:"+u, func(ctx context.Context, c Command) (err error) {
		got, session, err = e.cfg.Agents.CheckpointSandbox(ctx, snap.SourceNode, c, snap.SourceSandboxUID, u)
		return err
	})
	if env, ok := isFinal(err); ok {
		if err := e.failSnapshot(ctx, t, u, env); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	reported := time.Now()
	if err = e.publishSnapshot(ctx, t, snap, got, session, fin); err == nil {
		e.cfg.OnReady(time.Since(reported))
	}
	return err
}

func (e *Engine) publishSnapshot(ctx context.Context, t *task, reserved *records.Snapshot, got snapshot.Status, session fence.Epoch, fin func(*Operation, *records.Snapshot) (catalog.Put, error)) error {
	u := reserved.UID
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		r, err := readTogether(ctx, r, records.SnapshotKey(t.op.Tenant, u), records.SandboxKey(t.op.Tenant, reserved.SourceSandboxUID), records.OperationKey(t.op.Tenant, t.op.ID))
		if err != nil {
			return catalog.Commit{}, err
		}
		snap, sb, err := e.snapshotAndSource(ctx, r, t.op.Tenant, u)
		if err != nil || snap.Status.Phase != snapshot.Preparing {
			return catalog.Commit{}, orNothing(err)
		}
		var p puts
		takeSnapshot(snap, got)
		if err := enterSnapshot(snap, snapshot.Ready); err != nil {
			return catalog.Commit{}, err
		}
		snap.Status.ReadyTime = e.now()
		p.add(snap.Put())
		p.add(e.event(records.SnapshotKey(snap.Tenant, u), "Ready", "taken of sandbox "+snap.SourceSandboxUID, false))
		if sb != nil {
			sb.Captures = slices.DeleteFunc(sb.Captures, func(c string) bool { return c == u })
			sb.Status.LastFreeze = got.Freeze
			e.capturing(sb, "Done", "snapshot "+u)
			p.add(sb.Put())
		}
		if fin != nil {
			op, err := e.operation(ctx, r, t)
			if err != nil {
				return catalog.Commit{}, err
			}
			p.add(fin(op, snap))
		}
		return catalog.Commit{Owner: fence.Owner{Coordinator: e.cfg.Epoch, Node: snap.SourceNode, Session: session}, Puts: p.all}, p.err
	})
	return err
}

// failSnapshot records why there will be no snapshot; the source goes on.
func (e *Engine) failSnapshot(ctx context.Context, t *task, u string, env *errs.Error) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		snap, sb, err := e.snapshotAndSource(ctx, r, t.op.Tenant, u)
		if err != nil || snap.Status.Phase != snapshot.Preparing {
			return catalog.Commit{}, orNothing(err)
		}
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if op.Error == nil { // in the same step, so that a restart knows why it undoes
			op.Error = env
		}
		if err := enterSnapshot(snap, snapshot.Failed); err != nil {
			return catalog.Commit{}, err
		}
		snap.Status.Reason, snap.Status.Message = string(env.Reason), env.Message
		var p puts
		p.add(op.put())
		p.add(snap.Put())
		p.add(e.event(records.SandboxKey(snap.Tenant, snap.SourceSandboxUID), "CheckpointFailed", env.Message, true))
		if sb != nil {
			sb.Captures = slices.DeleteFunc(sb.Captures, func(c string) bool { return c == u })
			e.capturing(sb, "Failed", env.Message)
			p.add(sb.Put())
		}
		return catalog.Commit{Puts: p.all}, p.err
	})
	return err
}

func orNothing(err error) error {
	if err == nil {
		return errNothing
	}
	return err
}

// snapshotAndSource reads both; the source is nil once it is gone.
func (e *Engine) snapshotAndSource(ctx context.Context, r catalog.Reader, tenant, u string) (*records.Snapshot, *records.Sandbox, error) {
	rec, err := r.Get(ctx, records.SnapshotKey(tenant, u))
	if err != nil {
		return nil, nil, err
	}
	snap, err := records.SnapshotOf(rec)
	if err != nil {
		return nil, nil, err
	}
	sb, err := e.sandbox(ctx, r, tenant, snap.SourceSandboxUID)
	if errs.Has(err, errs.ObjectNotFound) {
		return snap, nil, nil
	}
	return snap, sb, err
}
