package runner

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// task is one thing to do with a sandbox.
type task struct {
	ctx    context.Context
	cancel context.CancelFunc
	fn     func(ctx context.Context, o *owner) error
	// yields: a Delete ends it.
	yields bool
	// ends is why what yields ends for it; nil if it waits its turn.
	ends error
	err  error
	done chan struct{}
}

// owner is the goroutine of one sandbox. Fields below mu are shared; the others are its own.
type owner struct {
	n     *Node
	uid   string
	inbox chan *task
	// events brings what the watchers saw.
	events chan event
	idle   chan struct{}
	// dead is closed when the goroutine ended.
	dead chan struct{}

	users int // Node.mu

	ctx    context.Context
	cancel context.CancelFunc
	log    *slog.Logger

	rec        nodestate.Sandbox
	exists     bool
	lease      Lease
	watchers   sync.WaitGroup
	stopWatch  context.CancelFunc
	retry      *time.Timer
	retryAfter time.Duration
	retryFn    func(ctx context.Context) error
	// after is done once the task that set it was answered, before the next one.
	after func() error

	mu    sync.Mutex
	guest Guest
	// standing: it is paused, or about to be: its channel is for nobody.
	standing bool
	// interrupt ends the task that runs, if it yields.
	interrupt context.CancelCauseFunc
	// coming is how many deletions were announced and have not begun: what yields and begins meanwhile ends for the cause.
	coming int
	cause  error
}

func newOwner(n *Node, uid string) *owner {
	o := &owner{n: n, uid: uid, inbox: make(chan *task, mailboxLength), events: make(chan event, 4),
		idle: make(chan struct{}, 1), dead: make(chan struct{}), log: n.Log.With("sandbox", uid)}
	o.ctx, o.cancel = context.WithCancel(n.ctx)
	o.retry = time.NewTimer(time.Hour)
	o.retry.Stop()
	return o
}

// run is the owner's whole life: one thing after the other.
func (o *owner) run() {
	defer o.n.wg.Done()
	defer func() {
		o.n.retire(o, true)
		o.cancel()
		o.retry.Stop()
		close(o.dead)
		o.unwatch()
		o.closeGuest()
		// A lease pins a namespace only for who is to enter it.
		if o.lease != nil {
			_ = o.lease.Release()
		}
	}()
	if err := o.load(); err != nil {
		o.log.Error("read the record of a sandbox", "error", err)
	}
	for {
		if !o.exists && o.retryFn == nil && len(o.inbox) == 0 && o.n.retire(o, false) {
			return
		}
		select {
		case t := <-o.inbox:
			t.err = o.perform(t)
			t.cancel()
			if crashed(t.err) {
				return
			}
			close(t.done)
			o.n.release(o)
			if crashed(o.afterwards()) {
				return
			}
		case e := <-o.events:
			if err := o.handle(e); crashed(err) {
				return
			} else if err != nil {
				o.log.Error("record the end of a sandbox", "error", err)
				o.again(func(context.Context) error { return o.handle(e) })
			}
		case <-o.retry.C:
			o.tryAgain()
		case <-o.idle:
		case <-o.n.ctx.Done():
			return
		}
	}
}

// afterwards does what the task left for when it was answered. What fails is tried again later.
func (o *owner) afterwards() error {
	fn := o.after
	o.after = nil
	if fn == nil {
		return nil
	}
	err := fn()
	if err != nil && !crashed(err) {
		o.log.Warn("what follows an answer; trying again later", "error", err)
		o.again(func(context.Context) error { return fn() })
	}
	return err
}

// perform runs a task that a Delete may end, be it on its way only.
func (o *owner) perform(t *task) error {
	ctx, cancel := context.WithCancelCause(t.ctx)
	defer cancel(nil)
	o.arrived(t)
	if t.yields {
		o.mu.Lock()
		if o.coming > 0 {
			cancel(o.cause)
		}
		o.interrupt = cancel
		o.mu.Unlock()
		defer func() {
			o.mu.Lock()
			o.interrupt = nil
			o.mu.Unlock()
		}()
	}
	return t.fn(ctx, o)
}

// announce tells of a task before it is in the inbox. If it ends others, what yields does so from now on, until the task has arrived.
func (o *owner) announce(t *task) {
	if t.ends == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.coming++
	o.cause = t.ends
	if o.interrupt != nil {
		o.interrupt(t.ends)
	}
}

// arrived is told that a task that was announced begins, or will never come.
func (o *owner) arrived(t *task) {
	if t.ends == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.coming--
}

// load reads the record anew. What is in memory of a record that could not be read is not used.
func (o *owner) load() error {
	rec, err := o.n.Store.Sandbox(o.uid)
	switch {
	case errs.Has(err, errs.ObjectNotFound):
		o.rec, o.exists = nodestate.Sandbox{}, false
		return nil
	case err != nil:
		return err
	}
	o.rec, o.exists = rec, true
	return nil
}

// put writes the record. After an error the record is read again, because the write may be applied.
func (o *owner) put(rec nodestate.Sandbox) error {
	err := o.n.Store.PutSandbox(rec)
	if err != nil {
		if loadErr := o.load(); loadErr != nil {
			o.log.Error("read a record after a failed write", "error", loadErr)
		}
		return err
	}
	o.rec, o.exists = rec, true
	return nil
}

// observe writes the record as a new observation and tells who reports.
func (o *owner) observe(rec nodestate.Sandbox) error {
	rec.Observation++
	if err := o.put(rec); err != nil {
		return err
	}
	o.n.notify()
	return nil
}

// again schedules a retry; the pauses double.
func (o *owner) again(fn func(ctx context.Context) error) {
	o.retryFn = fn
	o.retryAfter = min(max(2*o.retryAfter, firstRetry), longestRetry)
	o.retry.Reset(o.retryAfter)
}

func (o *owner) noRetry() {
	o.retryFn, o.retryAfter = nil, 0
	o.retry.Stop()
}

func (o *owner) tryAgain() {
	fn := o.retryFn
	if fn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(o.ctx, undoTimeout)
	defer cancel()
	o.retryFn = nil
	if err := fn(ctx); err != nil {
		o.log.Warn("still not done; trying again later", "error", err, "after", o.retryAfter)
		if o.retryFn == nil {
			o.again(fn)
		}
		return
	}
	if o.retryFn == nil {
		o.noRetry()
	}
}

func (o *owner) openGuest() Guest {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.guest
}

func (o *owner) setGuest(g Guest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.guest = g
}

// closeGuest lets go of the channel.
func (o *owner) closeGuest() {
	o.mu.Lock()
	g := o.guest
	o.guest = nil
	o.mu.Unlock()
	if g != nil {
		if err := g.Close(); err != nil {
			o.log.Warn("close a guest channel", "error", err)
		}
	}
}
