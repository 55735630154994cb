package operations

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// final is an error that the operation fails with: no repetition would change it.
type final struct{ env *errs.Error }

func (f *final) Error() string { return f.env.Error() }
func (f *final) Unwrap() error { return f.env }

func finally(err error) error { return &final{errs.From(err)} }

// isFinal gives the envelope of a final error.
func isFinal(err error) (*errs.Error, bool) {
	var f *final
	if errors.As(err, &f) {
		return f.env, true
	}
	return nil, false
}

// maxInternal is how often an internal error of a node is tried again, maxContainerd how often a node
// whose containerd does not answer: long enough for one that is being started again, some ten seconds.
const maxInternal, maxContainerd = 3, 9

// call asks a node until it answers: with success, or with an error that is final. A node that is
// away, a lost reply and a lost session are asked again, and so is what may pass: a node keeps no result of that.
// The command id is the same each time, also in the next term, which does not know how often it was asked: what a
// node made before an answer was lost is known by the id that made it.
func (e *Engine) call(ctx context.Context, t *task, node, step string, f func(context.Context, Command) error) error {
	delay, internal, containerd := e.cfg.RetryMin, 0, 0
	cmd := Command{ID: t.op.ID + "/" + step, Tenant: t.op.Tenant, OperationID: t.op.ID, RequestID: t.op.RequestID}
	for {
		back := e.cfg.Nodes.Changed() // before the call, so that a node that comes back during it counts
		nodeFault(step, "before")
		asking, done := t.budget(ctx)
		err := f(asking, cmd)
		done()
		nodeFault(step, "after")
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		env := errs.From(err)
		switch env.Reason {
		case errs.NodeAway, errs.Fenced, errs.ShuttingDown, errs.ReplyLost, errs.DeadlineExpired, errs.CallCancelled, errs.NoLeader, errs.QueueFull:
		case errs.InternalError:
			if internal++; internal >= maxInternal {
				return finally(env)
			}
		case errs.ContainerdAway:
			if containerd++; containerd >= maxContainerd {
				return finally(env)
			}
		default:
			if env.Outcome != errs.Unknown {
				return finally(env)
			}
		}
		t.last.Store(env)
		e.log.Warn("a node did not do a step yet", "operation", t.op.ID, "node", node, "step", step, "error", err, "after", delay)
		if env.Reason == errs.NodeAway {
			delay = e.pauseOr(ctx, delay, back) // in its turn, if it has one: nobody gets on there
		} else if delay, err = e.pauseStanding(ctx, t, delay); err != nil {
			return err
		}
	}
}

// nodeBudget is how long a node works at a command of which it is not said how long it may take: see package runner. Operations outlive
// their callers, so that a caller's deadline makes it longer, never shorter.
const nodeBudget = 10 * time.Minute

// allow notes how long a caller is ready to wait.
func (t *task) allow(caller context.Context) {
	deadline, ok := caller.Deadline()
	for ok {
		old := t.until.Load()
		if old != nil && !deadline.After(*old) || t.until.CompareAndSwap(old, &deadline) {
			return
		}
	}
}

// budget is the context of a call to a node. It has a deadline, which travels with the call, where a caller has more left than the node
// would give.
func (t *task) budget(ctx context.Context) (context.Context, context.CancelFunc) {
	if until := t.until.Load(); until != nil && time.Until(*until) > nodeBudget {
		return context.WithDeadline(ctx, *until)
	}
	return context.WithCancel(ctx)
}

// nodeFault is the fault point on one side of a command: steps are verb:uid.
func nodeFault(step, side string) {
	if fault.Enabled {
		verb, _, _ := strings.Cut(step, ":")
		fault.At("node." + verb + "." + side)
	}
}

// insist asks a node until it succeeds. It is for deletions, which have no other way out.
func (e *Engine) insist(ctx context.Context, t *task, node, step string, f func(context.Context, Command) error) error {
	delay := e.cfg.RetryMin
	for round := 1; ; round++ {
		id := step
		if round > 1 {
			id += "+" + strconv.Itoa(round)
		}
		err := e.call(ctx, t, node, id, f)
		env, ok := isFinal(err)
		if !ok {
			t.stuck.meet(nil)
			return err
		}
		t.last.Store(env)
		e.blocked(ctx, t, node, env)
		e.log.Error("a node refuses to delete; it will be asked again", "operation", t.op.ID, "node", node, "step", step, "error", env)
		if delay, err = e.pauseStanding(ctx, t, delay); err != nil {
			return err
		}
	}
}
