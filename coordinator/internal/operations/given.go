package operations

import (
	"context"
	"encoding/json"
	"strconv"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// What becomes of a claim after its acceptance. Its plan says what it was given: Target is a member, which its node is to resume, Copies is
// a restore of the golden snapshot, neither is that a member was lost and the claim is to be given another sandbox. Each is committed
// before the next step:
//
//	Target      --node resumed it-->  ended
//	Target      --it cannot be-->     nothing given; the member is in Lost, and Deleting
//	nothing     --it is gone-->       Target (the next ready member), or Copies, or ended with why the last one was lost
//	Copies      --restored-->         ended
//
// What is lost is gone from its node before anything else is given, so that there is never a second sandbox for one claim, and the name is free.

// maxMembers is how many members a claim is given, one after the other, before it is given a restore: what ails more of them in a row ails
// the next one, too.
const maxMembers = 3

// driveClaim has the node resume what the claim was given, or restores.
func (e *Engine) driveClaim(ctx context.Context, t *task) error {
	var req ClaimSandbox
	if err := json.Unmarshal(t.op.Request, &req); err != nil {
		return e.finish(ctx, t, errs.Wrap(err, errs.InternalError, "read the request of operation %s", t.op.ID), nil)
	}
	switch {
	case len(t.op.Plan.Copies) > 0:
		return e.driveCopies(ctx, t)
	case t.op.Plan.Target == "":
		return e.giveAnother(ctx, t, req)
	case t.op.Error != nil: // accepted by a coordinator that gave one member only
		if err := e.removeSandbox(ctx, t, t.op.Plan.Target); err != nil {
			return err
		}
		return e.finish(ctx, t, t.op.Error, nil)
	}
	u := t.op.Plan.Target
	sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, u)
	if errs.Has(err, errs.ObjectNotFound) || err == nil && sb.Status.Phase == sandbox.Deleting {
		return e.finish(ctx, t, goneMeanwhile(u), nil)
	}
	if err != nil {
		return err
	}
	var obs Observation
	err = e.call(ctx, t, sb.Status.Node, "claim:"+u, func(ctx context.Context, c Command) (err error) {
		obs, err = e.cfg.Agents.ClaimSandbox(ctx, sb.Status.Node, c, sb, req.Env)
		return err
	})
	if env, failed := isFinal(err); failed {
		return e.lose(ctx, t, u, errs.New(errs.ClaimFailed, "sandbox %s could not be resumed (%s) and is deleted", u, env.Message).
			With("uid", u).With("node", sb.Status.Node).With("cause", string(env.Reason)))
	}
	if err != nil {
		return err
	}
	return e.recordTurn(ctx, t, sb.Status.Node, obs)
}

// lose takes a member that could not be resumed away from the claim. It goes back to no pool.
func (e *Engine) lose(ctx context.Context, t *task, u string, why *errs.Error) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if op.Plan.Target != u {
			return catalog.Commit{}, errNothing // the reply to this commit was lost
		}
		sb, err := e.sandbox(ctx, r, op.Tenant, u)
		if errs.Has(err, errs.ObjectNotFound) || err == nil && sb.Status.Phase == sandbox.Deleting {
			put, err := e.ended(op, goneMeanwhile(u), nil) // by the claimer, or by an operator
			return catalog.Commit{Puts: []catalog.Put{put}}, err
		}
		if err != nil {
			return catalog.Commit{}, err
		}
		if err := enterSandbox(sb, sandbox.Deleting); err != nil {
			return catalog.Commit{}, err
		}
		op.Plan.Target, op.Plan.Lost = "", append(op.Plan.Lost, Lost{SandboxUID: u, Why: why})
		var p puts
		p.add(op.put())
		p.add(sb.Put())
		p.add(e.event(records.SandboxKey(sb.Tenant, u), "ClaimFailed", why.Message, true))
		return catalog.Commit{Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	e.resync(ctx, t.op.Tenant, u)
	return e.reload(ctx, t)
}

// giveAnother gives a claim that has lost what it had the next ready member, or a restore, as if it were accepted now. If there is neither,
// the claim fails with why the last one was lost.
func (e *Engine) giveAnother(ctx context.Context, t *task, req ClaimSandbox) error {
	lost := t.op.Plan.Lost
	if len(lost) == 0 {
		return e.finish(ctx, t, errs.New(errs.InvariantBroken, "claim %s was given nothing, and has lost nothing; claim again with a new operation id", t.op.ID).With("kind", "operation").With("uid", t.op.ID), nil)
	}
	last := lost[len(lost)-1]
	if err := e.removeSandbox(ctx, t, last.SandboxUID); err != nil {
		return err
	}
	g := giving{e: e, req: req, warm: len(lost) < maxMembers}
	var w writes
	var none error // why the claim is given nothing
	res, err := e.publish(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		e.forget(w.placed) // by a build that was not applied
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if op.Plan.Target != "" || len(op.Plan.Copies) > 0 {
			return catalog.Commit{}, errNothing // the reply to this commit was lost
		}
		if w, none = g.build(ctx, r, op); none != nil {
			return catalog.Commit{}, none
		}
		put, err := op.put()
		return catalog.Commit{Checks: w.checks, Puts: append([]catalog.Put{put}, w.puts...)}, err
	})
	given := err == nil && res.Seq != 0
	w.tell(given)
	switch {
	case given:
		e.mu.Lock()
		t.cold = g.taken == ""
		e.mu.Unlock()
	case w.placed == "":
	case errs.NotStartedFor(err):
		e.forget(w.placed)
	default:
		e.settlePlaced(t.op.Tenant, w.placed)
	}
	switch {
	case err == nil:
		return e.reload(ctx, t)
	case none == nil, ctx.Err() != nil, errs.From(none).Outcome == errs.Unknown, again(none):
		return err // it is looked at again: what was committed, if anything, is in the plan
	}
	why := errs.New(errs.ClaimFailed, "%s, and there is no other: %s. Claim again with a new operation id", last.Why.Message, errs.From(none).Message)
	for k, v := range last.Why.Details {
		why = why.With(k, v)
	}
	return e.finish(ctx, t, why.With("instead", string(errs.From(none).Reason)).With("lost", strconv.Itoa(len(lost))), nil)
}
