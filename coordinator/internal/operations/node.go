package operations

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// CordonNode keeps new work away from a node, or lets it come again. What runs there goes on.
func (e *Engine) CordonNode(ctx context.Context, c Call, req Cordon, cordoned bool) (*Operation, error) {
	if err := catalog.ValidateNode(req.Name); err != nil {
		return nil, err
	}
	kind := KindUncordonNode
	if cordoned {
		kind = KindCordonNode
	}
	op, err := e.submit(ctx, c, kind, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := r.Get(ctx, records.NodeKey(req.Name))
		if errs.Has(err, errs.ObjectNotFound) {
			return writes{}, errs.New(errs.ObjectNotFound, "there is no node %s", req.Name).With("kind", "node").With("name", req.Name)
		}
		if err != nil {
			return writes{}, err
		}
		n, err := records.NodeOf(rec)
		if err != nil {
			return writes{}, err
		}
		op.Plan.Node, n.Cordoned = req.Name, cordoned
		var p puts
		p.add(n.Put())
		return writes{puts: p.all, complete: true}, p.err
	})
	if err == nil && op.Plan.Node != "" {
		if rec, err := e.cfg.Catalog.Get(ctx, records.NodeKey(req.Name)); err == nil {
			if n, err := records.NodeOf(rec); err == nil {
				e.cfg.Nodes.Cordon(req.Name, n.Cordoned) // what is recorded, not what a replay once asked
			}
		}
	}
	return op, err
}
