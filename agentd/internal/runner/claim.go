package runner

import (
	"context"
	"errors"
	"maps"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// ClaimRequest gives a sandbox that stands still to whoever asked for one.
type ClaimRequest struct {
	UID, Tenant, Name string
	Generation        int64
	CommandID         string
	Hostname          string
	// Env is added to the environment of the processes that are started from now on.
	Env map[string]string
}

// Claim gives a paused sandbox its new identity and makes it run: what it is to be is written with the intent, and Running once its
// guest has taken it. The same command id again gives the same sandbox; any other is refused. After an error of the runtime
// or the guest the sandbox is ended: it is not given to anybody else.
func (n *Node) Claim(ctx context.Context, req ClaimRequest) (nodestate.Sandbox, error) {
	return n.turn(ctx, req.UID, func(ctx context.Context, o *owner) error {
		if o.rec.Tenant != req.Tenant {
			return noSandbox(req.UID)
		}
		switch was := o.rec.Claim; {
		case o.rec.Intent != nodestate.IntentKeep:
			return wrongPhase(o.rec, "it cannot be claimed any more")
		case was != nil && was.CommandID != req.CommandID:
			return wrongPhase(o.rec, "it was claimed by another command")
		case was != nil && was.Told:
			return nil
		case was != nil && o.rec.Phase == sandbox.Resuming:
			return because(ctx, o.resume(ctx))
		case o.rec.Phase != sandbox.Paused || !o.stands():
			return wrongPhase(o.rec, "only a paused sandbox can be claimed")
		}
		if err := left(ctx); err != nil {
			return err
		}
		rec, err := claimed(o.rec, req)
		if err != nil {
			return err
		}
		return because(ctx, o.resumeAs(ctx, rec))
	})
}

// claimed is the record of a sandbox that is about to be given away. Its channel gets a generation of its own: by that the guest knows a claim from
// the repetition of one.
func claimed(rec nodestate.Sandbox, req ClaimRequest) (nodestate.Sandbox, error) {
	rec.Name, rec.Generation = req.Name, max(rec.Generation, req.Generation)
	rec.Hostname = hostname(req.Hostname, req.Name, req.UID)
	rec.GuestGeneration++
	rec.Claim = &nodestate.Claim{CommandID: req.CommandID}
	rec.Spec = rec.Spec.Clone()
	rec.Spec.Hostname = req.Hostname
	if len(req.Env) == 0 {
		return rec, nil
	}
	if rec.Spec.Env == nil {
		rec.Spec.Env = make(map[string]string, len(req.Env))
	}
	maps.Copy(rec.Spec.Env, req.Env)
	if p := sandbox.ValidateEnv("env", rec.Spec.Env); p != nil {
		return rec, errs.Wrap(p, errs.Reason(p.Reason), "with what the sandbox has already: %s", p.Message).With("field", p.Field)
	}
	rec.Defaults.Env = MergeEnv(rec.Defaults.Env, req.Env)
	return rec, nil
}

// claiming tells whether the guest is still to be told that the sandbox was given away.
func (o *owner) claiming() bool { return o.rec.Claim != nil && !o.rec.Claim.Told }

// tell gives the guest of a sandbox that runs again its new identity, over a new channel. A sandbox whose guest does not take it is
// ended.
func (o *owner) tell(ctx context.Context) error {
	err := o.openChannel(ctx)
	if err == nil {
		hello, cancel := context.WithTimeout(ctx, helloTimeout)
		defer cancel()
		err = o.explainSilence(ctx, o.openGuest().Configure(hello, Identity{Hostname: o.rec.Hostname, Hook: HookNow}))
	}
	if err == nil {
		return o.n.fault("claim.told.after")
	}
	err = errs.Wrap(err, errs.SandboxFailed, "the guest of sandbox %s did not take its new identity: %v", o.uid, err).With("uid", o.uid).With("step", "claim")
	o.closeGuest()
	o.stand(false)
	return errors.Join(err, o.endLost(ctx, "its guest did not take the identity of a claim, and the sandbox was ended"))
}
