package operations

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// The ledger counts the requests placed on each node. It is made from the records at the start of
// the term, and changed with each commit after it; only the leader places.

// account brings the ledger up to a sandbox's record. It must follow every commit of one.
func (e *Engine) account(sb *records.Sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clock(sb)
	if e.members.track(sb) {
		e.wakeKeeper()
	}
	e.unplace(sb.UID)
	if sb.Status.Node != "" && sb.Status.Phase.OnNode() {
		e.reserve(sb.Status.Node, sb.UID, reservation{request(sb), sb.Status.Observation})
	}
}

func (e *Engine) forget(uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.timers, uid)
	delete(e.used, uid)
	if e.members.drop(uid) {
		e.wakeKeeper()
	}
	e.unplace(uid)
}

// reserve and unplace want the lock.
func (e *Engine) reserve(node, uid string, r reservation) {
	if e.placed[node] == nil {
		e.placed[node] = make(map[string]reservation)
	}
	e.placed[node][uid] = r
}

func (e *Engine) unplace(uid string) {
	for _, on := range e.placed {
		delete(on, uid)
	}
}

// Placed is the sum of the requests on a node.
func (e *Engine) Placed(node string) placement.Resources {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sum(node)
}

func (e *Engine) sum(node string) placement.Resources {
	var total placement.Resources
	for _, r := range e.placed[node] {
		total = total.Add(r.Resources)
	}
	return total
}

func request(sb *records.Sandbox) placement.Resources {
	r := sb.Spec.Resources.WithDefaults()
	return placement.Resources{CPUMillis: r.CPURequestMillis, MemoryBytes: r.MemoryRequestBytes, Sandboxes: 1}
}

// limits is how far a sandbox may grow. A limit of the CPU above a node's is harmless.
func limits(spec sandbox.Spec) placement.Resources {
	return placement.Resources{MemoryBytes: spec.Resources.WithDefaults().MemoryLimitBytes}
}

// decide places the request and reserves for the uid, in one step under the lock: the decision
// is pure and quick.
func (e *Engine) decide(uid string, r placement.Request) (string, error) {
	nodes := e.cfg.Nodes.Nodes()
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range nodes {
		nodes[i].Placed = e.sum(nodes[i].Name)
	}
	node, err := placement.Decide(nodes, r)
	if err == nil && uid != "" {
		e.reserve(node, uid, reservation{Resources: r.Resources})
	}
	return node, err
}

// place decides, and waits for nodes that may come back while that is not too long ago. since is
// when the waiting began for the caller, by cfg.Now, whose monotonic part a step of the clock does not touch; waiting, if given, is told once of what is waited for.
func (e *Engine) place(ctx context.Context, uid string, r placement.Request, since time.Time, waiting func(why string) error) (string, error) {
	delay := e.cfg.RetryMin
	for {
		changed := e.cfg.Nodes.Changed()
		node, err := e.decide(uid, r)
		if err == nil {
			return node, nil
		}
		var nofit *placement.NoFit
		if !errors.As(err, &nofit) {
			return "", finally(err)
		}
		wait := nofit.Transient || len(nofit.Why) == 0 || e.yield(r)
		if !wait || e.cfg.Now().Sub(since) > e.cfg.PlacementWait {
			return "", finally(nofit.Envelope())
		}
		if waiting != nil {
			if err := waiting(nofit.Error()); err != nil {
				return "", err
			}
			waiting = nil
		}
		if delay = e.pauseOr(ctx, delay, changed); ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
	}
}

// possible refuses at the door what no node could ever hold.
func (e *Engine) possible(spec sandbox.Spec) error {
	r := spec.Resources.WithDefaults()
	asked := placement.Resources{CPUMillis: r.CPURequestMillis, MemoryBytes: r.MemoryRequestBytes}
	return placement.Possible(e.cfg.Nodes.Nodes(), asked.Max(limits(spec)))
}

// PlacedUIDs lists what is counted on a node, for operators and tests.
func (e *Engine) PlacedUIDs(node string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.placed[node]))
}
