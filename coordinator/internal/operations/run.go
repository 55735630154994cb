package operations

import (
	"context"
	"errors"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// makeRun brings a Pending or Starting sandbox to Running (or Stopped, when its command was quick),
// by what its record says. fin, if given, makes the write that ends the operation in the same
// commit. committed tells that this call made that commit.
func (e *Engine) makeRun(ctx context.Context, t *task, uid string, fin func(*Operation, *records.Sandbox) (catalog.Put, error)) (committed bool, err error) {
	callCtx, leave, err := e.takeOff(ctx, uid)
	if err != nil {
		return false, err
	}
	defer leave()
	began := e.cfg.Now()
	refused := make(map[string]string) // by node
	for !committed {
		sb, err := e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, uid)
		if errs.Has(err, errs.ObjectNotFound) {
			return false, finally(overtaken(uid))
		}
		if err != nil {
			return false, err
		}
		switch sb.Status.Phase {
		case sandbox.Pending:
			err = e.placeSandbox(ctx, callCtx, t, sb, began)
		case sandbox.Starting:
			e.account(sb) // the reply to the commit that placed it may have been lost
			if committed, err = e.startOnNode(ctx, callCtx, t, sb, fin); noRoom(err) {
				refused[sb.Status.Node] = errs.From(err).Message
				err = e.placeElsewhere(ctx, sb, refused, err)
			}
		case sandbox.Deleting:
			return false, finally(overtaken(uid))
		case sandbox.Failed:
			return false, finally(errs.New(errs.SandboxFailed, "the sandbox failed (%s): %s", sb.Status.Reason, sb.Status.Message).
				With("uid", uid).With("step", "start").With("sandbox_reason", sb.Status.Reason))
		default:
			return false, nil
		}
		if err != nil && !errors.Is(err, errInterrupted) {
			return false, err
		}
	}
	return true, nil
}

// noRoom tells whether a node refused a sandbox because it does not fit there, and nothing of it is there.
func noRoom(err error) bool {
	env, ok := isFinal(err)
	return ok && env.Outcome == errs.NotStarted && (env.Reason == errs.OutOfMemory || env.Reason == errs.NodeFull)
}

// placeElsewhere commits another node to a sandbox that some refused. refusal is what the operation fails with if no node is left.
func (e *Engine) placeElsewhere(ctx context.Context, sb *records.Sandbox, refused map[string]string, refusal error) error {
	req, err := e.needs(ctx, e.cfg.Catalog, sb)
	if err != nil {
		return err
	}
	req.Refused = refused
	node, err := e.decide(sb.UID, req)
	if err != nil {
		return refusal
	}
	from := sb.Status.Node
	committed, err := e.changeSandbox(ctx, sb.Tenant, sb.UID, func(sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Phase != sandbox.Starting || sb.Status.Node != from {
			return nil, errNothing
		}
		sb.Status.Node = node
		message := "placed on node " + node + ": " + from + " refused it: " + refused[from]
		sb.Status.SetCondition(sandbox.Condition{Type: "Scheduled", Status: true, Reason: "PlacedAgain", Message: message, LastTransitionTime: e.now()})
		ev, err := e.event(records.SandboxKey(sb.Tenant, sb.UID), "Rescheduled", message, false)
		return []catalog.Put{ev}, err
	})
	if err != nil || committed == nil {
		e.resync(ctx, sb.Tenant, sb.UID)
	}
	return err
}

func overtaken(uid string) *errs.Error {
	return errs.New(errs.WrongPhase, "sandbox %s was deleted before it ran", uid).With("uid", uid).With("phase", string(sandbox.Deleting)).
		WithOutcome(errs.Terminal, errs.Never)
}

// takeOff registers a start in flight, which a deletion interrupts and waits for.
func (e *Engine) takeOff(ctx context.Context, uid string) (context.Context, func(), error) {
	callCtx, cancel := context.WithCancelCause(ctx)
	f := &flight{cancel: cancel, done: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.starting[uid] != nil {
		cancel(nil)
		return nil, nil, errs.New(errs.WrongPhase, "sandbox %s is being started by another operation", uid)
	}
	e.starting[uid] = f
	return callCtx, func() {
		e.mu.Lock()
		delete(e.starting, uid)
		e.mu.Unlock()
		close(f.done)
		cancel(nil)
	}, nil
}

// interrupt ends a start in flight and waits until its goroutine has let go.
func (e *Engine) interrupt(ctx context.Context, uid string) error {
	e.mu.Lock()
	f := e.starting[uid]
	e.mu.Unlock()
	if f == nil {
		return nil
	}
	f.cancel(errInterrupted)
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// placeSandbox decides where, and commits Starting there before the node is told. A deletion ends the wait
// for a node.
func (e *Engine) placeSandbox(ctx, callCtx context.Context, t *task, sb *records.Sandbox, since time.Time) error {
	req, err := e.needs(ctx, e.cfg.Catalog, sb)
	if err != nil {
		return err
	}
	node, err := e.place(callCtx, sb.UID, req, since, func(why string) error {
		_, err := e.changeSandbox(ctx, sb.Tenant, sb.UID, func(sb *records.Sandbox) ([]catalog.Put, error) {
			if sb.Status.Phase != sandbox.Pending {
				return nil, errNothing
			}
			sb.Status.SetCondition(sandbox.Condition{Type: "Scheduled", Reason: "Waiting", Message: why, LastTransitionTime: e.now()})
			return nil, nil
		})
		return err
	})
	if err != nil {
		return err
	}
	committed, err := e.changeSandbox(ctx, sb.Tenant, sb.UID, func(sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Phase != sandbox.Pending {
			return nil, errNothing
		}
		ev, err := e.placedOn(sb, node)
		return []catalog.Put{ev}, err
	})
	if err != nil || committed == nil {
		e.resync(ctx, sb.Tenant, sb.UID)
	}
	return err
}

// needs is what a node must have to take the sandbox.
func (e *Engine) needs(ctx context.Context, r catalog.Reader, sb *records.Sandbox) (placement.Request, error) {
	req := placement.Request{Resources: request(sb), Limits: limits(sb.Spec), Outbound: sb.Spec.Network == sandbox.NetworkOutbound, Selector: sb.Spec.NodeSelector, Volumes: make(map[string]string)}
	for _, a := range sb.Attachments {
		rec, err := r.Get(ctx, records.VolumeKey(sb.Tenant, a.VolumeUID))
		if err != nil {
			return req, err
		}
		req.Volumes[a.VolumeUID] = rec.Node
	}
	if sb.SourceSnapshot == "" {
		return req, nil
	}
	rec, err := r.Get(ctx, records.SnapshotKey(sb.Tenant, sb.SourceSnapshot))
	if err != nil {
		return req, err
	}
	snap, err := records.SnapshotOf(rec)
	if err == nil {
		req.Artefact = append([]string{}, snap.Status.Nodes...)
	}
	return req, err
}

// placedOn moves a Pending sandbox to Starting on the node, and makes the event that says so.
func (e *Engine) placedOn(sb *records.Sandbox, node string) (catalog.Put, error) {
	if err := enterSandbox(sb, sandbox.Starting); err != nil {
		return catalog.Put{}, err
	}
	sb.Status.Node = node
	sb.Status.SetCondition(sandbox.Condition{Type: "Scheduled", Status: true, Reason: "Placed", Message: node, LastTransitionTime: e.now()})
	return e.event(records.SandboxKey(sb.Tenant, sb.UID), "Scheduled", "placed on node "+node, false)
}

// placeAtOnce places a new sandbox in the commit that accepts it, if a node fits now; that saves a commit
// of its own. It gives the uid that the ledger counts, or "": then the sandbox stays Pending, and its
// operation waits for a node, or fails.
func (e *Engine) placeAtOnce(ctx context.Context, r catalog.Reader, sb *records.Sandbox, p *puts) (uid string, err error) {
	req, err := e.needs(ctx, r, sb)
	if err != nil {
		return "", err
	}
	node, err := e.decide(sb.UID, req)
	if err != nil {
		return "", nil //nolint:nilerr // placeSandbox meets it again, waits, and says why
	}
	p.add(e.placedOn(sb, node))
	return sb.UID, nil
}

// settlePlaced takes a sandbox whose accepting commit may not be applied out of the ledger, if there is no
// record of it. One that is recorded is its operation's to account for.
func (e *Engine) settlePlaced(tenant, uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped {
		return
	}
	e.wg.Go(func() {
		for delay := e.cfg.RetryMin; e.ctx.Err() == nil; delay = e.pause(e.ctx, delay) {
			_, err := e.sandbox(e.ctx, e.cfg.Catalog, tenant, uid)
			if errs.Has(err, errs.ObjectNotFound) {
				e.forget(uid)
			}
			if err == nil || errs.Has(err, errs.ObjectNotFound) {
				return
			}
		}
	})
}

// startOnNode tells the node, and commits what it observed.
func (e *Engine) startOnNode(ctx, callCtx context.Context, t *task, sb *records.Sandbox, fin func(*Operation, *records.Sandbox) (catalog.Put, error)) (committed bool, err error) {
	node := sb.Status.Node
	if t.op.HadSecrets && t.secrets == nil {
		return false, finally(errs.New(errs.SecretsLost, "the coordinator restarted before the sandbox ran and no longer has its secret environment; create it again with a new operation id").With("uid", sb.UID))
	}
	var obs Observation
	step := "start:" + sb.UID
	if sb.SourceSnapshot != "" {
		step = "restore:" + sb.UID
	}
	err = e.call(callCtx, t, node, step, func(ctx context.Context, c Command) (err error) {
		if sb.SourceSnapshot != "" {
			obs, err = e.cfg.Agents.RestoreSandbox(ctx, node, c, sb)
		} else {
			obs, err = e.cfg.Agents.StartSandbox(ctx, node, c, sb, t.secrets)
		}
		return err
	})
	if err != nil {
		return false, err
	}
	return e.recordStart(ctx, t, sb, obs, fin)
}

func (e *Engine) recordStart(ctx context.Context, t *task, sb *records.Sandbox, obs Observation, fin func(*Operation, *records.Sandbox) (catalog.Put, error)) (committed bool, err error) {
	owner := fence.Owner{Coordinator: e.cfg.Epoch, Node: sb.Status.Node, Session: obs.Session}
	changed, err := e.changeAs(ctx, owner, sb.Tenant, sb.UID, func(ctx context.Context, r catalog.Reader, sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Phase != sandbox.Starting {
			return nil, errNothing
		}
		e.observe(sb, obs)
		if sb.Status.Phase == sandbox.Starting {
			if err := enterSandbox(sb, sandbox.Running); err != nil { // a reply of success means that it ran
				return nil, err
			}
			sb.SourceSnapshot = ""
		}
		reason := "Started"
		if obs.RestoredFrom != "" {
			reason = "Restored"
		}
		ev, err := e.event(records.SandboxKey(sb.Tenant, sb.UID), reason, "runs on node "+sb.Status.Node, false)
		if err != nil || fin == nil {
			return []catalog.Put{ev}, err
		}
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return nil, err
		}
		put, err := fin(op, sb)
		return []catalog.Put{ev, put}, err
	}, records.OperationKey(t.op.Tenant, t.op.ID))
	return changed != nil, err
}

// changeSandbox commits a change of a sandbox's record with the coordinator as owner.
func (e *Engine) changeSandbox(ctx context.Context, tenant, uid string, change func(*records.Sandbox) ([]catalog.Put, error)) (*records.Sandbox, error) {
	return e.changeAs(ctx, e.owner(), tenant, uid, func(_ context.Context, _ catalog.Reader, sb *records.Sandbox) ([]catalog.Put, error) {
		return change(sb)
	})
}

// changeAs commits a change of a sandbox's record, with further writes, and accounts for it. What change reads beside
// it is named too, so that it comes with it. It gives what was committed, or nil when the change found nothing to do.
func (e *Engine) changeAs(ctx context.Context, owner fence.Owner, tenant, uid string, change func(context.Context, catalog.Reader, *records.Sandbox) ([]catalog.Put, error), with ...catalog.Key) (*records.Sandbox, error) {
	var sb *records.Sandbox
	res, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		var err error
		if len(with) > 0 {
			if r, err = readTogether(ctx, r, append(with, records.SandboxKey(tenant, uid))...); err != nil {
				return catalog.Commit{}, err
			}
		}
		if sb, err = e.sandbox(ctx, r, tenant, uid); err != nil {
			return catalog.Commit{}, err
		}
		more, err := change(ctx, r, sb)
		if err != nil {
			return catalog.Commit{}, err
		}
		put, err := sb.Put()
		return catalog.Commit{Owner: owner, Puts: append([]catalog.Put{put}, more...)}, err
	})
	if err != nil || res.Seq == 0 {
		return nil, err
	}
	sb.Revision++
	e.account(sb)
	return sb, nil
}

// resync brings the ledger back to the record after a change that was not made.
func (e *Engine) resync(ctx context.Context, tenant, uid string) {
	sb, err := e.sandbox(ctx, e.cfg.Catalog, tenant, uid)
	switch {
	case err == nil:
		e.account(sb)
	case errs.Has(err, errs.ObjectNotFound):
		e.forget(uid)
	}
}

func (e *Engine) sandbox(ctx context.Context, r catalog.Reader, tenant, uid string) (*records.Sandbox, error) {
	rec, err := r.Get(ctx, records.SandboxKey(tenant, uid))
	if err != nil {
		return nil, err
	}
	return records.SandboxOf(rec)
}
