package operations

import (
	"context"
	"errors"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/mutant"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// door decides, inside the commit queue, whether the request can be accepted: it reads what the request
// names, fills the operation's plan and gives the first writes of everything in it. It may run
// more than once.
type door func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error)

type writes struct {
	puts   []catalog.Put
	checks []catalog.Check
	// placed is the sandbox that the ledger counts already.
	placed string
	// accepted is called once the commit is certain to be this operation's and new; refused when it is certain not to be, or
	// not known. A build that runs again has had neither.
	accepted, refused func()
	// complete ends the operation in the accepting commit itself.
	complete bool
	// result, if given, fills the result of an operation that is complete.
	result func(*Result)
}

// tell calls accepted or refused.
func (w writes) tell(accepted bool) {
	f := w.refused
	if accepted {
		f = w.accepted
	}
	if f != nil {
		f()
	}
}

// submit accepts the request, or joins the operation that was accepted under its id, and waits for its end.
func (e *Engine) submit(ctx context.Context, c Call, kind Kind, request any, secrets map[string]string, d door) (*Operation, error) {
	op, err := e.accept(ctx, c, kind, request, secrets, d)
	if err != nil {
		return nil, errs.From(err).WithRequest(c.RequestID, c.OperationID)
	}
	op, err = e.await(ctx, op, secrets)
	if err != nil {
		return nil, errs.From(err).WithRequest(c.RequestID, c.OperationID)
	}
	fault.At("operation.reply.before")
	if op.State == Failed {
		return nil, op.Error.WithRequest(c.RequestID, op.ID).AsAnswer()
	}
	return op, nil
}

// accept waits at the gate, so that a crowd of new requests leaves the catalog to what is in progress.
func (e *Engine) accept(ctx context.Context, c Call, kind Kind, request any, secrets map[string]string, d door) (*Operation, error) {
	leave, err := e.gate.enter(ctx, e.ctx, c.Tenant)
	if err != nil {
		return nil, err
	}
	defer leave()
	return e.acceptNow(ctx, c, kind, request, secrets, d)
}

func (e *Engine) acceptNow(ctx context.Context, c Call, kind Kind, request any, secrets map[string]string, d door) (*Operation, error) {
	if c.OperationID == "" {
		c.OperationID = uid.New()
	}
	minted, err := uid.Time(c.OperationID)
	if err != nil {
		return nil, errs.New(errs.InvalidField, "operation_id: %v", err).With("field", "operation_id")
	}
	if minted.After(e.now().Add(catalog.MaxAhead)) {
		return nil, errs.New(errs.InvalidField, "operation_id: its time is more than %s in the future; make ids of the present time, and compare the clocks of client and coordinator", catalog.MaxAhead).With("field", "operation_id")
	}
	sum, body, err := digest(kind, request)
	if err != nil {
		return nil, err
	}
	known, err := e.lookup(ctx, c.Tenant, c.OperationID)
	if err == nil {
		return known, sameBody(known, sum)
	}
	if !errs.Has(err, errs.ObjectNotFound) {
		return nil, err
	}
	if err := e.admit(kind, c.Tenant); err != nil {
		return nil, err
	}
	blank := Operation{ID: c.OperationID, Tenant: c.Tenant, Kind: kind, Digest: sum, Request: body,
		RequestID: c.RequestID, HadSecrets: len(secrets) > 0, State: Pending}
	var op Operation
	var w writes
	res, err := e.publish(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op = blank
		op.Created = e.now()
		e.forget(w.placed) // by a build that was not applied
		var err error
		w, err = d(ctx, r, &op)
		if err != nil {
			return catalog.Commit{}, err
		}
		for _, p := range w.puts {
			if op.Node = p.Record.Node; op.Node != "" {
				break
			}
		}
		var put catalog.Put
		if w.complete {
			put, err = e.ended(&op, nil, w.result)
		} else {
			put, err = op.put()
		}
		return catalog.Commit{ID: op.ID, Tenant: op.Tenant, Digest: op.Digest, Minted: minted,
			Checks: w.checks, Puts: append([]catalog.Put{put}, w.puts...)}, err
	})
	mine := err == nil && res.Seq != 0 && !res.Replayed
	w.tell(mine)
	if mine {
		op.revision, op.fresh = res.Revisions[records.OperationKey(op.Tenant, op.ID)], true
		return &op, nil
	}
	if err != nil && !errs.NotStartedFor(err) && mutant.On(mutant.BlindRetry) {
		c.OperationID = uid.New()
		return e.acceptNow(ctx, c, kind, request, secrets, d)
	}
	switch {
	case w.placed == "":
	case errs.NotStartedFor(err):
		e.forget(w.placed)
	default:
		e.settlePlaced(c.Tenant, w.placed)
	}
	return e.accepted(ctx, c, sum, err)
}

// accepted resolves what the accepting commit said. A refusal may be the echo of our own id: the
// same request, sent twice, meets at the door what its twin has made.
func (e *Engine) accepted(ctx context.Context, c Call, sum string, err error) (*Operation, error) {
	op, lookupErr := e.lookup(ctx, c.Tenant, c.OperationID)
	switch {
	case lookupErr == nil:
		return op, sameBody(op, sum)
	case err != nil:
		return nil, err
	case errs.Has(lookupErr, errs.ObjectNotFound):
		return nil, errs.New(errs.OperationExpired, "operation %s ended so long ago that its result is no longer kept; look at the object, then use a new operation id", c.OperationID)
	}
	return nil, lookupErr
}

func (e *Engine) lookup(ctx context.Context, tenant, id string) (*Operation, error) {
	rec, err := e.cfg.Catalog.Get(ctx, records.OperationKey(tenant, id))
	if err != nil {
		return nil, err
	}
	return OperationOf(rec)
}

func sameBody(op *Operation, sum string) error {
	if op.Digest == sum {
		return nil
	}
	return errs.New(errs.OperationBodyMismatch, "this operation id was used with another request; use a new operation id").
		With("operation_id", op.ID).With("kind", string(op.Kind))
}

func (e *Engine) admit(kind Kind, tenant string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped || e.ctx.Err() != nil {
		return errs.New(errs.NoLeader, "this coordinator is not the leader; ask again")
	}
	if len(e.tasks) >= e.cfg.MaxPending {
		return errs.New(errs.QueueFull, "%d operations are in progress; wait, then ask again", len(e.tasks)).With("resource", "operations")
	}
	return e.room(kind, tenant)
}

// await drives the operation, if nothing does yet, and waits for its end or the caller's. The
// work goes on when the caller has gone.
func (e *Engine) await(ctx context.Context, op *Operation, secrets map[string]string) (*Operation, error) {
	if op.State != Pending {
		return op, nil
	}
	t := e.launch(op, secrets)
	if t == nil {
		return nil, lostTerm(op)
	}
	t.allow(ctx)
	ctx, cancel := beforeDeadline(ctx)
	defer cancel()
	for {
		obstacle, met := t.stuck.look()
		if obstacle != nil && !closed(t.done) {
			return nil, obstacle
		}
		select {
		case <-t.done:
			if t.op.State == Pending {
				return nil, lostTerm(op)
			}
			return t.op, nil
		case <-met:
		case <-ctx.Done():
			return nil, stillGoing(ctx, t, op)
		}
	}
}

func lostTerm(op *Operation) error {
	return errs.New(errs.NoLeader, "the coordinator stopped leading; another goes on with operation %s: ask again with the same operation id", op.ID).
		WithOutcome(errs.Unknown, errs.SameOperation).WithRequest("", op.ID)
}

// stillGoing says why the operation has not ended by the caller's deadline.
func stillGoing(ctx context.Context, t *task, op *Operation) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return errs.New(errs.CallCancelled, "the call was cancelled; operation %s goes on", op.ID).WithRequest("", op.ID)
	}
	if last := t.last.Load(); last != nil && last.Reason == errs.NodeAway {
		return last.WithOutcome(errs.Unknown, errs.SameOperation).WithRequest("", op.ID)
	}
	return errs.New(errs.DeadlineExpired, "the deadline passed; operation %s goes on: ask again with the same operation id", op.ID).WithRequest("", op.ID)
}

// beforeDeadline ends a little before the caller's deadline, so that the answer still reaches it.
func beforeDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	margin := min(time.Until(deadline)/10, 300*time.Millisecond)
	return context.WithDeadline(ctx, deadline.Add(-margin))
}

// Operation finds an operation of the tenant.
func (e *Engine) Operation(ctx context.Context, tenant, id string) (*Operation, error) {
	return e.lookup(ctx, tenant, id)
}
