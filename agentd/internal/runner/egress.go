package runner

import (
	"context"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// SetEgress changes what a sandbox may reach, connections that there are included; nil is all but what is always
// blocked. It is refused for a sandbox without an outbound network.
//
// The policy is recorded before it is in force, and the generation after it: so the record never says more than
// what holds. After a crash in between, the next agentd puts the policy in force when it starts, and is asked again. A sandbox
// that is hibernated gets it before it runs. A generation below the recorded one was overtaken, and changes nothing.
func (n *Node) SetEgress(ctx context.Context, uid string, generation int64, egress *sandbox.Egress) (nodestate.Sandbox, error) {
	return n.turn(ctx, uid, func(_ context.Context, o *owner) error {
		switch {
		case o.rec.Spec.Network != sandbox.NetworkOutbound:
			return errs.New(errs.InvalidField, "sandbox %s has no outbound network; its egress cannot be set", o.uid).With("field", "egress")
		case o.rec.Phase == sandbox.Deleting:
			return wrongPhase(o.rec, "it is being deleted")
		case generation < o.rec.Generation:
			return nil
		}
		return o.setEgress(generation, egress)
	})
}

func (o *owner) setEgress(generation int64, egress *sandbox.Egress) error {
	rec := o.rec
	rec.Spec = rec.Spec.Clone()
	rec.Spec.Egress = egress.Clone()
	if err := o.put(rec); err != nil {
		return err
	}
	if err := o.n.fault("egress.intent.after"); err != nil {
		return err
	}
	if err := o.n.Networks.SetEgress(o.uid, o.rec.Spec.Egress); err != nil {
		return err
	}
	if err := o.n.fault("egress.policy.after"); err != nil {
		return err
	}
	rec = o.rec
	rec.Generation = generation
	if err := o.observe(rec); err != nil {
		return err
	}
	return o.n.fault("egress.record.after")
}
