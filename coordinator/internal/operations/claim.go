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
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// ClaimSandbox gives a sandbox of a template to the caller: a ready member of a pool, by the accepting commit, or a restore of the golden snapshot.
func (e *Engine) ClaimSandbox(ctx context.Context, c Call, req ClaimSandbox) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if (req.TemplateUID == "") == (req.PoolUID == "") {
		return nil, errs.New(errs.InvalidField, "name either template_uid or pool_uid").With("field", "template_uid")
	}
	for field, d := range map[string]*time.Duration{"lifetime": req.Lifetime, "idle_timeout": req.Idle} {
		if d != nil {
			if err := problem(sandbox.ValidateTimer(field, *d)); err != nil {
				return nil, err
			}
		}
	}
	if err := problem(sandbox.ValidateEnv("env", req.Env)); err != nil {
		return nil, err
	}
	g := giving{e: e, req: req, warm: true}
	return e.submit(ctx, c, KindClaimSandbox, req, nil, g.build)
}

// giving decides what a claim is given, in the build of a commit that may run more than once.
type giving struct {
	e     *Engine
	req   ClaimSandbox
	warm  bool   // a ready member will do
	taken string // the member that a build which may not have been applied has kept from others
}

// build is a door.
func (g *giving) build(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
	e, req := g.e, g.req
	e.release(g.taken)
	g.taken = ""
	pool, tpl, err := e.claimed(ctx, r, op.Tenant, req)
	if err != nil {
		return writes{}, err
	}
	if err := e.nameFree(ctx, r, op.Tenant, req.Name); err != nil {
		return writes{}, err
	}
	if !g.warm {
		return e.claimCold(ctx, r, op, req, pool, tpl)
	}
	sb, err := e.takeReady(ctx, r, op.Tenant, pool, tpl.UID)
	if err != nil {
		return writes{}, err
	}
	if sb == nil {
		return e.claimCold(ctx, r, op, req, pool, tpl)
	}
	g.taken = sb.UID
	w, err := e.claimWarm(op, req, tpl, sb)
	if err != nil {
		e.release(g.taken)
	}
	return w, err
}

// claimed reads what a claim names: the template, and the pool if it was one.
func (e *Engine) claimed(ctx context.Context, r catalog.Reader, tenant string, req ClaimSandbox) (*records.Pool, *records.Template, error) {
	if req.PoolUID == "" {
		tpl, err := e.readyTemplate(ctx, r, tenant, "template_uid", req.TemplateUID)
		return nil, tpl, err
	}
	pool, err := e.findPool(ctx, r, "pool_uid", tenant, req.PoolUID)
	if err != nil {
		return nil, nil, err
	}
	tpl, err := e.template(ctx, r, tenant, pool.Spec.TemplateUID)
	return pool, tpl, err
}

// nameFree refuses early what the commit would refuse, so that it takes no member in vain.
func (e *Engine) nameFree(ctx context.Context, r catalog.Reader, tenant, name string) error {
	if name == "" {
		return nil
	}
	rec, err := r.GetByName(ctx, tenant, catalog.KindSandbox, name)
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return errs.New(errs.NameTaken, "sandbox %s has the name %q", rec.UID, name).With("name", name).With("uid", rec.UID)
}

// takeReady gives the record of a member that may be claimed, kept from other claims until release; nil where there is none. What
// it decides by is the record; the index only says where to look.
func (e *Engine) takeReady(ctx context.Context, r catalog.Reader, tenant string, pool *records.Pool, template string) (*records.Sandbox, error) {
	for {
		u := e.takeMember(tenant, pool, template)
		if u == "" {
			return nil, nil
		}
		sb, err := e.sandbox(ctx, r, tenant, u)
		switch {
		case errs.Has(err, errs.ObjectNotFound):
			e.forget(u)
		case err != nil:
			e.release(u)
			return nil, err
		case sb.Pool == "" || !sb.PoolReady || sb.Status.Phase != sandbox.Paused:
			e.account(sb)
			e.release(u)
		default:
			return sb, nil
		}
	}
}

// claimWarm makes the member the claimer's.
func (e *Engine) claimWarm(op *Operation, req ClaimSandbox, tpl *records.Template, sb *records.Sandbox) (writes, error) {
	pool := sb.Pool
	sb.Pool, sb.PoolReady, sb.ClaimedFrom = "", false, pool
	sb.Name, sb.Labels, sb.OperationID = req.Name, maps.Clone(req.Labels), op.ID
	sb.Created = op.Created // its lifetime begins
	sb.Generation++
	req.settle(sb, tpl.Spec.Sandbox)
	if err := problem(sandbox.ValidateIdle("", sb.Spec.IdleTimeout, sb.Spec.OnIdle)); err != nil {
		return writes{}, err
	}
	if err := enterSandbox(sb, sandbox.Resuming); err != nil {
		return writes{}, err
	}
	op.Plan.Target = sb.UID
	var p puts
	p.add(fits(sb.Put()))
	p.add(e.event(records.SandboxKey(sb.Tenant, sb.UID), "Claimed", "from pool "+pool, false))
	after := *sb
	after.Revision++
	return writes{puts: p.all,
		accepted: func() { e.account(&after); e.countClaim(pool) },
		refused: func() {
			e.resync(context.WithoutCancel(e.ctx), sb.Tenant, sb.UID)
			e.release(sb.UID)
		}}, p.err
}

// settle gives the sandbox the template's settings, and those that the claim has in their place.
func (c ClaimSandbox) settle(sb *records.Sandbox, of sandbox.Spec) {
	sb.Spec.Lifetime, sb.Spec.IdleTimeout, sb.Spec.OnIdle, sb.Spec.WakeOnUse = of.Lifetime, of.IdleTimeout, of.OnIdle, of.WakeOnUse
	if c.Lifetime != nil {
		sb.Spec.Lifetime = *c.Lifetime
	}
	if c.Idle != nil {
		sb.Spec.IdleTimeout = *c.Idle
		if *c.Idle == 0 {
			sb.Spec.OnIdle = ""
		}
	}
	if c.OnIdle != "" {
		sb.Spec.OnIdle = c.OnIdle
	}
	if c.WakeOnUse != nil {
		sb.Spec.WakeOnUse = *c.WakeOnUse
	}
	if len(c.Env) > 0 {
		env := maps.Clone(sb.Spec.Env)
		if env == nil {
			env = make(map[string]string)
		}
		maps.Copy(env, c.Env)
		sb.Spec.Env = env
	}
}

// claimCold restores the golden snapshot, or refuses with the numbers.
func (e *Engine) claimCold(ctx context.Context, r catalog.Reader, op *Operation, req ClaimSandbox, pool *records.Pool, tpl *records.Template) (writes, error) {
	if req.Refuse {
		return writes{}, e.poolEmpty(pool, tpl)
	}
	sb, err := e.goldenCopy(ctx, r, op, tpl)
	if err != nil {
		return writes{}, err
	}
	sb.Name, sb.Labels = req.Name, maps.Clone(req.Labels)
	req.settle(sb, tpl.Spec.Sandbox)
	if err := problem(sandbox.ValidateIdle("", sb.Spec.IdleTimeout, sb.Spec.OnIdle)); err != nil {
		return writes{}, err
	}
	var p puts
	placed, err := e.placeAtOnce(ctx, r, sb, &p)
	if err != nil {
		return writes{}, err
	}
	p.add(fits(sb.Put()))
	return writes{puts: p.all, placed: placed}, p.err
}

// goldenCopy plans a sandbox with the processes of the golden snapshot.
func (e *Engine) goldenCopy(ctx context.Context, r catalog.Reader, op *Operation, tpl *records.Template) (*records.Sandbox, error) {
	rec, err := r.Get(ctx, records.SnapshotKey(tpl.Tenant, tpl.Golden))
	if err != nil {
		return nil, err
	}
	snap, err := records.SnapshotOf(rec)
	if err != nil {
		return nil, err
	}
	if snap.Status.Phase != snapshot.Ready {
		return nil, wrongPhase(rec.Key, rec.Phase, string(snapshot.Ready))
	}
	if err := e.possible(snap.SourceSpec); err != nil {
		return nil, err
	}
	sb, err := newSandbox(op, "", nil, resting(snap.SourceSpec), nil)
	if err != nil {
		return nil, err
	}
	sb.SourceSnapshot, sb.Status.RestoredFrom = snap.UID, snap.UID
	op.Plan.SnapshotUID = snap.UID
	op.Plan.Copies = []Copy{{SandboxUID: sb.UID}}
	return sb, nil
}

func (e *Engine) poolEmpty(pool *records.Pool, tpl *records.Template) error {
	n := e.numbers(pool, tpl)
	env := errs.New(errs.PoolEmpty, "no sandbox of template %s is ready: %d ready, %d being made, %d wanted; wait, or claim with the fallback restore", tpl.UID, n.ready, n.filling, n.size).
		With("template", tpl.UID).With("ready", strconv.Itoa(n.ready)).With("filling", strconv.Itoa(n.filling)).With("size", strconv.Itoa(n.size))
	if pool != nil {
		env = env.With("pool", pool.UID)
	}
	return env
}
