package operations

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Config of an Engine. Catalog, Queue, Agents, Nodes and Epoch are required.
type Config struct {
	Catalog Catalog
	Queue   Publisher
	Agents  Agents
	Nodes   Nodes
	// Epoch of the leadership that the engine works under.
	Epoch fence.Epoch
	Log   *slog.Logger
	// PlacementWait is how long a node that is offline or unhealthy is waited for when no other fits.
	PlacementWait time.Duration
	// DeletionsPerNode bounds how many snapshots and volumes are removed from a node at a time.
	DeletionsPerNode int
	// Parallel bounds how many copies of one fork are made at a time.
	Parallel int
	// MaxPending bounds the operations in flight. Of these at most a half are deletions of snapshots and volumes, and a
	// quarter those of one tenant.
	MaxPending int
	// Retention of finished operations' records: longer than the receipts'.
	OperationLife time.Duration
	EventLife     time.Duration
	// RetryMin and RetryMax bound the delay between attempts.
	RetryMin, RetryMax time.Duration
	Now                func() time.Time
	// OnDone is told of each ended operation, for metrics.
	OnDone func(kind Kind, reason errs.Reason, took time.Duration)
	// Accepting bounds how many requests are being accepted at a time; those behind them wait at the door.
	Accepting int
	// OnReady is told of each snapshot how long it took from the node's report that its artefact is there until it was
	// Ready in the catalog.
	OnReady func(took time.Duration)
}

func (c *Config) defaults() {
	orElse := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	orElse(&c.PlacementWait, 10*time.Second)
	orElse(&c.OperationLife, 26*time.Hour)
	orElse(&c.EventLife, time.Hour)
	orElse(&c.RetryMin, 50*time.Millisecond)
	orElse(&c.RetryMax, 5*time.Second)
	if c.DeletionsPerNode <= 0 {
		c.DeletionsPerNode = 4
	}
	if c.Parallel <= 0 {
		c.Parallel = 4
	}
	if c.MaxPending <= 0 {
		c.MaxPending = 8192
	}
	if c.Accepting <= 0 {
		c.Accepting = 8 // so many are one batch of commits; more of them only stand in the way
	}
	if c.OnReady == nil {
		c.OnReady = func(time.Duration) {}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.OnDone == nil {
		c.OnDone = func(Kind, errs.Reason, time.Duration) {}
	}
}

// Engine drives operations for one term of leadership. Start it, use it, Stop it.
type Engine struct {
	cfg Config
	log *slog.Logger

	ctx    context.Context // of the term: cancelled with the reason when it ends
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	turns  *turns                 // of deletions at nodes
	active map[Kind]*atomic.Int64 // of what is paced: those in their turn, never more than turns
	gate   *gate                  // of requests that are being accepted

	mu       sync.Mutex
	stopped  bool
	deleting map[string]int // by tenant: deletions that are paced and in flight
	ended1m  map[Kind]*rate // of what is paced
	tasks    map[catalog.Key]*task
	starting map[string]*flight                // by sandbox uid: starts and restores in flight
	placed   map[string]map[string]reservation // by node, by sandbox uid
	timers   map[string]*timer                 // by sandbox uid: those that have one
	used     map[string]time.Time              // by sandbox uid: as nodes told in this term
	members  members                           // of pools
	pools    map[string]*poolState             // by uid

	keeper chan struct{} // wakes the keeper; holds one
}

// reservation is what is placed of a sandbox, and the last of its node's observations that its record has at least.
type reservation struct {
	placement.Resources
	observed uint64
}

// task is one operation being driven. Its goroutine owns op.
type task struct {
	op      *Operation
	kind    Kind      // of op, for others than its goroutine
	created time.Time // of op, too
	cold    bool      // a claim that restores
	secrets map[string]string
	leave   func() // ends the turn of a deletion; nil while it has none
	done    chan struct{}
	stuck   obstacle
	last    atomic.Pointer[errs.Error] // the last passing failure, for callers that stop waiting
	until   atomic.Pointer[time.Time]  // the latest deadline of its callers; nil: none said one
}

// flight is one start or restore that a deletion may interrupt.
type flight struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

var errInterrupted = errors.New("the sandbox is being deleted")

// Start loads what is pending and drives it. The engine lives until Stop, or until ctx ends with
// the reason that leadership was lost.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	cfg.defaults()
	e := &Engine{cfg: cfg, log: cfg.Log, turns: newTurns(cfg.DeletionsPerNode), active: make(map[Kind]*atomic.Int64), gate: newGate(cfg.Accepting, cfg.MaxPending), deleting: make(map[string]int), ended1m: make(map[Kind]*rate),
		tasks: make(map[catalog.Key]*task), starting: make(map[string]*flight), placed: make(map[string]map[string]reservation), timers: make(map[string]*timer), used: make(map[string]time.Time),
		members: newMembers(), pools: make(map[string]*poolState), keeper: make(chan struct{}, 1)}
	for _, k := range pacedKinds {
		e.active[k.op] = new(atomic.Int64)
	}
	e.ctx, e.cancel = context.WithCancelCause(ctx)
	pending, err := e.load(ctx)
	if err != nil {
		e.cancel(err)
		return nil, err
	}
	for _, op := range pending {
		e.launch(op, nil)
	}
	e.wg.Go(e.sweep)
	e.wg.Go(e.tick)
	e.wg.Go(e.keep)
	e.wakeKeeper()
	return e, nil
}

// Stop cancels all work with the reason and waits until it has ended. Pending operations stay
// Pending, for the next term.
func (e *Engine) Stop(reason error) {
	e.mu.Lock()
	e.stopped = true
	e.mu.Unlock()
	e.cancel(reason)
	e.wg.Wait()
}

func (e *Engine) load(ctx context.Context) ([]*Operation, error) {
	err := e.each(ctx, catalog.Query{Kind: catalog.KindSandbox}, func(r catalog.Record) error {
		sb, err := records.SandboxOf(r)
		if err == nil {
			e.account(sb)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := e.loadPools(ctx); err != nil {
		return nil, err
	}
	var pending []*Operation
	err = e.each(ctx, catalog.Query{Kind: catalog.KindOperation, Phases: []string{string(Pending)}}, func(r catalog.Record) error {
		op, err := OperationOf(r)
		pending = append(pending, op)
		return err
	})
	return pending, err
}

func (e *Engine) each(ctx context.Context, q catalog.Query, f func(catalog.Record) error) error {
	q.PageSize = catalog.MaxPage
	for {
		page, err := e.cfg.Catalog.List(ctx, q)
		if err != nil {
			return err
		}
		for _, r := range page.Records {
			if err := f(r); err != nil {
				return err
			}
		}
		if page.Next == "" {
			return nil
		}
		q.After = page.Next
	}
}

// launch starts driving an operation, unless it is driven already.
func (e *Engine) launch(op *Operation, secrets map[string]string) *task {
	key := records.OperationKey(op.Tenant, op.ID)
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.tasks[key]; t != nil || e.stopped {
		return t
	}
	t := &task{op: op, kind: op.Kind, created: op.Created, cold: op.Kind == KindClaimSandbox && len(op.Plan.Copies) > 0, secrets: secrets, done: make(chan struct{})}
	e.tasks[key] = t
	if t.kind.paced() {
		e.deleting[op.Tenant]++
	}
	e.wg.Go(func() {
		e.drive(t)
		e.mu.Lock()
		delete(e.tasks, key)
		if t.kind.paced() {
			e.deletionEnded(t)
		}
		if len(e.pools) > 0 {
			e.wakeKeeper()
		}
		e.mu.Unlock()
		close(t.done)
	})
	return t
}

// drive repeats the operation's driver until it is Succeeded or Failed, or the term ends.
func (e *Engine) drive(t *task) {
	log := e.log.With("operation", t.op.ID, "kind", t.op.Kind, "tenant", t.op.Tenant, "request", t.op.RequestID)
	log.Info("operation begins")
	fault.At("operation.drive.before")
	delay := e.cfg.RetryMin
	for t.op.State == Pending {
		err := e.sit(e.ctx, t)
		if err == nil && !t.op.fresh { // else it may have ended since it was read
			err = e.reload(e.ctx, t)
		}
		t.op.fresh = false
		if err == nil && t.op.State == Pending {
			err = e.step(e.ctx, t)
		}
		t.stand()
		if err == nil {
			continue
		}
		if e.ctx.Err() != nil {
			log.Info("operation left for the next term", "reason", context.Cause(e.ctx))
			return
		}
		t.last.Store(errs.From(err))
		log.Warn("operation will be tried again", "error", err, "after", delay)
		delay = e.pause(e.ctx, delay)
	}
	took := max(e.cfg.Now().Sub(t.op.Created), 0) // a clock that was set back took no time
	var reason errs.Reason
	if t.op.Error != nil {
		reason = t.op.Error.Reason
	}
	fault.At("operation.drive.after")
	log.Info("operation ended", "state", t.op.State, "reason", reason, "took", took)
	e.cfg.OnDone(t.op.Kind, reason, took)
}

// step runs the driver of the kind, which returns nil once the operation is finished.
func (e *Engine) step(ctx context.Context, t *task) error {
	switch t.op.Kind {
	case KindCreateSandbox, KindRestoreSandbox, KindForkSandbox:
		return e.driveCopies(ctx, t)
	case KindDeleteSandbox:
		return e.driveDelete(ctx, t, e.sandboxAbsent)
	case KindDeleteSnapshot:
		return e.driveDelete(ctx, t, e.snapshotAbsent)
	case KindDeleteVolume:
		return e.driveDelete(ctx, t, e.volumeAbsent)
	case KindCheckpointSandbox:
		return e.driveCheckpoint(ctx, t)
	case KindPauseSandbox, KindHibernateSandbox, KindResumeSandbox:
		return e.driveTurn(ctx, t)
	case KindUpdateSandbox:
		return e.driveUpdate(ctx, t)
	case KindCreateVolume:
		return e.driveVolume(ctx, t)
	case KindCreateTemplate:
		return e.driveTemplate(ctx, t)
	case KindDeleteTemplate:
		return e.driveTemplateDeletion(ctx, t)
	case KindDeletePool:
		return e.drivePoolDeletion(ctx, t)
	case KindFillPool:
		return e.driveFill(ctx, t)
	case KindClaimSandbox:
		return e.driveClaim(ctx, t)
	}
	return e.finish(ctx, t, errs.New(errs.NotSupported, "this coordinator does not know operations of kind %s", t.op.Kind), nil)
}

// pause waits for about the delay and gives the next one.
func (e *Engine) pause(ctx context.Context, delay time.Duration) time.Duration {
	return e.pauseOr(ctx, delay, nil)
}

// pauseOr is pause that news end early.
func (e *Engine) pauseOr(ctx context.Context, delay time.Duration, news <-chan struct{}) time.Duration {
	timer := time.NewTimer(delay/2 + rand.N(delay/2+1))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-news:
		return e.cfg.RetryMin
	case <-ctx.Done():
	}
	return min(delay*2, e.cfg.RetryMax)
}

// now is the time without the parts that a record does not keep. How long something takes is not measured with it.
func (e *Engine) now() time.Time { return e.cfg.Now().UTC().Round(0) }

func (e *Engine) owner() fence.Owner { return fence.Owner{Coordinator: e.cfg.Epoch} }

// errNothing from a build function: what was to be committed is so already.
var errNothing = errors.New("nothing to commit")

// commit publishes what build decides. A lost reply is no failure here: build reads again, and
// decides on what is there.
func (e *Engine) commit(ctx context.Context, build func(context.Context, catalog.Reader) (catalog.Commit, error)) (catalog.Result, error) {
	delay := e.cfg.RetryMin
	for {
		res, err := e.publish(ctx, build)
		if err == nil || ctx.Err() != nil || !again(err) {
			return res, err
		}
		delay = e.pause(ctx, delay)
	}
}

// publish is one publication, in the coordinator's name unless build says otherwise.
func (e *Engine) publish(ctx context.Context, build func(context.Context, catalog.Reader) (catalog.Commit, error)) (catalog.Result, error) {
	res, err := e.cfg.Queue.Publish(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		c, err := build(ctx, r)
		if c.Owner.Coordinator == 0 {
			c.Owner = e.owner()
		}
		return c, err
	})
	if errors.Is(err, errNothing) {
		return catalog.Result{}, nil
	}
	if err == nil && res.Err != nil {
		err = res.Err
	}
	return res, err
}

// again tells whether a commit's failure may pass.
func again(err error) bool {
	switch env := errs.From(err); env.Reason {
	case errs.StaleRevision, errs.StoreUnavailable, errs.ReplyLost, errs.QueueFull, errs.AttemptVoid:
		return true
	default:
		return env.Outcome == errs.Unknown && env.Reason != errs.InternalError
	}
}

// finish ends the operation: with the error, or with the result that fill makes.
func (e *Engine) finish(ctx context.Context, t *task, failure error, fill func(*Result)) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		put, err := e.ended(op, failure, fill)
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	if err != nil {
		return err
	}
	return e.reload(ctx, t)
}

// ended makes the write that ends the operation, for a commit of its own or with its object's.
func (e *Engine) ended(op *Operation, failure error, fill func(*Result)) (catalog.Put, error) {
	op.State, op.Done = Succeeded, e.now()
	if failure != nil {
		op.State, op.Error = Failed, errs.From(failure).WithRequest(op.RequestID, op.ID)
	} else {
		op.Result = new(Result)
		if fill != nil {
			fill(op.Result)
		}
		if op.Node == "" { // it was not placed when the operation was accepted
			op.Node = op.Result.node()
		}
		op.Result.keepRevisions()
	}
	return op.put()
}

// operation reads the record anew; errNothing once it has ended.
func (e *Engine) operation(ctx context.Context, r catalog.Reader, t *task) (*Operation, error) {
	rec, err := r.Get(ctx, records.OperationKey(t.op.Tenant, t.op.ID))
	if err != nil {
		return nil, err
	}
	op, err := OperationOf(rec)
	if err == nil && op.State != Pending {
		return nil, errNothing
	}
	return op, err
}

// reload brings the task up to what is recorded.
func (e *Engine) reload(ctx context.Context, t *task) error {
	rec, err := e.cfg.Catalog.Get(ctx, records.OperationKey(t.op.Tenant, t.op.ID))
	if err != nil {
		return err
	}
	op, err := OperationOf(rec)
	if err == nil {
		t.op = op
	}
	return err
}

// undoing records why the operation fails before anything that it made is undone. One that has ended
// already is left as it is, and nothing of it may be undone: the caller looks at its state.
func (e *Engine) undoing(ctx context.Context, t *task, failure *errs.Error) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if op.Error != nil {
			return catalog.Commit{}, errNothing
		}
		op.Error = failure
		put, err := op.put()
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	if err != nil {
		return err
	}
	return e.reload(ctx, t)
}

// event makes the write of an event.
func (e *Engine) event(key catalog.Key, reason, message string, warning bool) (catalog.Put, error) {
	ev := records.Event{UID: uid.New(), ObjectKind: string(key.Kind), ObjectUID: key.UID, Reason: reason, Message: message, Warning: warning, Time: e.now()}
	return ev.Put(key.Tenant)
}
