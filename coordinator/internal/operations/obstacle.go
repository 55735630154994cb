package operations

import (
	"context"
	"math"
	"strings"
	"sync"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// obstacle is what keeps an operation from ending until an operator does something about it: its callers are told, and it goes on. The zero
// value is none.
type obstacle struct {
	mu   sync.Mutex
	err  *errs.Error
	news chan struct{} // closed when one is met; nil while nobody waits for that
}

// meet notes an obstacle, or, nil, that there is none any more.
func (o *obstacle) meet(err *errs.Error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
	if err != nil && o.news != nil {
		close(o.news)
		o.news = nil
	}
}

// look gives the obstacle, or what is closed when one is met.
func (o *obstacle) look() (*errs.Error, <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil && o.news == nil {
		o.news = make(chan struct{})
	}
	return o.err, o.news
}

// blocked tells those who wait for a deletion that its node refuses it for a sandbox that no record names and nothing proves to be deleted: a repair of
// the catalog went on without it, and nobody removes it but an operator.
func (e *Engine) blocked(ctx context.Context, t *task, node string, refusal *errs.Error) {
	if refusal.Reason != errs.StillReferenced {
		return
	}
	for holder := range strings.SplitSeq(refusal.Details["references"], ",") {
		key := records.SandboxKey(t.op.Tenant, holder)
		if key.Validate() != nil {
			continue
		}
		verdicts, err := e.Judge(ctx, math.MaxUint64, []catalog.Key{key})
		if err != nil || verdicts[key] != Unproven {
			continue
		}
		t.stuck.meet(errs.New(errs.StillReferenced, "%s is held on node %s by sandbox %s, which no record names, since a repair of the catalog went on without it: an operator removes it with "+
			"\"dormouse admin catalog drop --node %s %s\" or takes it back with \"dormouse admin catalog adopt --node %s %s\"; operation %s goes on and ends when nothing holds it",
			t.op.Plan.Target, node, holder, node, holder, node, holder, t.op.ID).
			With("uid", t.op.Plan.Target).With("references", holder).With("count", "1").With("node", node).
			WithOutcome(errs.Unknown, errs.Never).WithRequest("", t.op.ID))
		return
	}
}
