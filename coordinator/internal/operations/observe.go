package operations

import (
	"context"
	"reflect"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// observe takes a node's observation into the record and tells whether it changed anything. An
// older observation than the recorded one, and a move that the table does not have, change nothing.
func (e *Engine) observe(sb *records.Sandbox, o Observation) bool {
	if o.Number != 0 && o.Number <= sb.Status.Observation {
		return false
	}
	if o.Number != 0 {
		sb.Status.Observation = o.Number
	}
	st := &sb.Status
	for to, from := range map[*string]string{&st.ImageDigest: o.ImageDigest, &st.ErofsDigest: o.ErofsDigest, &st.RuntimeBundle: o.RuntimeBundle, &st.RestoredFrom: o.RestoredFrom} {
		if from != "" {
			*to = from
		}
	}
	st.ObservedGeneration = max(st.ObservedGeneration, o.ObservedGeneration)
	sb.CatchUp()
	if !o.StartTime.IsZero() {
		st.StartTime = o.StartTime
	}
	if o.StartService > 0 {
		st.StartQueued, st.StartService = o.StartQueued, o.StartService
	}
	if st.Phase == sandbox.Deleting || o.Phase == sandbox.Deleting || !take(sb, o.Phase, o.Reason, o.Message) {
		return true
	}
	if o.Phase == sandbox.Stopped || o.Phase == sandbox.Failed {
		st.ExitCode = o.ExitCode
	}
	if o.Phase == sandbox.Running || o.Phase == sandbox.Paused || o.Phase == sandbox.Stopped {
		sb.SourceSnapshot = ""
	}
	return true
}

// Observe commits what a node reports of a sandbox, under the node's session. An error of
// outcome not_started with retry never means that the report will never be taken.
func (e *Engine) Observe(ctx context.Context, node string, o Observation) error {
	key := records.SandboxKey(o.Tenant, o.UID)
	if err := key.Validate(); err != nil {
		return err
	}
	if e.foreseen(node, o) {
		return nil
	}
	owner := fence.Owner{Coordinator: e.cfg.Epoch, Node: node, Session: o.Session}
	_, err := e.changeAs(ctx, owner, o.Tenant, o.UID, func(_ context.Context, _ catalog.Reader, sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Node != node {
			return nil, errs.New(errs.WrongPhase, "sandbox %s is not on node %s", o.UID, node).With("uid", o.UID).With("phase", string(sb.Status.Phase))
		}
		before := *sb
		if !e.observe(sb, o) || nothingNew(before, *sb, o.Phase) {
			return nil, errNothing
		}
		if before.Status.Phase == sb.Status.Phase {
			return nil, nil
		}
		ev, err := e.phaseEvent(sb)
		return []catalog.Put{ev}, err
	})
	return err
}

// foreseen tells, without a look at the record, whether it has the observation already, or will have one with a higher number as
// soon as the start that is in flight ends. Every start is reported twice, when it begins and when it has answered; a
// commit for the first and a read for the second cost as much as the commit that matters.
func (e *Engine) foreseen(node string, o Observation) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	r, here := e.placed[node][o.UID]
	if !here || o.Number == 0 {
		return false
	}
	return o.Number <= r.observed || o.Phase == sandbox.Starting && e.starting[o.UID] != nil
}

// nothingNew tells whether an observation says no more than that a node has begun what it was told to do.
// Not keeping its number saves a commit that would race with the one of the work's end, and loses
// nothing: whatever the record does not say yet has a higher number.
func nothingNew(before, after records.Sandbox, observed sandbox.Phase) bool {
	if observed != sandbox.Starting && observed != sandbox.Deleting {
		return false
	}
	before.Status.Observation = after.Status.Observation
	return before.SourceSnapshot == after.SourceSnapshot && reflect.DeepEqual(before.Status, after.Status)
}

// Lost commits that a node came back without a sandbox that it had, if the record is still at
// the revision at which it was read before the node was asked.
func (e *Engine) Lost(ctx context.Context, node string, session fence.Epoch, tenant, uid string, revision uint64) error {
	owner := fence.Owner{Coordinator: e.cfg.Epoch, Node: node, Session: session}
	_, err := e.changeAs(ctx, owner, tenant, uid, func(_ context.Context, _ catalog.Reader, sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Revision != revision || sb.Status.Node != node || !take(sb, sandbox.Failed, sandbox.ReasonLost, "node "+node+" came back without it") {
			return nil, errNothing
		}
		ev, err := e.event(records.SandboxKey(tenant, uid), "Lost", "node "+node+" came back without it", true)
		return []catalog.Put{ev}, err
	})
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	return err
}
