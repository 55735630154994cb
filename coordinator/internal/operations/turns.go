package operations

import (
	"context"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// turns gives deletions their turns at nodes, and requests theirs at the gate. At each node at most width go on at a time; the others wait in a line
// for each tenant, and the tenants take turns, so that who deletes ten thousand does not delay who deletes one.
type turns struct {
	width int

	mu    sync.Mutex
	lines map[string]*line // by node: those where somebody has a turn or waits for one
}

type line struct {
	active  int
	waiting map[string][]*waiter // by tenant
	order   []string             // the tenants that wait, the next one first
}

type waiter struct {
	ready chan struct{} // closed with the turn
	gone  bool          // nobody waits any more
}

func newTurns(width int) *turns { return &turns{width: width, lines: make(map[string]*line)} }

// take waits for a turn at the node, which leave ends.
func (t *turns) take(ctx context.Context, node, tenant string) (leave func(), err error) {
	w, leave := t.join(node, tenant)
	select {
	case <-w.ready:
		return leave, nil
	case <-ctx.Done():
		t.quit(w, leave)
		return nil, context.Cause(ctx)
	}
}

// join stands in line. Whoever finds it ready has the turn, which leave ends; whoever does not wait for it quits.
func (t *turns) join(node, tenant string) (w *waiter, leave func()) {
	w = &waiter{ready: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lines[node]
	if l == nil {
		l = &line{waiting: make(map[string][]*waiter)}
		t.lines[node] = l
	}
	if len(l.waiting[tenant]) == 0 {
		l.order = append(l.order, tenant)
	}
	l.waiting[tenant] = append(l.waiting[tenant], w)
	t.grant(node, l)
	return w, sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		l.active--
		t.grant(node, l)
	})
}

// quit gives the place in line up, or the turn that came in that very moment.
func (t *turns) quit(w *waiter, leave func()) {
	t.mu.Lock()
	w.gone = true
	granted := closed(w.ready)
	t.mu.Unlock()
	if granted {
		leave()
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// grant gives the free turns to the next in line. It wants the lock.
func (t *turns) grant(node string, l *line) {
	for l.active < t.width && len(l.order) > 0 {
		tenant := l.order[0]
		l.order = l.order[1:]
		w := l.waiting[tenant][0]
		l.waiting[tenant] = l.waiting[tenant][1:]
		if len(l.waiting[tenant]) > 0 {
			l.order = append(l.order, tenant)
		} else {
			delete(l.waiting, tenant)
		}
		if !w.gone {
			l.active++
			close(w.ready)
		}
	}
	if l.active == 0 && len(l.order) == 0 && t.lines[node] == l {
		delete(t.lines, node)
	}
}

// paced tells whether operations of the kind wait for turns: those that remove artefacts from disks, and of which there may
// be thousands. Sandboxes are not among them: they hold what others wait for.
func (k Kind) paced() bool { return k == KindDeleteSnapshot || k == KindDeleteVolume }

// sit waits for the turn of a deletion at its object's node; for other operations it does nothing.
func (e *Engine) sit(ctx context.Context, t *task) error {
	if !t.kind.paced() || t.leave != nil || t.op.Node == "" {
		return nil
	}
	leave, err := e.turns.take(ctx, t.op.Node, t.op.Tenant)
	if err != nil {
		return err
	}
	active := e.active[t.kind]
	active.Add(1)
	t.leave = func() {
		active.Add(-1)
		leave()
	}
	return nil
}

// stand gives up the turn.
func (t *task) stand() {
	if t.leave != nil {
		t.leave()
		t.leave = nil
	}
}

// pauseStanding is pause without the turn: what does not get on lets others pass.
func (e *Engine) pauseStanding(ctx context.Context, t *task, delay time.Duration) (time.Duration, error) {
	t.stand()
	delay = e.pause(ctx, delay)
	if ctx.Err() != nil {
		return delay, context.Cause(ctx)
	}
	return delay, e.sit(ctx, t)
}

// deletionEnded counts. It wants the lock.
func (e *Engine) deletionEnded(t *task) {
	tenant := t.op.Tenant
	if e.deleting[tenant]--; e.deleting[tenant] == 0 {
		delete(e.deleting, tenant)
	}
	if t.op.State == Pending {
		return // left for the next term
	}
	if e.ended1m[t.kind] == nil {
		e.ended1m[t.kind] = new(rate)
	}
	e.ended1m[t.kind].add(e.cfg.Now())
}

// room tells whether one more deletion of the tenant may be accepted. It wants the lock.
func (e *Engine) room(kind Kind, tenant string) error {
	if !kind.paced() {
		return nil
	}
	all := 0
	for _, n := range e.deleting {
		all += n
	}
	if most := max(e.cfg.MaxPending/2, 1); all >= most {
		return errs.New(errs.QueueFull, "%d deletions are in progress; wait, then ask again", all).With("resource", "deletions")
	}
	if n, most := e.deleting[tenant], max(e.cfg.MaxPending/4, 1); n >= most {
		return errs.New(errs.QueueFull, "%d deletions of this tenant are in progress; wait, then ask again", n).With("resource", "deletions")
	}
	return nil
}

// Deletion is how the deletions of one kind of object go on.
type Deletion struct {
	Kind            catalog.Kind
	Pending, Active int
	// Oldest is when the oldest of those pending was accepted.
	Oldest time.Time
	// Ended is how many ended in the last minute.
	Ended int
}

var pacedKinds = []struct {
	op     Kind
	object catalog.Kind
}{{KindDeleteSnapshot, catalog.KindSnapshot}, {KindDeleteVolume, catalog.KindVolume}}

// Deletions tells of the paced kinds, in the order of their dependence.
func (e *Engine) Deletions() []Deletion {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]Deletion, len(pacedKinds))
	for i, k := range pacedKinds {
		d := &all[i]
		d.Kind, d.Active, d.Ended = k.object, int(e.active[k.op].Load()), e.ended1m[k.op].last(e.cfg.Now())
		for _, t := range e.tasks {
			if t.kind != k.op {
				continue
			}
			d.Pending++
			if d.Oldest.IsZero() || t.created.Before(d.Oldest) {
				d.Oldest = t.created
			}
		}
	}
	return all
}

// rate counts what happened in each second of the last minute. The zero value has counted nothing.
type rate struct {
	counts [60]int
	began  time.Time // of the newest second
}

func (r *rate) add(now time.Time) {
	r.advance(now)
	r.counts[0]++
}

func (r *rate) last(now time.Time) int {
	if r == nil {
		return 0
	}
	r.advance(now)
	sum := 0
	for _, n := range r.counts {
		sum += n
	}
	return sum
}

// advance moves the seconds that went by. A clock that was set back moves nothing.
func (r *rate) advance(now time.Time) {
	if r.began.IsZero() {
		r.began = now
	}
	seconds := int(min(now.Sub(r.began)/time.Second, time.Duration(len(r.counts))))
	if seconds <= 0 {
		return
	}
	copy(r.counts[seconds:], r.counts[:len(r.counts)-seconds])
	clear(r.counts[:seconds])
	r.began = now
}
