package operations

import (
	"context"
	"maps"
	"strconv"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// UpdateSandbox changes what may be changed of a sandbox after its creation, all of it or nothing. The accepting commit does it. Most of it is the
// coordinator's own to act on, and no node has to hear of it; an egress policy is then put in force on the node.
func (e *Engine) UpdateSandbox(ctx context.Context, c Call, req UpdateSandbox) (*Operation, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	var changed *records.Sandbox
	op, err := e.submit(ctx, c, KindUpdateSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		sb, rec, err := e.findSandbox(ctx, r, "uid", op.Tenant, req.UID)
		if err != nil {
			return writes{}, err
		}
		if req.IfRevision != 0 && req.IfRevision != rec.Revision {
			return writes{}, errs.New(errs.StaleRevision, "sandbox %s is at revision %d, not %d; read it again", req.UID, rec.Revision, req.IfRevision).
				With("uid", req.UID).With("revision", strconv.FormatUint(req.IfRevision, 10)).With("current_revision", strconv.FormatUint(rec.Revision, 10))
		}
		if sb.Status.Phase == sandbox.Deleting {
			return writes{}, wrongPhase(rec.Key, rec.Phase, "any other")
		}
		if req.Egress != nil && sb.Spec.Network != sandbox.NetworkOutbound {
			return writes{}, errs.New(errs.InvalidField, "egress: sandbox %s has no outbound network", req.UID).With("field", "egress")
		}
		req.apply(sb)
		if err := problem(sandbox.ValidateIdle("", sb.Spec.IdleTimeout, sb.Spec.OnIdle)); err != nil {
			return writes{}, err
		}
		// What has ended reaches nothing.
		tell := req.Egress != nil && !sb.Status.Phase.Terminal()
		sb.Generation++
		if tell {
			sb.NodeGeneration = sb.Generation
		}
		sb.CatchUp()
		op.Plan.Target = req.UID
		var p puts
		p.add(fits(sb.Put()))
		after := *sb
		after.Revision++
		changed = &after
		if tell {
			return writes{puts: p.all}, p.err
		}
		return writes{puts: p.all, complete: true, result: func(res *Result) { res.Sandboxes = []*records.Sandbox{&after} }}, p.err
	})
	if err == nil && changed != nil {
		e.resync(ctx, changed.Tenant, changed.UID)
	}
	return op, err
}

func (u UpdateSandbox) check() error {
	if u.Labels == nil && u.Lifetime == nil && u.WakeOnUse == nil && u.Idle == nil && u.OnIdle == nil && u.Egress == nil {
		return errs.New(errs.InvalidField, "update_mask: name what is to change").With("field", "update_mask")
	}
	if u.Labels != nil {
		if err := problem(sandbox.ValidateLabels("labels", *u.Labels)); err != nil {
			return err
		}
	}
	if u.Lifetime != nil {
		if err := problem(sandbox.ValidateTimer("lifetime", *u.Lifetime)); err != nil {
			return err
		}
	}
	if u.Egress != nil {
		return problem(u.Egress.Policy.Validate("egress"))
	}
	return nil
}

// driveUpdate has the node put in force what the record says, which may be more than this operation changed, and commits what it
// observed with the end of the operation. A sandbox that is being started is waited for: its node may have been told before. One that ended
// needs nothing.
func (e *Engine) driveUpdate(ctx context.Context, t *task) error {
	for delay := e.cfg.RetryMin; ; {
		sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, t.op.Plan.Target)
		switch {
		case errs.Has(err, errs.ObjectNotFound) || err == nil && sb.Status.Phase == sandbox.Deleting:
			return e.finish(ctx, t, goneMeanwhile(t.op.Plan.Target), nil)
		case err != nil:
			return err
		case sb.Status.Phase.Terminal() || sb.Status.ObservedGeneration >= sb.NodeGeneration:
			return e.finish(ctx, t, nil, func(r *Result) { r.Sandboxes = []*records.Sandbox{sb} })
		case sb.Status.Phase == sandbox.Pending || sb.Status.Phase == sandbox.Starting:
			if delay = min(e.pause(ctx, delay), startingPause); ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		obs, err := e.enforce(ctx, t, sb)
		if err != nil {
			return e.failedTurn(ctx, t, err)
		}
		return e.recordTurn(ctx, t, sb.Status.Node, obs)
	}
}

// startingPause bounds the time between two looks at a sandbox that is being started.
const startingPause = 200 * time.Millisecond

// enforce tells the node. The step has the generation: an operation that is driven again may find a later policy.
func (e *Engine) enforce(ctx context.Context, t *task, sb *records.Sandbox) (obs Observation, err error) {
	err = e.call(ctx, t, sb.Status.Node, "update:"+sb.UID+":"+strconv.FormatInt(sb.NodeGeneration, 10), func(ctx context.Context, c Command) (err error) {
		obs, err = e.cfg.Agents.UpdateSandbox(ctx, sb.Status.Node, c, sb)
		return err
	})
	return obs, err
}

func (u UpdateSandbox) apply(sb *records.Sandbox) {
	if u.Labels != nil {
		sb.Labels = maps.Clone(*u.Labels)
	}
	if u.Lifetime != nil {
		sb.Spec.Lifetime = *u.Lifetime
	}
	if u.Idle != nil {
		sb.Spec.IdleTimeout = *u.Idle
		if *u.Idle == 0 && u.OnIdle == nil {
			sb.Spec.OnIdle = ""
		}
	}
	if u.OnIdle != nil {
		sb.Spec.OnIdle = *u.OnIdle
	}
	if u.WakeOnUse != nil {
		sb.Spec.WakeOnUse = *u.WakeOnUse
	}
	if u.Egress != nil {
		sb.Spec.Egress = u.Egress.Policy.Clone()
	}
}
