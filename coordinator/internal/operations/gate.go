package operations

import (
	"context"
	"strconv"
	"sync/atomic"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// gate lets a bounded number of requests at a time read the catalog and commit their acceptance. What was accepted passes no gate: what a node has
// done is published, and operations end, however many requests stand here, which have nothing in the catalog yet and no turn
// in its queue. Tenants take turns at it: who comes with a thousand requests does not delay who comes with one.
type gate struct {
	turns   *turns
	waiting atomic.Int64
	most    int64
}

func newGate(width, most int) *gate {
	return &gate{turns: newTurns(width), most: int64(most)}
}

// enter waits for a slot, at most until the call or the term ends. Nothing was started when it fails.
func (g *gate) enter(ctx, term context.Context, tenant string) (leave func(), err error) {
	w, leave := g.turns.join("", tenant)
	if closed(w.ready) {
		return leave, nil
	}
	defer g.waiting.Add(-1)
	if g.waiting.Add(1) > g.most {
		g.turns.quit(w, leave)
		return nil, errs.New(errs.QueueFull, "%d requests wait to be accepted; wait, then ask again", g.most).
			With("resource", "requests").With("limit", strconv.FormatInt(g.most, 10))
	}
	select {
	case <-w.ready:
		return leave, nil
	case <-ctx.Done():
		g.turns.quit(w, leave)
		return nil, errs.From(ctx.Err()).WithOutcome(errs.NotStarted, errs.SameOperation)
	case <-term.Done():
		g.turns.quit(w, leave)
		return nil, errs.New(errs.NoLeader, "this coordinator is not the leader; ask again")
	}
}

// together reads some records in one round trip, for a build that needs each of them.
type together struct {
	catalog.Reader
	found map[catalog.Key]catalog.Record
	read  []catalog.Key
}

func readTogether(ctx context.Context, r catalog.Reader, keys ...catalog.Key) (catalog.Reader, error) {
	found, err := r.GetMany(ctx, keys)
	return together{r, found, keys}, err
}

// Get implements catalog.Reader.
func (t together) Get(ctx context.Context, key catalog.Key) (catalog.Record, error) {
	if rec, ok := t.found[key]; ok {
		return rec, nil
	}
	for _, k := range t.read {
		if k == key {
			return catalog.Record{}, catalog.NotFound(key.Kind, key.UID)
		}
	}
	return t.Reader.Get(ctx, key)
}
