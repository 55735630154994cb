package runner

import (
	"context"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// trims are the sandboxes whose runtime holds what a capture left. A trim is CPU that captures and starts want too, so it waits for a moment
// without either; but no more is left lying than memory allows. All of it is in memory: what an agentd forgets is given back by the
// runtime itself, only later.
type trims struct {
	mu    sync.Mutex
	due   []string
	added chan struct{}
}

const (
	// leavings is what a capture leaves in a sandbox's runtime, as measured.
	leavings = 5 << 20
	// leavingsShare of the memory that is to spare may lie in leavings while others are at work.
	leavingsShare = 4

	trimEvery = 250 * time.Millisecond
	// trimsAtOnce is how many are asked at each tick: a fifth of a core.
	trimsAtOnce = 10
)

func newTrims() *trims { return &trims{added: make(chan struct{}, 1)} }

func (t *trims) add(uid string) {
	t.mu.Lock()
	t.due = append(t.due, uid)
	t.mu.Unlock()
	select {
	case t.added <- struct{}{}:
	default:
	}
}

func (t *trims) waiting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.due)
}

// take gives the first n of them.
func (t *trims) take(n int) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = min(n, len(t.due))
	uids := t.due[:n:n]
	if t.due = t.due[n:]; len(t.due) == 0 {
		t.due = nil
	}
	return uids
}

// trimsNow is how many of those that are due are trimmed now. spare is asked only if it matters.
func trimsNow(due int, busy bool, spare func() int64) int {
	if busy {
		due -= int(max(spare(), 0) / leavingsShare / leavings)
	}
	return min(max(due, 0), trimsAtOnce)
}

// busy tells whether something is being captured, started or restored, or waits for its turn.
func (n *Node) busy() bool { return n.Capturer.Busy() || n.turns.taken() }

// trim has the runtimes trimmed until ctx ends. With nothing due it sleeps.
func (n *Node) trim(ctx context.Context) {
	tick := time.NewTicker(trimEvery)
	defer tick.Stop()
	for {
		tick.Stop()
		select {
		case <-n.trims.added:
		case <-ctx.Done():
			return
		}
		tick.Reset(trimEvery)
		for n.trims.waiting() > 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			for _, uid := range n.trims.take(trimsNow(n.trims.waiting(), n.busy(), n.Room.Spare)) {
				if err := n.Driver.Trim(uid); err != nil && !errs.Has(err, errs.ObjectNotFound) {
					n.Log.Warn("trim a sandbox's runtime", "sandbox", uid, "error", err)
				}
			}
		}
	}
}
