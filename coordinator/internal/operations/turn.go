package operations

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// A turn is a change of a sandbox's phase that its node makes: the operation's record is the intent, the node keeps one turn after the
// other, and the phase is what the node's latest observation says, in whatever order answers and reports come in. So two
// operations that contradict each other leave the record at what the node did last.

// PauseSandbox freezes a sandbox in its node's memory. Pausing a paused one succeeds.
func (e *Engine) PauseSandbox(ctx context.Context, c Call, req Turn) (*Operation, error) {
	return e.turn(ctx, c, KindPauseSandbox, req, sandbox.Running, sandbox.Paused, sandbox.Resuming)
}

// HibernateSandbox has the node keep a sandbox on its disk alone. Hibernating a hibernated one succeeds. When it fails, the sandbox is as
// it was.
func (e *Engine) HibernateSandbox(ctx context.Context, c Call, req Turn) (*Operation, error) {
	return e.turn(ctx, c, KindHibernateSandbox, req, sandbox.Running, sandbox.Paused, sandbox.Hibernating, sandbox.Hibernated)
}

// ResumeSandbox makes a paused or hibernated sandbox run. Resuming a running one succeeds. A hibernated one needs room on its node again;
// without it, or when it cannot be restored, it stays Hibernated.
func (e *Engine) ResumeSandbox(ctx context.Context, c Call, req Turn) (*Operation, error) {
	return e.turn(ctx, c, KindResumeSandbox, req, sandbox.Paused, sandbox.Running, sandbox.Hibernating, sandbox.Hibernated, sandbox.Resuming)
}

// turn accepts an operation for a sandbox in one of the phases; the first is named to who asks in another.
func (e *Engine) turn(ctx context.Context, c Call, kind Kind, req Turn, from ...sandbox.Phase) (*Operation, error) {
	return e.submit(ctx, c, kind, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		_, rec, err := e.findSandbox(ctx, r, "uid", op.Tenant, req.UID)
		if err != nil {
			return writes{}, err
		}
		if !slices.Contains(from, sandbox.Phase(rec.Phase)) {
			return writes{}, wrongPhase(rec.Key, rec.Phase, string(from[0]))
		}
		op.Plan.Target = req.UID
		return writes{}, nil
	})
}

// driveTurn has the node make the turn, and commits what it observed with the end of the operation.
func (e *Engine) driveTurn(ctx context.Context, t *task) error {
	sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, t.op.Plan.Target)
	if errs.Has(err, errs.ObjectNotFound) {
		return e.finish(ctx, t, goneMeanwhile(t.op.Plan.Target), nil)
	}
	if err != nil {
		return err
	}
	if t.op.Kind == KindResumeSandbox && sb.Status.Phase == sandbox.Hibernated {
		if err := e.makeRoom(ctx, t, sb); err != nil {
			return e.failedTurn(ctx, t, err)
		}
	}
	obs, err := e.askTurn(ctx, t, sb)
	if err != nil {
		return e.failedTurn(ctx, t, err)
	}
	return e.recordTurn(ctx, t, sb.Status.Node, obs)
}

// makeRoom reserves what a hibernated sandbox needs when it runs again, on the node that has it, and commits Resuming before the node is
// told.
func (e *Engine) makeRoom(ctx context.Context, t *task, sb *records.Sandbox) error {
	req := placement.Request{Resources: request(sb), Limits: limits(sb.Spec), Outbound: sb.Spec.Network == sandbox.NetworkOutbound, Node: sb.Status.Node, Returns: true}
	if _, err := e.place(ctx, sb.UID, req, t.op.Created, nil); err != nil {
		return err
	}
	committed, err := e.changeSandbox(ctx, sb.Tenant, sb.UID, func(sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Phase != sandbox.Hibernated || !take(sb, sandbox.Resuming, "", "") {
			return nil, errNothing
		}
		return nil, nil
	})
	if err != nil || committed == nil {
		e.resync(ctx, sb.Tenant, sb.UID)
	}
	return err
}

// failedTurn ends the operation with an error that is final; any other is the caller's. What was to be restored is Hibernated again.
func (e *Engine) failedTurn(ctx context.Context, t *task, failure error) error {
	env, ok := isFinal(failure)
	if !ok {
		return failure
	}
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		var p puts
		sb, err := e.sandbox(ctx, r, op.Tenant, op.Plan.Target)
		if err != nil && !errs.Has(err, errs.ObjectNotFound) {
			return catalog.Commit{}, err
		}
		if err == nil && op.Kind == KindResumeSandbox && sb.Status.Phase == sandbox.Resuming && take(sb, sandbox.Hibernated, "", "") {
			p.add(sb.Put())
		}
		if err == nil {
			p.add(e.event(records.SandboxKey(op.Tenant, op.Plan.Target), strings.TrimSuffix(string(op.Kind), "Sandbox")+"Failed", env.Message, true))
		}
		p.add(e.ended(op, env, nil))
		return catalog.Commit{Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	e.resync(ctx, t.op.Tenant, t.op.Plan.Target)
	return e.reload(ctx, t)
}

func goneMeanwhile(u string) error {
	return errs.New(errs.WrongPhase, "sandbox %s was deleted meanwhile", u).With("uid", u).With("phase", string(sandbox.Deleting)).
		WithOutcome(errs.Terminal, errs.Never)
}

func (e *Engine) askTurn(ctx context.Context, t *task, sb *records.Sandbox) (obs Observation, err error) {
	var req Turn
	if err := json.Unmarshal(t.op.Request, &req); err != nil {
		return obs, finally(errs.Wrap(err, errs.InternalError, "read the request of operation %s", t.op.ID))
	}
	node, step := sb.Status.Node, "resume:"+sb.UID
	ask := func(ctx context.Context, c Command) (Observation, error) {
		return e.cfg.Agents.ResumeSandbox(ctx, node, c, sb.UID)
	}
	switch t.op.Kind {
	case KindPauseSandbox:
		step, ask = "pause:"+sb.UID, func(ctx context.Context, c Command) (Observation, error) {
			return e.cfg.Agents.PauseSandbox(ctx, node, c, sb.UID, req.IfUnusedFor)
		}
	case KindHibernateSandbox:
		step, ask = "hibernate:"+sb.UID, func(ctx context.Context, c Command) (Observation, error) {
			return e.cfg.Agents.HibernateSandbox(ctx, node, c, sb.UID, req.IfUnusedFor)
		}
	}
	err = e.call(ctx, t, node, step, func(ctx context.Context, c Command) (err error) {
		obs, err = ask(ctx, c)
		return err
	})
	return obs, err
}

// recordTurn commits the node's observation, unless a later one is recorded already, and ends the operation.
func (e *Engine) recordTurn(ctx context.Context, t *task, node string, obs Observation) error {
	var sb *records.Sandbox
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		sb, err = e.sandbox(ctx, r, op.Tenant, op.Plan.Target)
		if errs.Has(err, errs.ObjectNotFound) {
			sb = nil
			put, err := e.ended(op, goneMeanwhile(op.Plan.Target), nil)
			return catalog.Commit{Puts: []catalog.Put{put}}, err
		}
		if err != nil {
			return catalog.Commit{}, err
		}
		var p puts
		before := sb.Status.Phase
		if e.observe(sb, obs) {
			p.add(sb.Put())
			sb.Revision++
			if sb.Status.Phase != before {
				p.add(e.phaseEvent(sb))
			}
		}
		done := *sb
		p.add(e.ended(op, nil, func(r *Result) { r.Sandboxes = []*records.Sandbox{&done} }))
		return catalog.Commit{Owner: fence.Owner{Coordinator: e.cfg.Epoch, Node: node, Session: obs.Session}, Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	e.resync(ctx, t.op.Tenant, t.op.Plan.Target)
	return e.reload(ctx, t)
}

// phaseEvent says that a node reported a new phase.
func (e *Engine) phaseEvent(sb *records.Sandbox) (catalog.Put, error) {
	return e.event(records.SandboxKey(sb.Tenant, sb.UID), string(sb.Status.Phase), strings.TrimSpace(sb.Status.Reason+" "+sb.Status.Message), sb.Status.Phase == sandbox.Failed)
}

// Changed gives the sandbox of an ended operation that changed one: as it was when it ended, or where that was too large to keep, as
// it is.
func (e *Engine) Changed(ctx context.Context, op *Operation) (*records.Sandbox, error) {
	if op.Result != nil && len(op.Result.Sandboxes) == 1 {
		return op.Result.Sandboxes[0], nil
	}
	return e.sandbox(ctx, e.cfg.Catalog, op.Tenant, op.Plan.Target)
}
