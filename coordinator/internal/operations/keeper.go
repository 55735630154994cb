package operations

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// The keeper fills and drains the pools; its rules are in docs/adr/0047-warm-starts.md. It is one goroutine, so that members are added one after the
// other. What it starts are operations (fill.go, delete.go); it waits for none of them.

const (
	// keepEvery is how often it looks though nobody woke it: for nodes that came under pressure, and pauses that are over.
	keepEvery = time.Second
	// maxFills bounds the members that are made at a time, maxDrains those that are deleted, of all pools.
	maxFills  = 2
	maxDrains = 4
	// busyFor is how long a start of a caller's keeps pools from filling: one that takes longer waits for something else than the processor.
	busyFor = 30 * time.Second
	// tellEvery is how often the status of a pool is written.
	tellEvery = time.Second
)

// keep runs until the term ends.
func (e *Engine) keep() {
	every := time.NewTicker(keepEvery)
	defer every.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-e.keeper:
		case <-every.C:
		}
		if err := e.tend(e.ctx); err != nil && e.ctx.Err() == nil {
			e.log.Warn("the pools were not all looked after; they are looked at again", "error", err)
		}
	}
}

// loadPools reads all pools at the start of the term.
func (e *Engine) loadPools(ctx context.Context) error {
	return e.each(ctx, catalog.Query{Kind: catalog.KindPool}, func(r catalog.Record) error {
		p, err := records.PoolOf(r)
		if err == nil {
			e.pools[p.UID] = &poolState{key: r.Key, record: p}
		}
		return err
	})
}

// tend looks after all pools once.
func (e *Engine) tend(ctx context.Context) error {
	var all error
	pools := e.tended()
	for i := range pools {
		p := pools[i]
		if err := e.refresh(ctx, &p); err != nil {
			all = errors.Join(all, err)
			continue
		}
		if p.record == nil || p.record.Status.Phase != warm.PoolActive {
			continue
		}
		all = errors.Join(all, e.drain(ctx, p), e.fill(ctx, p))
		if ctx.Err() != nil {
			return nil
		}
	}
	return all
}

// tended copies what is known of each pool, in a fixed order.
func (e *Engine) tended() []poolState {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]poolState, 0, len(e.pools))
	for _, p := range e.pools {
		all = append(all, *p)
	}
	slices.SortFunc(all, func(a, b poolState) int { return strings.Compare(a.key.UID, b.key.UID) })
	return all
}

// refresh reads a pool's record if it may have changed, and forgets a pool that is gone.
func (e *Engine) refresh(ctx context.Context, p *poolState) error {
	if !p.stale && p.record != nil && p.memory != 0 {
		return nil
	}
	e.mu.Lock()
	if s := e.pools[p.key.UID]; s != nil {
		s.stale = false // what changes from now on makes it stale again
	}
	e.mu.Unlock()
	rec, err := e.cfg.Catalog.Get(ctx, p.key)
	if errs.Has(err, errs.ObjectNotFound) {
		e.mu.Lock()
		delete(e.pools, p.key.UID)
		e.mu.Unlock()
		p.record = nil
		return nil
	}
	if err == nil {
		p.record, err = records.PoolOf(rec)
	}
	var tpl *records.Template
	if err == nil {
		tpl, err = e.template(ctx, e.cfg.Catalog, p.key.Tenant, p.record.Spec.TemplateUID)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.pools[p.key.UID]
	if s == nil {
		return err
	}
	if err != nil {
		s.stale = true
		return err
	}
	p.memory = tpl.Spec.Sandbox.Resources.WithDefaults().MemoryRequestBytes
	s.record, s.memory = p.record, p.memory
	return nil
}

// census is what there is of a pool.
type census struct {
	all, ready, filling int
	fills               int  // of all pools
	drains              int  // of all pools
	busy                bool // starts, restores or forks of callers are in flight
	doomed              []*member
}

// count looks at the pool's members, and at what goes on beside. Doomed are those to be deleted now.
func (e *Engine) count(p poolState) census {
	nodes := make(map[string]placement.Node)
	for _, n := range e.cfg.Nodes.Nodes() {
		nodes[n.Name] = n
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.goingOn()
	var ready []*member
	for _, m := range e.members.all {
		if m.phase == sandbox.Deleting && nodes[m.node].Online {
			c.drains++
		}
		if m.pool != p.key.UID {
			continue
		}
		c.all++
		n := nodes[m.node]
		switch {
		case m.taken || m.phase == sandbox.Deleting:
		case m.phase.Terminal(), m.ready && (m.yields || m.template != p.record.Spec.TemplateUID || n.Cordoned || n.Short || len(n.Problems) > 0):
			if n.Online { // what is away is deleted, or claimed, when it is back
				c.doomed = append(c.doomed, m)
			}
		case m.ready:
			ready = append(ready, m)
		default:
			c.filling++
		}
	}
	c.ready = len(ready)
	if bound := min(p.record.Spec.Size, p.record.Spec.Bound(p.memory)); c.ready > bound {
		slices.SortFunc(ready, func(a, b *member) int { return strings.Compare(b.uid, a.uid) }) // the youngest first
		c.doomed = append(c.doomed, ready[:c.ready-bound]...)
		c.ready = bound
	}
	return c
}

// goingOn counts the operations that matter to pools. It wants the lock.
func (e *Engine) goingOn() (c census) {
	now := e.cfg.Now()
	for _, t := range e.tasks {
		switch t.kind {
		case KindFillPool:
			c.fills++
		case KindCreateSandbox, KindRestoreSandbox, KindForkSandbox, KindCreateTemplate:
			c.busy = c.busy || now.Sub(t.created) < busyFor
		case KindClaimSandbox:
			c.busy = c.busy || t.cold && now.Sub(t.created) < busyFor
		}
	}
	return c
}

// drain has members deleted that the pool is not to have.
func (e *Engine) drain(ctx context.Context, p poolState) error {
	c := e.count(p)
	for _, m := range c.doomed[:max(0, min(len(c.doomed), maxDrains-c.drains))] {
		if err := e.dismiss(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

// dismiss accepts the deletion of a member, unless a claim has it by now.
func (e *Engine) dismiss(ctx context.Context, m *member) error {
	op, err := e.accept(ctx, Call{Tenant: m.tenant, RequestID: "pool"}, KindDeleteSandbox, Delete{UID: m.uid}, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		sb, err := e.sandbox(ctx, r, m.tenant, m.uid)
		if err != nil {
			return writes{}, err
		}
		if sb.Pool != m.pool || sb.Status.Phase == sandbox.Deleting {
			return writes{}, errNoMember
		}
		op.Plan.Target = m.uid
		if err := enterSandbox(sb, sandbox.Deleting); err != nil {
			return writes{}, err
		}
		put, err := sb.Put()
		after := *sb
		after.Revision++
		return writes{puts: []catalog.Put{put}, accepted: func() { e.account(&after) }}, err
	})
	if errors.Is(err, errNoMember) || errs.Has(err, errs.ObjectNotFound) {
		e.resync(ctx, m.tenant, m.uid)
		return nil
	}
	if err != nil {
		return err
	}
	e.launch(op, nil)
	return nil
}

// errNoMember: a claim or a deletion was quicker.
var errNoMember = errors.New("it is no member of the pool any more")

// fill has one more member made, if the pool wants one and may have it, and says in the pool's status how it stands.
func (e *Engine) fill(ctx context.Context, p poolState) error {
	for {
		c := e.count(p)
		reason, message := e.mayFill(p, c)
		var err error
		if reason == "" {
			if err = e.addMember(ctx, p); err == nil {
				continue
			}
			reason, message = holdOn(err)
			if reason == "" {
				return err
			}
		}
		return e.tell(ctx, p, sandbox.Condition{Type: "Filled", Status: reason == "Full", Reason: reason, Message: message, LastTransitionTime: e.now()})
	}
}

// mayFill is why no member is added now; empty: one is.
func (e *Engine) mayFill(p poolState, c census) (reason, message string) {
	spec, st := p.record.Spec, p.record.Status
	switch {
	case c.ready >= spec.Size:
		return "Full", ""
	case c.all >= spec.Bound(p.memory) && c.ready+c.filling < spec.Size:
		return "Budget", "max_members or max_memory_bytes is reached"
	case c.ready+c.filling >= spec.Size || c.all >= spec.Bound(p.memory):
		return "Filling", ""
	case e.cfg.Now().Sub(st.LastFailure) < warm.Pause(st.Failures):
		return "BackingOff", "members failed; see last_error"
	case c.fills >= maxFills:
		return "Filling", ""
	case c.busy:
		return "Waiting", "starts of callers come first"
	}
	return "", ""
}

// errFull: the pool may have no more members.
var errFull = errors.New("the pool is full")

// holdOn is why a member could not be added, where that is no error of the keeper's.
func holdOn(err error) (reason, message string) {
	var nofit *placement.NoFit
	switch {
	case errors.Is(err, errFull):
		return "Budget", "max_members or max_memory_bytes is reached"
	case errors.As(err, &nofit):
		return "NoCapacity", "no node can spare what a member needs: " + nofit.Error()
	case errs.Has(err, errs.AboveEveryNode), errs.Has(err, errs.WrongPhase):
		return "NoCapacity", errs.From(err).Message
	}
	return "", ""
}

// tell commits what the keeper has to say of the pool, if there is anything new.
func (e *Engine) tell(ctx context.Context, p poolState, c sandbox.Condition) error {
	now := e.cfg.Now()
	e.mu.Lock()
	var claimed int64
	s := e.pools[p.key.UID]
	quiet := s == nil || now.Sub(s.told) < tellEvery
	if !quiet {
		claimed = s.claimed
	}
	e.mu.Unlock()
	if quiet {
		return nil // the next look tells
	}
	known := *p.record
	known.Status.Conditions = slices.Clone(known.Status.Conditions)
	if claimed == 0 && !known.Status.SetCondition(c) {
		return nil
	}
	return e.changePool(ctx, p.key, func(pool *records.Pool) {
		pool.Status.SetCondition(c)
		pool.Status.Claimed += claimed
	}, claimed)
}

// changePool commits a change of a pool's status.
func (e *Engine) changePool(ctx context.Context, key catalog.Key, change func(*records.Pool), claimed int64) error {
	var pool *records.Pool
	_, err := e.publish(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		rec, err := r.Get(ctx, key)
		if err != nil {
			return catalog.Commit{}, err
		}
		if pool, err = records.PoolOf(rec); err != nil {
			return catalog.Commit{}, err
		}
		change(pool)
		put, err := pool.Put()
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.pools[key.UID]
	switch {
	case s == nil:
	case err != nil:
		s.stale = true
	default:
		pool.Revision++
		s.record, s.claimed, s.told = pool, s.claimed-claimed, e.cfg.Now()
	}
	return absentIsDone(err)
}
