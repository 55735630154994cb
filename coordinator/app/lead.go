package app

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// Engine gives the engine of the term in force.
func (a *App) Engine() (*operations.Engine, error) {
	if a.suspended.Load() != nil {
		return nil, catalog.Refusal(errs.CatalogRewound)
	}
	if e := a.engine.Load(); e != nil {
		if a.unproven.Load() {
			return nil, errs.New(errs.StoreUnavailable, "the catalog's server was replaced; what is known of it is being proven: ask again")
		}
		return e, nil
	}
	return nil, notLeading()
}

// notLeading is the answer where only the leader can give one.
func notLeading() *errs.Error {
	return errs.New(errs.NoLeader, "this coordinator does not lead now; ask again, or ask another")
}

// campaign asks for leadership, and serves each term, until the context ends.
func (a *App) campaign(ctx context.Context) {
	for ctx.Err() == nil {
		asked := time.Now()
		claim := catalog.Claim{Holder: a.holder, TTL: a.cfg.Lease.TTL, Above: fence.Epoch(a.above.Load())}
		lease, won, err := a.store.Lead(ctx, claim)
		switch {
		case err != nil && ctx.Err() == nil:
			a.log.Warn("the catalog cannot be asked for leadership", "error", err)
		case err == nil && won && uint64(lease.Epoch) <= a.above.Load():
			// A node has seen a higher epoch: this one must end before a higher one is granted.
			if err := a.store.Release(ctx, a.holder, lease.Epoch); err != nil {
				a.log.Warn("the lease was not released", "error", err)
			}
			continue
		case err == nil && won:
			if err := a.term(ctx, lease.Epoch, asked); err != nil && ctx.Err() == nil {
				a.log.Error("a term ended", "epoch", uint64(lease.Epoch), "reason", err)
			}
		case err == nil:
			a.log.Debug("another coordinator leads", "holder", lease.Holder, "epoch", uint64(lease.Epoch))
			if err := a.standBy(ctx, lease.Epoch); err != nil && ctx.Err() == nil {
				a.log.Warn("the catalog was not compared with what was seen of it", "error", err)
			}
		}
		a.nap(ctx)
	}
}

// longestNap lets a lease that was released be taken soon, however long leases are.
const longestNap = time.Second

// nap waits for a part of the lease's life.
func (a *App) nap(ctx context.Context) {
	part := min(a.cfg.Lease.TTL/6, longestNap/2)
	_ = wait.For(ctx, part+rand.N(part))
}

// term leads until the lease is lost or the context ends, and gives the reason.
func (a *App) term(ctx context.Context, epoch fence.Epoch, asked time.Time) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	log := a.log.With("epoch", uint64(epoch))
	fault.At("term.lead.after")
	a.endTerm.Store(&cancel)
	defer a.endTerm.Store(nil)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		cancel(a.renew(ctx, epoch, asked))
	}()
	defer func() { <-renewed }()
	generation, replaced := a.store.Generation()
	why, err := a.sound(ctx, epoch)
	if err != nil {
		return a.resign(cancel, epoch, fmt.Errorf("compare the catalog with what was seen of it: %w", err))
	}
	t := &reign{epoch: epoch, suspended: why != nil, began: time.Now(), end: cancel}
	a.inForce.Store(t)
	defer a.inForce.Store(nil)
	if why != nil {
		return a.resign(cancel, epoch, a.heal(ctx, epoch, *why))
	}
	return a.resign(cancel, epoch, a.serveTerm(ctx, t, generation, replaced, log))
}

// serveTerm reads the catalog and drives its operations until the term ends, and gives the reason.
func (a *App) serveTerm(ctx context.Context, t *reign, generation uint64, replaced <-chan struct{}, log *slog.Logger) error {
	epoch, end := t.epoch, t.end
	if err := a.registry.Lead(ctx); err != nil {
		return fmt.Errorf("read the nodes: %w", err)
	}
	engine, err := operations.Start(ctx, operations.Config{
		Catalog: a.store, Queue: publisher{a.queue, a.rewound}, Agents: a.pool, Nodes: a.registry, Epoch: epoch, Log: log,
		PlacementWait: a.cfg.Nodes.PlacementWait, DeletionsPerNode: a.cfg.Operations.DeletionsPerNode, Parallel: a.cfg.Operations.Parallel, MaxPending: a.cfg.Operations.MaxPending,
		OperationLife: a.cfg.Operations.Life + a.cfg.Operations.Life/12, EventLife: a.cfg.Operations.EventLife, OnDone: a.metrics.operation,
		OnReady: func(took time.Duration) { a.metrics.ready.Observe(took.Seconds()) },
	})
	if err != nil {
		return fmt.Errorf("load the operations: %w", err)
	}
	fault.At("term.load.after")
	if now, _ := a.store.Generation(); now != generation {
		// What was read is of two servers: it is read again.
		reason := errs.New(errs.StoreUnavailable, "the catalog's server was replaced while the catalog was read; it is read again")
		engine.Stop(reason)
		return reason
	}
	mirror := journal.New(journal.Options{Catalog: a.store, Log: log, OnLost: func(p catalog.Point) {
		end(errs.New(errs.CatalogRewound, "the change log was followed to commit %d, which the catalog does not have any more", p.Seq))
	}})
	a.registry.Accept(ctx, epoch, engine, mirror)
	var beside sync.WaitGroup
	beside.Go(func() { mirror.Run(ctx) })
	beside.Go(func() { a.prove(ctx, epoch, replaced, end) })
	a.engine.Store(engine)
	a.metrics.leading.Set(1)
	log.Info("leading")
	<-ctx.Done()
	reason := context.Cause(ctx)
	a.engine.Store(nil)
	a.metrics.leading.Set(0)
	a.registry.Resign(reason)
	engine.Stop(reason)
	beside.Wait()
	a.remember(mirror.Unplaced(), t.deceived.Load())
	return reason
}

// acquaintance is what this process knows from the terms in which it served.
type acquaintance struct {
	// incarnations are the catalogs that were served, and up to which sequence.
	incarnations map[string]uint64
	nodes        map[string]struct{}
	// unplaced is what concerned no node, of the last term that followed the change log.
	unplaced journal.Unplaced
}

// remember keeps which catalog was served, which nodes there were, and what concerned none. Of a catalog that had lost something already it
// keeps the nodes alone: that it was served is no acquaintance with what it was before.
func (a *App) remember(unplaced journal.Unplaced, deceived bool) {
	now := &acquaintance{incarnations: make(map[string]uint64), nodes: make(map[string]struct{})}
	if before := a.served.Load(); before != nil {
		maps.Copy(now.incarnations, before.incarnations)
		maps.Copy(now.nodes, before.nodes)
		now.unplaced = before.unplaced
	}
	if !deceived {
		for _, p := range []catalog.Point{a.store.Seen(), unplaced.To} {
			if !p.IsZero() {
				now.incarnations[p.Incarnation] = max(now.incarnations[p.Incarnation], p.Seq)
			}
		}
		if !unplaced.To.IsZero() {
			now.unplaced = unplaced
		}
	}
	for _, v := range a.registry.Views() {
		now.nodes[v.Name] = struct{}{}
	}
	a.served.Store(now)
}

// knows tells whether this process has served the catalog that a witness is of, as far as that, and so knows the nodes that it had. Who served
// an emptied one, one that had come back older before, or one that a backup is then restored into, does not.
func (a *App) knows(witness catalog.Point) bool {
	served := a.served.Load()
	if served == nil {
		return false
	}
	upTo, ok := served.incarnations[witness.Incarnation]
	return ok && upTo >= witness.Seq && !witness.IsZero()
}

// resign releases the lease, so that another need not wait for its end.
func (a *App) resign(cancel context.CancelCauseFunc, epoch fence.Epoch, reason error) error {
	cancel(reason)
	a.exceed(epoch) // a store that came back older shall not grant it again
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
	defer stop()
	if err := a.store.Release(ctx, a.holder, epoch); err != nil && !errs.Has(err, errs.Fenced) {
		a.log.Warn("the lease was not released; it will run out", "epoch", uint64(epoch), "error", err)
	}
	return reason
}

// renew keeps the lease, and returns why it cannot any more. It renews four times in the lease's
// life, and after a failure much sooner: a store that comes back finds a lease that is soon whole
// again, not one that the next short outage ends.
func (a *App) renew(ctx context.Context, epoch fence.Epoch, asked time.Time) error {
	ttl := a.cfg.Lease.TTL
	margin := ttl / 10
	expires := asked.Add(ttl - margin)
	next := time.NewTimer(ttl / 4)
	defer next.Stop()
	for {
		end := time.NewTimer(time.Until(expires))
		select {
		case <-ctx.Done():
			end.Stop()
			return context.Cause(ctx)
		case <-end.C:
			return errs.New(errs.NoLeader, "the lease ran out before it could be renewed")
		case <-next.C:
			end.Stop()
		}
		asked = time.Now()
		tryCtx, stop := context.WithDeadline(ctx, expires)
		lease, won, err := a.store.Lead(tryCtx, catalog.Claim{Holder: a.holder, TTL: ttl})
		stop()
		switch {
		case err != nil:
			a.log.Warn("the lease was not renewed; trying again", "error", err)
			next.Reset(ttl / 30)
		case !won || lease.Epoch != epoch:
			return errs.New(errs.NoLeader, "coordinator %s leads now, with epoch %d", lease.Holder, lease.Epoch)
		default:
			expires = asked.Add(ttl - margin)
			next.Reset(ttl / 4)
		}
	}
}

// exceed makes the next term's epoch higher than the one seen.
func (a *App) exceed(seen fence.Epoch) {
	for {
		old := a.above.Load()
		if uint64(seen) <= old || a.above.CompareAndSwap(old, uint64(seen)) {
			return
		}
	}
}

// higherEpoch ends the term, so that the next one has an epoch above what a node has seen.
func (a *App) higherEpoch(seen fence.Epoch) {
	a.exceed(seen)
	if end := a.endTerm.Load(); end != nil {
		(*end)(errs.New(errs.NoLeader, "a node has seen the higher coordinator epoch %d; leading again above it", seen))
	}
}
