package runner

import (
	"context"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// SetEgress changes what a sandbox may reach, connections that there are included; nil is all but what is always
// blocked. The policy is durable before it is in force: after a crash in between, the next agentd puts it in force
// when it starts. The same policy again changes nothing. It is refused for a sandbox without an outbound network.
func (n *Node) SetEgress(ctx context.Context, uid string, egress *sandbox.Egress) error {
	return n.do(ctx, uid, false, func(_ context.Context, o *owner) error {
		switch {
		case !o.exists:
			return errs.New(errs.ObjectNotFound, "this node has no sandbox %s", o.uid).With("kind", "sandbox").With("uid", o.uid)
		case o.rec.Spec.Network != sandbox.NetworkOutbound:
			return errs.New(errs.InvalidField, "sandbox %s has no outbound network; its egress cannot be set", o.uid).With("field", "egress")
		case o.rec.Phase.Terminal() || o.rec.Phase == sandbox.Deleting:
			return wrongPhase(o.rec, "it reaches nothing any more")
		}
		rec := o.rec
		rec.Spec = rec.Spec.Clone()
		rec.Spec.Egress = egress.Clone()
		if err := o.put(rec); err != nil {
			return err
		}
		return n.Networks.SetEgress(o.uid, o.rec.Spec.Egress)
	})
}
