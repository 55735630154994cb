package app

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// What a coordinator concluded from the catalog holds for the server that it read it from.
//
//	proven     the view is what the server has: read since it was met, or shown to hold on since
//	unproven   another server process was met: no new request is taken until the view is proven, or the term ends
//	suspended  the catalog lost what it had acknowledged: the leader lets nodes in, for their journals, and nothing else
//
// The proof: the history has all that this coordinator has seen, its epoch is still the one in force, so that nobody else
// can have committed, and no third server was met meanwhile. A header that can be read proves nothing.

// sound tells why the catalog is suspended, which it sees to if it does not have what this coordinator has seen of it.
func (a *App) sound(ctx context.Context, epoch fence.Epoch) (*catalog.Suspension, error) {
	seen := a.store.Seen()
	relation, err := a.store.Compare(ctx, seen)
	if err != nil {
		return nil, err
	}
	if relation.Missing() {
		if err := a.suspend(ctx, epoch, a.cfg.Holder, seen); err != nil {
			return nil, err
		}
	}
	st, err := a.store.Status(ctx)
	return st.Suspended, err
}

// standBy makes one who does not lead a witness: it remembers what the catalog has, and suspends it, in the leader's name, when it does not
// have any more what is remembered. The leader learns of it from its next commit.
func (a *App) standBy(ctx context.Context, leader fence.Epoch) error {
	seen := a.store.Seen()
	relation, err := a.store.Compare(ctx, seen)
	if err != nil {
		return err
	}
	if !relation.Missing() {
		_, err := a.store.History(ctx)
		return err
	}
	st, err := a.store.Status(ctx)
	if err != nil || st.Suspended != nil && st.Suspended.Witness.Seq >= seen.Seq {
		return err
	}
	return a.suspend(ctx, leader, a.cfg.Holder, seen)
}

// rewound is told that a commit was refused since the catalog lost something. A term in which that is news ends: the next one
// begins by comparing, and sees to the repair.
func (a *App) rewound() {
	if t := a.inForce.Load(); t != nil && !t.suspended {
		t.end(catalog.Refusal(errs.CatalogRewound))
	}
}

func (a *App) suspend(ctx context.Context, epoch fence.Epoch, by string, lost catalog.Point) error {
	a.log.Error("the catalog does not have what it acknowledged; it takes no writes until it is repaired", "found_by", by,
		"incarnation", lost.Incarnation, "seq", lost.Seq, "digest", lost.Digest)
	fault.At("catalog.suspend.before")
	err := a.store.Suspend(ctx, epoch, catalog.Suspension{By: by, Witness: lost})
	fault.At("catalog.suspend.after")
	return err
}

// witness is told what a node has seen of the catalog. One that comes from another catalog shows that this one was emptied, if it
// knows no node; else the node was another cluster's.
func (a *App) witness(ctx context.Context, node string, seen ...catalog.Point) error {
	t := a.inForce.Load()
	if t == nil {
		return errs.New(errs.NoLeader, "this coordinator does not lead now; dial again")
	}
	lost := false
	for _, p := range seen {
		relation, err := a.store.Compare(ctx, p)
		if err != nil {
			return err
		}
		if !relation.Missing() {
			continue
		}
		if relation == catalog.Foreign && !t.suspended && len(a.registry.Views()) > 0 {
			return errs.New(errs.NotAllowed, "node %s keeps the journal of another catalog (%s); if it was another cluster's and is to be this one's, stop its agentd, remove journal.db in its state folder, and start it again", node, p.Incarnation).
				With("node", node)
		}
		lost = true
		if err := a.suspend(ctx, t.epoch, node, p); err != nil {
			return err
		}
	}
	if lost && !t.suspended {
		// If it has all that this process has seen of it, it was older before this term.
		relation, err := a.store.Compare(ctx, a.store.Seen())
		if err != nil {
			return err
		}
		if !relation.Missing() {
			t.deceived.Store(true)
		}
		refusal := catalog.Refusal(errs.CatalogRewound)
		t.end(refusal)
		return refusal
	}
	return nil
}

// prove waits for other servers and proves the view anew, or ends the term.
func (a *App) prove(ctx context.Context, epoch fence.Epoch, replaced <-chan struct{}, end context.CancelCauseFunc) {
	defer a.unproven.Store(false)
	for {
		select {
		case <-replaced:
		case <-ctx.Done():
			return
		}
		a.unproven.Store(true)
		var generation uint64
		generation, replaced = a.store.Generation()
		a.log.Warn("the catalog's server is another process; proving that it has all that was seen", "generation", generation)
		a.metrics.generations.Inc()
		for err := a.proof(ctx, epoch); err != nil; err = a.proof(ctx, epoch) {
			if ctx.Err() != nil {
				return
			}
			if !errs.Has(err, errs.StoreUnavailable) && !errs.Has(err, errs.DeadlineExpired) {
				end(err)
				return
			}
			_ = wait.For(ctx, a.cfg.Lease.TTL/60)
		}
		if now, _ := a.store.Generation(); now == generation {
			a.unproven.Store(false)
			a.log.Info("the catalog's server has all that was seen", "generation", generation)
		}
	}
}

func (a *App) proof(ctx context.Context, epoch fence.Epoch) error {
	lease, err := a.store.Leader(ctx)
	if err != nil {
		return err
	}
	if lease.Epoch != epoch || lease.Holder != a.holder {
		return errs.New(errs.NoLeader, "the catalog's server came back with epoch %d of %s in force, not epoch %d of this one", lease.Epoch, lease.Holder, epoch)
	}
	relation, err := a.store.Compare(ctx, a.store.Seen())
	if err != nil {
		return err
	}
	if relation != catalog.Part {
		return catalog.Refusal(errs.CatalogRewound)
	}
	return nil
}

// nothing is what is done with what nodes tell while the catalog is suspended. They tell it again.
type nothing struct{}

func (nothing) Observe(context.Context, string, operations.Observation) error {
	return catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Lost(context.Context, string, fence.Epoch, string, string, uint64) error {
	return catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Placements(context.Context, string) ([]*records.Sandbox, error) {
	return nil, catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Moment(context.Context) (uint64, error) {
	return 0, catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Judge(context.Context, uint64, []catalog.Key) (map[catalog.Key]operations.Verdict, error) {
	return nil, catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Confirms(context.Context, catalog.Key, catalog.Point) (bool, error) {
	return false, catalog.Refusal(errs.CatalogRewound)
}

func (nothing) DropOrphan(context.Context, string, catalog.Key, string) (fence.Epoch, error) {
	return 0, catalog.Refusal(errs.CatalogRewound)
}

func (nothing) Placed(string) placement.Resources { return placement.Resources{} }

func (nothing) Used(string, []operations.Use) {}
