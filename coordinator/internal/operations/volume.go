package operations

import (
	"context"
	"strconv"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// CreateVolume makes a volume, empty or a copy, and returns when its node has it. One that could not be
// made leaves nothing.
func (e *Engine) CreateVolume(ctx context.Context, c Call, req CreateVolume) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if req.Spec.SizeLimitBytes < 0 {
		return nil, errs.New(errs.InvalidField, "spec.size_limit_bytes: must not be negative").With("field", "spec.size_limit_bytes")
	}
	if req.Spec.Node != "" {
		if err := catalog.ValidateNode(req.Spec.Node); err != nil {
			return nil, err
		}
	}
	if req.Spec.Access == "" {
		req.Spec.Access = volume.Exclusive
	}
	return e.submit(ctx, c, KindCreateVolume, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		v, err := newVolume(op, req.Name, req.Labels, req.Spec)
		if err != nil {
			return writes{}, err
		}
		if req.Spec.SourceVolumeUID != "" {
			src, err := e.volumeFor(ctx, r, op.Tenant, "spec.source_volume_uid", req.Spec.SourceVolumeUID)
			if err != nil {
				return writes{}, err
			}
			holder, err := exclusiveHolder(ctx, r, op.Tenant, src.UID)
			if err != nil {
				return writes{}, err
			}
			if holder != "" {
				return writes{}, errs.New(errs.AlreadyAttached, "volume %s is attached for writing to sandbox %s; delete that first, or fork the sandbox", src.UID, holder).
					With("volume", src.UID).With("holder", holder)
			}
			if req.Spec.Node != "" && req.Spec.Node != src.Status.Node {
				return writes{}, errs.New(errs.NotSupported, "a copy is made on the node of its source, %s", src.Status.Node).With("feature", "copy to another node")
			}
			v.Status.Node = src.Status.Node
		}
		op.Plan.VolumeUID = v.UID
		var p puts
		p.add(v.Put())
		return writes{puts: p.all}, p.err
	})
}

func newVolume(op *Operation, name string, labels map[string]string, spec volume.Spec) (*records.Volume, error) {
	v := new(records.Volume)
	v.UID, v.Tenant, v.Name, v.Labels = uid.New(), op.Tenant, name, labels
	v.Generation, v.Created, v.OperationID, v.Spec = 1, op.Created, op.ID, spec
	return v, enterVolume(v, volume.Creating)
}

// exclusiveHolder is the sandbox that holds the volume for writing, or "".
func exclusiveHolder(ctx context.Context, r catalog.Reader, tenant, u string) (string, error) {
	after := ""
	for {
		h, err := r.Referrers(ctx, records.VolumeKey(tenant, u), after, 100)
		if err != nil {
			return "", err
		}
		for _, holder := range h.Holders {
			if holder.Mode == catalog.Exclusive {
				return holder.Key.UID, nil
			}
		}
		if h.Next == "" {
			return "", nil
		}
		after = h.Next
	}
}

func (e *Engine) driveVolume(ctx context.Context, t *task) error {
	u := t.op.Plan.VolumeUID
	if t.op.Error == nil {
		err := e.makeVolume(ctx, t, u, func(op *Operation, v *records.Volume) (catalog.Put, error) {
			done := *v
			done.Revision++
			return e.ended(op, nil, func(r *Result) { r.Volume = &done })
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
	if err := e.volumeAbsent(ctx, t, u, nil); err != nil {
		return err
	}
	return e.finish(ctx, t, t.op.Error, nil)
}

// makeVolume brings a Creating volume to Ready.
func (e *Engine) makeVolume(ctx context.Context, t *task, u string, fin func(*Operation, *records.Volume) (catalog.Put, error)) error {
	began := e.cfg.Now()
	for {
		rec, err := e.cfg.Catalog.Get(ctx, records.VolumeKey(t.op.Tenant, u))
		if errs.Has(err, errs.ObjectNotFound) {
			return finally(errs.New(errs.WrongPhase, "volume %s was deleted before it was ready", u).With("uid", u))
		}
		if err != nil {
			return err
		}
		v, err := records.VolumeOf(rec)
		switch {
		case err != nil:
			return err
		case v.Status.Phase == volume.Ready:
			return nil
		case v.Status.Phase != volume.Creating:
			return finally(wrongPhase(rec.Key, rec.Phase, string(volume.Ready)))
		case v.Status.Node == "":
			node, err := e.place(ctx, "", placement.Request{Node: v.Spec.Node}, began, nil)
			if err != nil {
				return err
			}
			if err := e.changeVolume(ctx, e.owner(), t, u, func(v *records.Volume) error { v.Status.Node = node; return nil }, nil); err != nil {
				return err
			}
		default:
			return e.volumeOnNode(ctx, t, v, fin)
		}
	}
}

func (e *Engine) volumeOnNode(ctx context.Context, t *task, v *records.Volume, fin func(*Operation, *records.Volume) (catalog.Put, error)) error {
	var usage int64
	var session fence.Epoch
	delay := e.cfg.RetryMin
	for round := 1; ; {
		freeze, steady, err := e.writerOf(ctx, v)
		if err != nil {
			return err
		}
		if !steady {
			delay = e.pause(ctx, delay)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		step := "volume:" + v.UID
		if freeze != "" { // a part of the command, and it may change between two attempts
			step += "@" + freeze
		}
		if round > 1 { // the node gives a command's result again
			step += "+" + strconv.Itoa(round)
		}
		round++
		err = e.call(ctx, t, v.Status.Node, step, func(ctx context.Context, c Command) (err error) {
			usage, session, err = e.cfg.Agents.CreateVolume(ctx, v.Status.Node, c, v.UID, v.Spec.SizeLimitBytes, v.Spec.SourceVolumeUID, freeze)
			return err
		})
		if err == nil {
			break
		}
		// What was refused because the writer was just changing is asked again.
		now, steady, lookErr := e.writerOf(ctx, v)
		if lookErr != nil || v.Spec.SourceVolumeUID == "" || steady && now == freeze {
			return err
		}
	}
	owner := fence.Owner{Coordinator: e.cfg.Epoch, Node: v.Status.Node, Session: session}
	return e.changeVolume(ctx, owner, t, v.UID, func(v *records.Volume) error {
		v.Status.UsageBytes = usage
		return enterVolume(v, volume.Ready)
	}, fin)
}

// writerOf tells who has to stand still while the source of a volume is copied: the sandbox that runs, or is
// paused, with it; nobody ("") where there is no source, or nobody writes to it. It is not steady while that
// sandbox is on its way from one to the other.
func (e *Engine) writerOf(ctx context.Context, v *records.Volume) (freeze string, steady bool, err error) {
	if v.Spec.SourceVolumeUID == "" {
		return "", true, nil
	}
	holder, err := exclusiveHolder(ctx, e.cfg.Catalog, v.Tenant, v.Spec.SourceVolumeUID)
	if err != nil || holder == "" {
		return "", true, err
	}
	sb, err := e.sandbox(ctx, e.cfg.Catalog, v.Tenant, holder)
	if errs.Has(err, errs.ObjectNotFound) {
		return "", true, nil
	}
	if err != nil {
		return "", false, err
	}
	switch sb.Status.Phase {
	case sandbox.Running, sandbox.Paused:
		return holder, true, nil
	case sandbox.Stopped, sandbox.Failed, sandbox.Hibernated:
		return "", true, nil
	}
	return "", false, nil
}

// changeVolume commits a change of a volume that is being made.
func (e *Engine) changeVolume(ctx context.Context, owner fence.Owner, t *task, u string, change func(*records.Volume) error, fin func(*Operation, *records.Volume) (catalog.Put, error)) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		rec, err := r.Get(ctx, records.VolumeKey(t.op.Tenant, u))
		if err != nil {
			return catalog.Commit{}, err
		}
		v, err := records.VolumeOf(rec)
		if err != nil || v.Status.Phase != volume.Creating {
			return catalog.Commit{}, orNothing(err)
		}
		if err := change(v); err != nil {
			return catalog.Commit{}, err
		}
		var p puts
		p.add(v.Put())
		if fin != nil {
			op, err := e.operation(ctx, r, t)
			if err != nil {
				return catalog.Commit{}, err
			}
			p.add(fin(op, v))
		}
		return catalog.Commit{Owner: owner, Puts: p.all}, p.err
	})
	return err
}
