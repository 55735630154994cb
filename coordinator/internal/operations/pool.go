package operations

import (
	"context"
	"maps"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// CreatePool records a pool, which the keeper fills from then on.
func (e *Engine) CreatePool(ctx context.Context, c Call, req CreatePool) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if err := problem(req.Spec.Validate("spec.")); err != nil {
		return nil, err
	}
	return e.submit(ctx, c, KindCreatePool, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		tpl, err := e.readyTemplate(ctx, r, op.Tenant, "spec.template_uid", req.Spec.TemplateUID)
		if err != nil {
			return writes{}, err
		}
		p := &records.Pool{Node: tpl.Status.Node}
		p.UID, p.Tenant, p.Name, p.Labels = uid.New(), op.Tenant, req.Name, maps.Clone(req.Labels)
		p.Generation, p.Created, p.Spec, p.OperationID = 1, op.Created, req.Spec, op.ID
		if err := enterPool(p, warm.PoolActive); err != nil {
			return writes{}, err
		}
		op.Plan.Target = p.UID
		return e.poolChange(p)
	})
}

// poolChange ends an operation with the change of a pool's record, and lets the keeper know of it.
func (e *Engine) poolChange(p *records.Pool) (writes, error) {
	put, err := fits(p.Put())
	after := *p
	after.Revision++
	tell := func() { e.poolChanged(p.Tenant, p.UID) }
	return writes{puts: []catalog.Put{put}, complete: true, accepted: tell, refused: tell, result: func(res *Result) { res.Pool = &after }}, err
}

func (e *Engine) readyTemplate(ctx context.Context, r catalog.Reader, tenant, field, u string) (*records.Template, error) {
	rec, err := e.find(ctx, r, field, records.TemplateKey(tenant, u))
	if err != nil {
		return nil, err
	}
	tpl, err := records.TemplateOf(rec)
	if err == nil && tpl.Status.Phase != warm.Ready {
		err = wrongPhase(rec.Key, rec.Phase, string(warm.Ready))
	}
	return tpl, err
}

func (e *Engine) findPool(ctx context.Context, r catalog.Reader, field, tenant, u string) (*records.Pool, error) {
	rec, err := e.find(ctx, r, field, records.PoolKey(tenant, u))
	if err != nil {
		return nil, err
	}
	p, err := records.PoolOf(rec)
	if err == nil && p.Status.Phase != warm.PoolActive {
		err = wrongPhase(rec.Key, rec.Phase, string(warm.PoolActive))
	}
	return p, err
}

// UpdatePool changes what may be changed of a pool.
func (e *Engine) UpdatePool(ctx context.Context, c Call, req UpdatePool) (*Operation, error) {
	if req.Labels == nil && req.Template == nil && req.Size == nil && req.MaxMembers == nil && req.MaxMemoryBytes == nil {
		return nil, errs.New(errs.InvalidField, "update_mask: name what is to change").With("field", "update_mask")
	}
	if req.Labels != nil {
		if err := problem(sandbox.ValidateLabels("labels", *req.Labels)); err != nil {
			return nil, err
		}
	}
	return e.submit(ctx, c, KindUpdatePool, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		p, err := e.findPool(ctx, r, "uid", op.Tenant, req.UID)
		if err != nil {
			return writes{}, err
		}
		if req.IfRevision != 0 && req.IfRevision != p.Revision {
			return writes{}, errs.New(errs.StaleRevision, "pool %s is at revision %d, not %d; read it again", req.UID, p.Revision, req.IfRevision).
				With("uid", req.UID).With("revision", strconv.FormatUint(req.IfRevision, 10)).With("current_revision", strconv.FormatUint(p.Revision, 10))
		}
		req.apply(p)
		if err := problem(p.Spec.Validate("")); err != nil {
			return writes{}, err
		}
		if req.Template != nil {
			tpl, err := e.readyTemplate(ctx, r, op.Tenant, "template_uid", *req.Template)
			if err != nil {
				return writes{}, err
			}
			p.Node = tpl.Status.Node
		}
		p.Generation++
		p.Status.Failures, p.Status.LastError = 0, "" // of what was asked before
		op.Plan.Target = req.UID
		return e.poolChange(p)
	})
}

func (u UpdatePool) apply(p *records.Pool) {
	if u.Labels != nil {
		p.Labels = maps.Clone(*u.Labels)
	}
	if u.Template != nil {
		p.Spec.TemplateUID = *u.Template
	}
	if u.Size != nil {
		p.Spec.Size = *u.Size
	}
	if u.MaxMembers != nil {
		p.Spec.MaxMembers = *u.MaxMembers
	}
	if u.MaxMemoryBytes != nil {
		p.Spec.MaxMemoryBytes = *u.MaxMemoryBytes
	}
}

// DeletePool ends a pool and all of its members.
func (e *Engine) DeletePool(ctx context.Context, c Call, req Delete) (*Operation, error) {
	return e.submit(ctx, c, KindDeletePool, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := e.find(ctx, r, "uid", records.PoolKey(op.Tenant, req.UID))
		if err != nil {
			return writes{}, err
		}
		p, err := records.PoolOf(rec)
		if err != nil {
			return writes{}, err
		}
		op.Plan.Target = p.UID
		if err := enterPool(p, warm.PoolDeleting); err != nil {
			return writes{}, err
		}
		put, err := p.Put()
		tell := func() { e.poolChanged(op.Tenant, req.UID) }
		return writes{puts: []catalog.Put{put}, accepted: tell, refused: tell}, err
	})
}

// drivePoolDeletion deletes the members, then the record. None is added meanwhile: the record is sealed.
func (e *Engine) drivePoolDeletion(ctx context.Context, t *task) error {
	pool := t.op.Plan.Target
	key := records.PoolKey(t.op.Tenant, pool)
	for {
		h, err := e.cfg.Catalog.Referrers(ctx, key, "", 100)
		if errs.Has(err, errs.ObjectNotFound) || err == nil && len(h.Holders) == 0 {
			break
		}
		if err != nil {
			return err
		}
		group, groupCtx := errgroup.WithContext(ctx)
		group.SetLimit(e.cfg.Parallel)
		for _, holder := range h.Holders {
			group.Go(func() error { return e.removeMember(groupCtx, t, pool, holder.Key.UID, nil) })
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	if err := e.bury(ctx, t, key, func(op *Operation) (catalog.Put, error) { return e.ended(op, nil, nil) }); err != nil {
		return err
	}
	e.poolChanged(t.op.Tenant, pool)
	if err := e.reload(ctx, t); err != nil || t.op.State != Pending {
		return err
	}
	return e.finish(ctx, t, nil, nil) // another deletion was quicker
}

// removeMember deletes a sandbox if it is a member of the pool, and no claim takes it any more.
func (e *Engine) removeMember(ctx context.Context, t *task, pool, u string, fin ender) error {
	mine := false
	_, err := e.changeSandbox(ctx, t.op.Tenant, u, func(sb *records.Sandbox) ([]catalog.Put, error) {
		mine = sb.Pool == pool
		if !mine || sb.Status.Phase == sandbox.Deleting {
			return nil, errNothing
		}
		return nil, enterSandbox(sb, sandbox.Deleting)
	})
	if err != nil {
		return absentIsDone(err)
	}
	if !mine {
		return nil
	}
	return e.sandboxAbsent(ctx, t, u, fin)
}
