package operations

import (
	"context"
	"errors"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
)

const (
	sweepEvery = time.Minute
	// MaxEvents bounds the events kept, of all tenants.
	MaxEvents = 20_000
	// sweepBatch bounds how many records one commit removes.
	sweepBatch = 200
	// maxSweep bounds what one pass removes of a kind.
	maxSweep = 20_000
	// trimEvery is how many passes go by between two counts of all events.
	trimEvery = 10
)

// sweep forgets what has expired: events, ended operations, tombstones. It removes a bounded number
// at a time and never touches what is Pending.
func (e *Engine) sweep() {
	timer := time.NewTicker(sweepEvery)
	defer timer.Stop()
	for pass := 1; ; pass++ {
		select {
		case <-e.ctx.Done():
			return
		case <-timer.C:
		}
		err := e.Sweep(e.ctx)
		if err == nil && pass%trimEvery == 0 {
			err = e.trimEvents(e.ctx)
		}
		if err != nil && e.ctx.Err() == nil {
			e.log.Warn("expired records were not all removed", "error", err)
		}
	}
}

// Sweep runs one pass.
func (e *Engine) Sweep(ctx context.Context) error {
	if err := e.sweepEvents(ctx); err != nil {
		return err
	}
	if err := e.sweepOperations(ctx); err != nil {
		return err
	}
	return e.compact(ctx)
}

// compactPause is what lies between two calls of Compact, so that commits go on between them.
const compactPause = 20 * time.Millisecond

// compact forgets expired tombstones, a page at a time, and a bounded number in one pass.
func (e *Engine) compact(ctx context.Context) error {
	for range maxSweep / catalog.MaxPage {
		n, err := e.cfg.Catalog.Compact(ctx, catalog.MaxPage)
		if err != nil || n < catalog.MaxPage {
			return err
		}
		e.pause(ctx, compactPause)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// errEnough ends a walk early: uids are in order of time, so that what expired comes first.
var errEnough = errors.New("the rest is younger")

// expired lists the records of a query that were made before the life began.
func (e *Engine) expired(ctx context.Context, q catalog.Query, life time.Duration) ([]catalog.Record, error) {
	var old []catalog.Record
	err := e.each(ctx, q, func(r catalog.Record) error {
		if e.now().Sub(r.Created) <= life || len(old) >= maxSweep {
			return errEnough
		}
		r.Body = nil
		old = append(old, r)
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return old, err
}

func (e *Engine) sweepEvents(ctx context.Context) error {
	old, err := e.expired(ctx, catalog.Query{Kind: catalog.KindEvent}, e.cfg.EventLife)
	if err != nil {
		return err
	}
	return e.remove(ctx, old)
}

// trimEvents removes the oldest events above MaxEvents.
func (e *Engine) trimEvents(ctx context.Context) error {
	var all []catalog.Record
	err := e.each(ctx, catalog.Query{Kind: catalog.KindEvent}, func(r catalog.Record) error {
		r.Body = nil
		all = append(all, r)
		return nil
	})
	if err != nil || len(all) <= MaxEvents {
		return err
	}
	return e.remove(ctx, all[:len(all)-MaxEvents])
}

// sweepOperations forgets operations that ended long ago. One that took very long is kept by its
// receipt's life from its end on.
func (e *Engine) sweepOperations(ctx context.Context) error {
	var old []catalog.Record
	err := e.each(ctx, catalog.Query{Kind: catalog.KindOperation, Phases: []string{string(Succeeded), string(Failed)}}, func(r catalog.Record) error {
		if e.now().Sub(r.Created) <= e.cfg.OperationLife || len(old) >= maxSweep {
			return errEnough
		}
		op, err := OperationOf(r)
		if err == nil && e.now().Sub(op.Done) > e.cfg.OperationLife {
			r.Body = nil
			old = append(old, r)
		}
		return err
	})
	if err != nil && !errors.Is(err, errEnough) {
		return err
	}
	return e.remove(ctx, old)
}

func (e *Engine) remove(ctx context.Context, old []catalog.Record) error {
	for len(old) > 0 {
		n := min(len(old), sweepBatch)
		batch := old[:n]
		old = old[n:]
		if err := e.removeBatch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

// removeBatch removes the records that are still as they were read.
func (e *Engine) removeBatch(ctx context.Context, batch []catalog.Record) error {
	keys := make([]catalog.Key, len(batch))
	for i, r := range batch {
		keys[i] = r.Key
	}
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		now, err := r.GetMany(ctx, keys)
		if err != nil {
			return catalog.Commit{}, err
		}
		var c catalog.Commit
		for _, r := range batch {
			if now[r.Key].Revision == r.Revision {
				c.Deletes = append(c.Deletes, catalog.Delete{Key: r.Key, ExpectRevision: r.Revision})
			}
		}
		if len(c.Deletes) == 0 {
			return c, errNothing
		}
		return c, nil
	})
	return err
}

// Placements lists what is recorded on a node; not what is its journal's alone.
func (e *Engine) Placements(ctx context.Context, node string) ([]*records.Sandbox, error) {
	var all []*records.Sandbox
	err := e.each(ctx, catalog.Query{Kind: catalog.KindSandbox, Node: node}, func(r catalog.Record) error {
		sb, err := records.SandboxOf(r)
		if err == nil && sb.Status.Node == node {
			all = append(all, sb)
		}
		return err
	})
	return all, err
}
