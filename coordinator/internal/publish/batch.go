package publish

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/mutant"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// The life of an item. Whoever moves it out of queued owns its fate.
const (
	queued int32 = iota
	withdrawn
	sent
)

// item is one built commit. Its answer is given once, by the batcher or a settler.
type item struct {
	commit catalog.Commit
	state  atomic.Int32
	sentAt time.Time
	left   atomic.Bool // the caller's budget ended: nobody waits for the answer
	answer chan answer // holds one
}

type answer struct {
	result catalog.Result
	err    error
}

func (it *item) reply(r catalog.Result, err error) { it.answer <- answer{r, err} }

// submit hands the commit to the batcher and waits for its answer or the end of the caller's budget.
func (q *Queue) submit(ctx context.Context, c catalog.Commit) (catalog.Result, error) {
	it := &item{commit: c, answer: make(chan answer, 1)}
	select {
	case q.items <- it:
	case <-ctx.Done():
		return catalog.Result{}, notStarted(ctx.Err())
	}
	select {
	case a := <-it.answer:
		return a.result, a.err
	case <-ctx.Done():
	}
	if it.state.CompareAndSwap(queued, withdrawn) {
		return catalog.Result{}, notStarted(ctx.Err())
	}
	select { // an answer that came at the same moment is better than none
	case a := <-it.answer:
		return a.result, a.err
	default:
	}
	it.left.Store(true)
	e := errs.From(ctx.Err())
	return catalog.Result{}, e.WithOutcome(errs.Unknown, errs.SameOperation).WithRequest("", it.operation())
}

// operation is the ID that the caller knows.
func (it *item) operation() string {
	if it.commit.Transient {
		return ""
	}
	return it.commit.ID
}

// hopeless tells that an item is not to be settled: nobody waits, or its receipt may have expired.
func (it *item) hopeless() bool {
	return it.left.Load() || it.commit.Transient && time.Since(it.sentAt) > catalog.TransientLife/2
}

// send is the batcher: one batch is in flight, and what arrives meanwhile makes the next one.
func (q *Queue) send() {
	for {
		select {
		case it := <-q.items:
			q.sendBatch(q.gather(it))
		case <-q.ctx.Done():
			return
		}
	}
}

// gather takes what is queued, up to a batch, and leaves out what was withdrawn.
func (q *Queue) gather(first *item) []*item {
	batch := make([]*item, 0, q.o.Batch)
	for it := first; ; {
		if it.state.CompareAndSwap(queued, sent) {
			batch = append(batch, it)
		}
		if len(batch) == q.o.Batch {
			return batch
		}
		select {
		case it = <-q.items:
		default:
			return batch
		}
	}
}

func (q *Queue) sendBatch(batch []*item) {
	if len(batch) == 0 {
		return
	}
	commits := make([]catalog.Commit, len(batch))
	began := time.Now()
	for i, it := range batch {
		commits[i], it.sentAt = it.commit, began
	}
	q.metrics.batch.Observe(float64(len(batch)))
	ctx, cancel := context.WithTimeout(q.ctx, q.o.Reply)
	defer cancel()
	fault.At("commit.send.before")
	results, err := q.o.Store.Commit(ctx, commits)
	fault.At("commit.send.after")
	q.metrics.seconds.Observe(time.Since(began).Seconds())
	switch {
	case err == nil:
		for i, it := range batch {
			q.answer(it, results[i])
		}
	case errs.NotStartedFor(err) || mutant.On(mutant.BlindRetry):
		for _, it := range batch {
			q.metrics.refused.WithLabelValues(string(errs.ReasonOf(err))).Inc()
			it.reply(catalog.Result{}, err)
		}
	default:
		q.o.Logger.Warn("the reply to a batch of commits was lost", "commits", len(batch), "error", err, "cause", errors.Unwrap(err))
		q.metrics.unknown.Add(float64(len(batch)))
		q.unknown.Add(int64(len(batch)))
		q.owned.Go(func() { q.settle(batch) })
	}
}

func (q *Queue) answer(it *item, r catalog.Result) {
	if r.Err == nil {
		q.metrics.applied.Inc()
		it.reply(r, nil)
		return
	}
	q.metrics.refused.WithLabelValues(string(r.Err.Reason)).Inc()
	it.reply(r, r.Err)
}

// settle resolves the commits of a batch whose reply was lost, for as long as their callers wait. It
// runs beside the batcher, since others need not wait for it.
func (q *Queue) settle(batch []*item) {
	lost := errs.New(errs.ReplyLost, "the store's reply was lost and its receipts cannot be read; ask again with the same operation id to learn the outcome")
	pause := 10 * time.Millisecond
	for len(batch) > 0 {
		var open []*item
		reached := true
		for _, it := range batch {
			switch {
			case it.hopeless() || q.ctx.Err() != nil:
				q.settled(it, "unresolved", catalog.Result{}, lost.WithRequest("", it.operation()))
			case !reached || !q.settleOne(it):
				reached = false
				open = append(open, it)
			}
		}
		// The pause ends with the queue; callers that left are noticed within its half second.
		if batch = open; len(batch) > 0 && wait.For(q.ctx, pause/2+rand.N(pause)) == nil {
			pause = min(2*pause, 500*time.Millisecond)
		}
	}
}

// settleOne tells whether the store answered, and if so gives the item its answer.
func (q *Queue) settleOne(it *item) bool {
	ctx, cancel := context.WithTimeout(q.ctx, q.o.Reply)
	defer cancel()
	receipt, found, err := q.o.Store.Settle(ctx, it.commit.Tenant, it.commit.ID, it.commit.Attempt)
	switch {
	case err != nil:
		return false
	case found:
		r, err := fromReceipt(receipt, it.commit.Digest)
		q.settled(it, "applied", r, err)
	default:
		// It never was and never will be applied: the caller builds it again as another attempt.
		q.settled(it, "void", catalog.Result{}, catalog.Refusal(errs.AttemptVoid))
	}
	return true
}

func (q *Queue) settled(it *item, how string, r catalog.Result, err error) {
	q.metrics.unknown.Dec()
	q.unknown.Add(-1)
	q.metrics.settled.WithLabelValues(how).Inc()
	it.reply(r, err)
}
