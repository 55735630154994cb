package operations

import (
	"cmp"
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// A fill is the operation that makes one member of a pool. The keeper accepts it; it ends when the member stands still and is ready.

// addMember accepts the operation that makes one more member. The commit counts them, by the pool's referrers, and is bound to the pool's
// revision; nobody else adds any.
func (e *Engine) addMember(ctx context.Context, p poolState) error {
	spec := p.record.Spec
	op, err := e.accept(ctx, Call{Tenant: p.key.Tenant, RequestID: "pool"}, KindFillPool, FillPool{PoolUID: p.key.UID, TemplateUID: spec.TemplateUID}, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := r.Get(ctx, p.key)
		if err != nil {
			return writes{}, err
		}
		pool, err := records.PoolOf(rec)
		if err != nil {
			return writes{}, err
		}
		if pool.Status.Phase != warm.PoolActive || pool.Spec != spec {
			e.poolChanged(p.key.Tenant, p.key.UID)
			return writes{}, errFull
		}
		h, err := r.Referrers(ctx, p.key, "", 1)
		if err != nil {
			return writes{}, err
		}
		tpl, err := e.readyTemplate(ctx, r, p.key.Tenant, "template_uid", spec.TemplateUID)
		if err != nil {
			return writes{}, err
		}
		if h.Count >= spec.Bound(tpl.Spec.Sandbox.Resources.WithDefaults().MemoryRequestBytes) {
			return writes{}, errFull
		}
		sb, err := e.goldenCopy(ctx, r, op, tpl)
		if err != nil {
			return writes{}, err
		}
		sb.Pool, sb.PoolTemplate = pool.UID, tpl.UID
		op.Plan.Target = pool.UID
		req, err := e.needs(ctx, r, sb)
		if err != nil {
			return writes{}, err
		}
		node, err := e.decideSpare(sb.UID, req)
		if err != nil {
			return writes{}, err
		}
		var puts puts
		puts.add(e.placedOn(sb, node))
		puts.add(fits(sb.Put()))
		after := *sb
		after.Revision++
		return writes{puts: puts.all, placed: sb.UID, checks: []catalog.Check{catalog.AtRevision(p.key, rec.Revision)}, accepted: func() { e.account(&after) }}, puts.err
	})
	if err != nil {
		return err
	}
	e.launch(op, nil)
	return nil
}

// driveFill restores a member that stands still, and says in the same commit as its end that it is ready. One that its node
// restored running, as older nodes do, is paused.
func (e *Engine) driveFill(ctx context.Context, t *task) error {
	u := t.op.Plan.Copies[0].SandboxUID
	if t.op.Error == nil {
		err := e.makeMember(ctx, t, u)
		env, failed := isFinal(err)
		if !failed {
			return err
		}
		if err := e.undoing(ctx, t, env); err != nil || t.op.State != Pending {
			return err
		}
	}
	if err := e.removeMember(ctx, t, t.op.Plan.Target, u, nil); err != nil {
		return err
	}
	env := t.op.Error
	if env.Details["phase"] != string(sandbox.Deleting) { // else it was overtaken
		if err := e.fillFailed(ctx, t, env); err != nil {
			return err
		}
	}
	return e.finish(ctx, t, env, nil)
}

// fillFailed records a failure, after which the next try waits.
func (e *Engine) fillFailed(ctx context.Context, t *task, env *errs.Error) error {
	return e.changePool(ctx, records.PoolKey(t.op.Tenant, t.op.Plan.Target), func(pool *records.Pool) {
		st := &pool.Status
		st.Failures, st.LastError, st.LastFailure = st.Failures+1, cmp.Or(env.Message, string(env.Reason)), e.now()
	}, 0)
}

func (e *Engine) makeMember(ctx context.Context, t *task, u string) error {
	_, err := e.makeRun(ctx, t, u, func(op *Operation, sb *records.Sandbox) (catalog.Put, error) {
		if sb.Status.Phase != sandbox.Paused { // it does not stand still yet
			return op.put()
		}
		sb.PoolReady = true
		return e.ended(op, nil, nil)
	})
	if err != nil {
		return err
	}
	if err := e.reload(ctx, t); err != nil {
		return err
	}
	if t.op.State != Pending {
		return e.filled(ctx, t)
	}
	sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, u)
	if errs.Has(err, errs.ObjectNotFound) || err == nil && sb.Status.Phase == sandbox.Deleting {
		return finally(overtaken(u))
	}
	if err != nil {
		return err
	}
	if sb.Status.Phase.Terminal() {
		return finally(errs.New(errs.SandboxFailed, "a new member is %s (%s): %s", sb.Status.Phase, sb.Status.Reason, sb.Status.Message).With("uid", u).With("step", "restore"))
	}
	var obs Observation
	err = e.call(ctx, t, sb.Status.Node, "pause:"+u, func(ctx context.Context, c Command) (err error) {
		obs, err = e.cfg.Agents.PauseSandbox(ctx, sb.Status.Node, c, u, 0)
		return err
	})
	if err != nil {
		return err
	}
	return e.memberReady(ctx, t, u, sb.Status.Node, obs)
}

// memberReady ends the fill. A member that is not Paused by now has failed.
func (e *Engine) memberReady(ctx context.Context, t *task, u, node string, obs Observation) error {
	var after *records.Sandbox
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		sb, err := e.sandbox(ctx, r, op.Tenant, u)
		if errs.Has(err, errs.ObjectNotFound) || err == nil && sb.Status.Phase == sandbox.Deleting {
			return catalog.Commit{}, finally(overtaken(u))
		}
		if err != nil {
			return catalog.Commit{}, err
		}
		e.observe(sb, obs)
		if sb.Status.Phase != sandbox.Paused {
			return catalog.Commit{}, finally(errs.New(errs.SandboxFailed, "a new member is %s (%s): %s", sb.Status.Phase, sb.Status.Reason, sb.Status.Message).With("uid", u).With("step", "pause"))
		}
		sb.PoolReady = true
		var p puts
		p.add(sb.Put())
		after = sb
		p.add(e.ended(op, nil, nil))
		return catalog.Commit{Owner: fence.Owner{Coordinator: e.cfg.Epoch, Node: node, Session: obs.Session}, Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	if after != nil {
		e.resync(ctx, t.op.Tenant, u)
	}
	if err := e.reload(ctx, t); err != nil {
		return err
	}
	return e.filled(ctx, t)
}

// filled forgets earlier failures. That it could not is no failure of the fill, which has ended.
func (e *Engine) filled(ctx context.Context, t *task) error {
	key := records.PoolKey(t.op.Tenant, t.op.Plan.Target)
	e.mu.Lock()
	s := e.pools[key.UID]
	failed := s != nil && s.record != nil && s.record.Status.Failures > 0
	e.mu.Unlock()
	if !failed {
		return nil
	}
	if err := e.changePool(ctx, key, func(pool *records.Pool) { pool.Status.Failures = 0 }, 0); err != nil {
		e.log.Warn("that members of a pool are made again was not noted", "pool", key.UID, "error", err)
	}
	return nil
}
