package operations

import (
	"context"
	"maps"
	"strconv"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// UpdateSandbox changes what may be changed of a sandbox after its creation, all of it or nothing. The accepting commit does it: what is changed is
// the coordinator's own to act on, and no node has to hear of it.
func (e *Engine) UpdateSandbox(ctx context.Context, c Call, req UpdateSandbox) (*Operation, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	var changed *records.Sandbox
	op, err := e.submit(ctx, c, KindUpdateSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := e.find(ctx, r, "uid", records.SandboxKey(op.Tenant, req.UID))
		if err != nil {
			return writes{}, err
		}
		if req.IfRevision != 0 && req.IfRevision != rec.Revision {
			return writes{}, errs.New(errs.StaleRevision, "sandbox %s is at revision %d, not %d; read it again", req.UID, rec.Revision, req.IfRevision).
				With("uid", req.UID).With("revision", strconv.FormatUint(req.IfRevision, 10)).With("current_revision", strconv.FormatUint(rec.Revision, 10))
		}
		sb, err := records.SandboxOf(rec)
		if err != nil {
			return writes{}, err
		}
		if sb.Status.Phase == sandbox.Deleting {
			return writes{}, wrongPhase(rec.Key, rec.Phase, "any other")
		}
		req.apply(sb)
		if err := problem(sandbox.ValidateIdle("", sb.Spec.IdleTimeout, sb.Spec.OnIdle)); err != nil {
			return writes{}, err
		}
		sb.Generation++
		op.Plan.Target = req.UID
		var p puts
		p.add(fits(sb.Put()))
		after := *sb
		after.Revision++
		changed = &after
		return writes{puts: p.all, complete: true, result: func(res *Result) { res.Sandboxes = []*records.Sandbox{&after} }}, p.err
	})
	if err == nil && changed != nil {
		e.resync(ctx, changed.Tenant, changed.UID)
	}
	return op, err
}

func (u UpdateSandbox) check() error {
	if u.Labels == nil && u.Lifetime == nil && u.WakeOnUse == nil && u.Idle == nil && u.OnIdle == nil {
		return errs.New(errs.InvalidField, "update_mask: name what is to change").With("field", "update_mask")
	}
	if u.Labels != nil {
		if err := problem(sandbox.ValidateLabels("labels", *u.Labels)); err != nil {
			return err
		}
	}
	if u.Lifetime != nil {
		return problem(sandbox.ValidateTimer("lifetime", *u.Lifetime))
	}
	return nil
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
}
