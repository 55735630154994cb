// Package publish is the one way into the catalog: a bounded queue of commits that are built after
// they are admitted, sent in batches, and whose lost replies are settled from receipts.
//
// # States of a publication
//
//	waiting    counted against Options.Waiting; nothing was read or sent
//	admitted   holds one of Options.Admitted slots; its build reads the catalog now, so what it
//	           compares is no older than its admission
//	queued     built, may still be withdrawn by its caller's deadline: outcome not_started
//	sent       in the one batch in flight; the outcome is unknown until the reply
//	settling   the reply was lost; the receipt decides, or the attempt is voided
//
// # Rules
//
//   - A build gets a catalog.Reader and nothing else: no runtime work happens inside the queue.
//   - A refusal for STALE_REVISION is built again, Options.Attempts times in all, after a pause that
//     grows and is jittered. Any other refusal is final; above all FENCED is never tried again.
//   - A batch whose error is certain to precede the script fails its commits with not_started and
//     leaves nothing behind. Any other error makes each of them unknown: it is settled, and only an
//     attempt that is proven never to be applied is built and sent again.
//   - A commit without an ID gets one of the queue's own, with a receipt that lives just long enough
//     to settle a lost reply.
//   - An outcome that cannot be settled while the caller waits is reported as unknown.
//   - The caller's context is its budget. Options.Reply only says when to begin to ask for receipts.
//
// # Lock order
//
// Preparation (a first artefact, a volume's publication) takes the artefact's lock, then the
// volumes' in order of uid, then publishes; a build takes no lock, so a publication may be awaited under them.
package publish

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/mutant"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// Store is what the queue needs of a catalog. See catalog.Store for the contracts.
type Store interface {
	catalog.Reader
	Commit(ctx context.Context, batch []catalog.Commit) ([]catalog.Result, error)
	Settle(ctx context.Context, tenant, id, attempt string) (catalog.Receipt, bool, error)
}

// Build makes a commit from what the reader says now. It may be called several times; its effects are
// the returned commit and nothing else. Its error ends the publication and is returned as it is.
type Build = func(ctx context.Context, read catalog.Reader) (catalog.Commit, error)

// Operation identifies a client's request for PublishOperation.
type Operation struct {
	Tenant, ID string
	// Digest of the request's body.
	Digest string
	// Minted is when the client made the ID; zero if it does not tell.
	Minted time.Time
}

// Options of a queue. Store is required, zero values take the defaults in brackets.
type Options struct {
	Store    Store
	Waiting  int           // publications that wait for admission before QUEUE_FULL [4096]
	Admitted int           // publications that are built and committed at once [256]
	Batch    int           // commits in one call [128]
	Attempts int           // times that one publication is built and sent [16]
	Pause    time.Duration // before the second attempt; doubles up to 64 times that [1ms]
	Reply    time.Duration // how long a reply is awaited before its commits are settled [5s]
	Logger   *slog.Logger  // [slog.Default]
	// Metrics registers the queue's collectors; nil registers nothing.
	Metrics prometheus.Registerer
}

func (o Options) withDefaults() Options {
	orElse := func(n *int, def int) {
		if *n <= 0 {
			*n = def
		}
	}
	orElse(&o.Waiting, 4096)
	orElse(&o.Admitted, 256)
	orElse(&o.Batch, 128)
	orElse(&o.Attempts, 16)
	o.Batch = min(o.Batch, catalog.MaxBatch)
	if o.Pause <= 0 {
		o.Pause = time.Millisecond
	}
	if o.Reply <= 0 {
		o.Reply = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

// Queue is safe for concurrent use. Start it, and Close it in the end.
type Queue struct {
	o       Options
	metrics *metrics
	waiting atomic.Int64
	unknown atomic.Int64
	slots   chan struct{}
	items   chan *item

	// ctx is the life of the queue's goroutines and of what they have in flight.
	ctx    context.Context
	cancel context.CancelFunc
	owned  sync.WaitGroup // the batcher and settlers

	mu      sync.Mutex
	closed  bool
	closing chan struct{}
	callers sync.WaitGroup
}

// New makes a queue that accepts publications and holds them until Start.
func New(o Options) *Queue {
	o = o.withDefaults()
	q := &Queue{
		o: o, metrics: newMetrics(o.Metrics), slots: make(chan struct{}, o.Admitted),
		items: make(chan *item, o.Admitted), closing: make(chan struct{}),
	}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q
}

// Load is what a queue has in hand: publications that wait for admission, commits that are built and not sent,
// and those whose lost reply is not settled.
type Load struct{ Waiting, Queued, Unknown int64 }

// Load gives what the queue has in hand.
func (q *Queue) Load() Load {
	return Load{Waiting: q.waiting.Load(), Queued: int64(len(q.items)), Unknown: q.unknown.Load()}
}

// Start begins to send. Call it once.
func (q *Queue) Start() { q.owned.Go(q.send) }

// Close refuses new publications (SHUTTING_DOWN), lets the admitted ones finish until ctx ends, then
// cuts the rest short (not_started or unknown, as it is), and returns when no goroutine is left.
func (q *Queue) Close(ctx context.Context) {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		close(q.closing)
	}
	q.mu.Unlock()
	finished := make(chan struct{})
	go func() {
		q.callers.Wait()
		close(finished)
	}()
	select {
	case <-finished:
	case <-ctx.Done():
	}
	q.cancel()
	<-finished
	q.owned.Wait()
}

// Publish builds and commits. The error is nil exactly when the commit is applied (now or, by its
// receipt, earlier); a refusal is both the error and Result.Err.
func (q *Queue) Publish(ctx context.Context, build Build) (catalog.Result, error) {
	began := time.Now()
	leave, err := q.enter(ctx)
	if err != nil {
		return catalog.Result{}, err
	}
	defer leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(q.ctx, cancel)()

	pause := q.o.Pause
	for attempt := 1; ; attempt++ {
		c, err := build(ctx, q.o.Store)
		if err != nil {
			return catalog.Result{}, notStarted(err)
		}
		if attempt > 1 && mutant.On(mutant.DroppedReference) {
			for i := range c.Puts {
				c.Puts[i].Record.Refs = nil
			}
		}
		c.Attempt = uuid.NewString()
		if c.ID == "" {
			c.ID, c.Tenant, c.Transient = "~"+c.Attempt, catalog.SystemTenant, true
		}
		r, err := q.submit(ctx, c)
		if err == nil {
			q.metrics.whole.Observe(time.Since(began).Seconds())
			return r, nil
		}
		if !errs.Has(err, errs.StaleRevision) && !errs.Has(err, errs.AttemptVoid) {
			return r, err
		}
		if attempt == q.o.Attempts {
			return r, errs.From(err).WithOutcome(errs.NotStarted, errs.AfterBackoff).With("attempts", strconv.Itoa(attempt))
		}
		q.metrics.rebuilds.Inc()
		if err := wait.For(ctx, pause/2+rand.N(pause)); err != nil {
			return catalog.Result{}, notStarted(err)
		}
		pause = min(2*pause, 64*q.o.Pause)
	}
}

// PublishOperation is Publish for a client's operation: one that was applied before is answered from its
// receipt without being built (or OPERATION_BODY_MISMATCH), and the commit gets the operation's
// identity. A build that fails because a twin of the operation got there first is answered likewise.
func (q *Queue) PublishOperation(ctx context.Context, op Operation, build Build) (catalog.Result, error) {
	var replay catalog.Result
	errReplay := errors.New("answered from the receipt")
	r, err := q.Publish(ctx, func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		lookup := func() error {
			receipt, found, err := read.Receipt(ctx, op.Tenant, op.ID)
			if err != nil || !found {
				return err
			}
			if replay, err = fromReceipt(receipt, op.Digest); err != nil {
				return err
			}
			return errReplay
		}
		if err := lookup(); err != nil {
			return catalog.Commit{}, err
		}
		c, err := build(ctx, read)
		if err != nil {
			if twin := lookup(); errors.Is(twin, errReplay) {
				return c, twin
			}
			return c, err
		}
		c.Tenant, c.ID, c.Digest, c.Minted = op.Tenant, op.ID, op.Digest, op.Minted
		return c, nil
	})
	if errors.Is(err, errReplay) {
		return replay, nil
	}
	if err != nil {
		var typed *errs.Error
		if errors.As(err, &typed) && typed.OperationID == "" {
			err = typed.WithRequest("", op.ID)
		}
	}
	return r, err
}

func fromReceipt(r catalog.Receipt, digest string) (catalog.Result, error) {
	if r.Digest != digest {
		e := catalog.Refusal(errs.OperationBodyMismatch)
		return catalog.Result{Err: e}, e
	}
	return catalog.Result{Seq: r.Seq, Revisions: r.Revisions, Result: r.Result, Replayed: true}, nil
}

// enter waits for a slot. The returned function gives it back.
func (q *Queue) enter(ctx context.Context) (leave func(), err error) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return nil, shuttingDown()
	}
	q.callers.Add(1)
	q.mu.Unlock()
	defer func() {
		if err != nil {
			q.callers.Done()
		}
	}()
	if n := q.waiting.Add(1); n > int64(q.o.Waiting) {
		q.waiting.Add(-1)
		q.metrics.refused.WithLabelValues(string(errs.QueueFull)).Inc()
		return nil, errs.New(errs.QueueFull, "%d publications wait for the catalog; try again later", q.o.Waiting).
			With("resource", "publications").With("limit", strconv.Itoa(q.o.Waiting))
	}
	q.metrics.depth.Inc()
	defer func() {
		q.waiting.Add(-1)
		q.metrics.depth.Dec()
	}()
	if err := ctx.Err(); err != nil {
		return nil, notStarted(err)
	}
	select {
	case q.slots <- struct{}{}:
		return func() {
			<-q.slots
			q.callers.Done()
		}, nil
	case <-ctx.Done():
		return nil, notStarted(ctx.Err())
	case <-q.closing:
		return nil, shuttingDown()
	}
}

func shuttingDown() error {
	return errs.New(errs.ShuttingDown, "this coordinator is shutting down; ask another")
}

// notStarted marks the end of a context before anything was sent; other errors are left as they are.
func notStarted(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errs.From(err).WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	return err
}
