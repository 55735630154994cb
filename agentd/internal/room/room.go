package room

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Source has the figures. A sandbox or group that is not there uses nothing.
type Source interface {
	Machine() (Machine, error)
	// Used is what all sandboxes of the node have in memory, UsedBy one; page cache not counted.
	Used() (int64, error)
	UsedBy(uid string) (int64, error)
}

// Machine is what the kernel says.
type Machine struct {
	Total, Available int64
	// Stalled is the share of the last ten seconds, in percent, in which something waited for memory; 0 where that is not counted.
	Stalled float64
}

// Need is what a sandbox asks for.
type Need struct {
	// Request is what it may use at any time, Expect what it touches on its way in, or 0.
	Request, Expect int64
}

func (n Need) most() int64 { return max(n.Request, n.Expect) }

// Options of a Room.
type Options struct {
	Source Source
	// Limit is the memory that the node may use for sandboxes and itself; 0: the machine's.
	Limit int64
	// Reserve is left alone.
	Reserve int64
	// Sandboxes is how many there may be; 0 is no bound.
	Sandboxes int64
	// Wait is how long who does not fit waits; 0: not at all.
	Wait time.Duration
	// Low gives back what can be had again; called while memory is short, every few seconds. May be nil.
	Low func(ctx context.Context)
	// Requested is told by Run the sum of all requests, every second. May be nil.
	Requested func(bytes int64)
	Log       *slog.Logger
	Now       func() time.Time
}

const (
	// maxWaiting bounds who waits.
	maxWaiting = 256
	// The use of each sandbox is read again after relaxed times as long as that took last, and freshest at the earliest, if anything asked;
	// where something would be refused, after urgent times as long.
	relaxed, urgent = 100, 10
	freshest        = time.Second
)

// share is a sandbox's.
type share struct {
	Need
	settled bool
	used    int64
}

func (s *share) unclaimed() int64 {
	if s.settled {
		return max(s.Request-s.used, 0)
	}
	return max(s.most()-s.used, 0)
}

// waiter is who waits; done is closed once it has a share.
type waiter struct {
	uid  string
	need Need
	done chan struct{}
}

// Room is the node's memory.
type Room struct {
	o Options

	// reading is held while figures are read, without mu.
	reading sync.Mutex
	sampled time.Time // when the use of each sandbox was read last, and how long that took
	took    time.Duration
	asked   bool // something came since

	mu      sync.Mutex
	shares  map[string]*share
	waiting []*waiter
	machine Machine
	used    int64
	broken  error // the figures could not be read
	level   Level
	changed chan struct{}
}

// New makes one that is empty.
func New(o Options) *Room {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Room{o: o, shares: make(map[string]*share), changed: make(chan struct{})}
}

// Enter gives the sandbox its share, and waits for it if there is none now. OUT_OF_MEMORY or NODE_FULL, with what is asked and what is left,
// when there is none in time.
func (r *Room) Enter(ctx context.Context, uid string, need Need) error {
	r.refresh(false)
	w, err := r.join(uid, need)
	if w == nil {
		return err
	}
	timer := time.NewTimer(r.o.Wait)
	defer timer.Stop()
	// What is in flight touches its memory, and what was above its request gives some back: nobody tells.
	look := time.NewTicker(max(r.o.Wait/20, 10*time.Millisecond))
	defer look.Stop()
	r.serve(w)
	for {
		select {
		case <-w.done:
			return nil
		case <-look.C:
			r.serve(w)
			continue
		case <-timer.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		return r.giveUp(w, err)
	}
}

// join gives a share, or a place among those who wait, or the refusal.
func (r *Room) join(uid string, need Need) (*waiter, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shares[uid] != nil {
		return nil, nil
	}
	if len(r.waiting) == 0 && r.fits(need) == nil {
		r.shares[uid] = &share{Need: need}
		return nil, nil
	}
	if len(r.waiting) >= maxWaiting {
		return nil, behind(len(r.waiting))
	}
	w := &waiter{uid: uid, need: need, done: make(chan struct{})}
	r.waiting = append(r.waiting, w)
	return w, nil
}

// behind is the refusal of one whose turn did not come.
func behind(n int) error {
	return errs.New(errs.OutOfMemory, "%d starts and restores that came earlier wait for memory on this node; try again later, or use another node", n).
		With("resource", "waiting").With("asked", "1").With("left", "0")
}

// giveUp takes who waited too long out of the line, and says why; a share that it was given at that moment stands.
func (r *Room) giveUp(w *waiter, cause error) error {
	r.refresh(true)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.admit()
	i := slices.Index(r.waiting, w)
	if i < 0 {
		return nil
	}
	err := cause
	if err == nil {
		if err = r.fits(w.need); err == nil {
			err = behind(i)
		}
	}
	r.waiting = slices.Delete(r.waiting, i, i+1)
	r.admit()
	return err
}

// serve looks for the first of those who wait, who does so for all.
func (r *Room) serve(w *waiter) {
	r.mu.Lock()
	first := len(r.waiting) > 0 && r.waiting[0] == w
	r.mu.Unlock()
	if first {
		r.serveAll()
	}
}

func (r *Room) serveAll() {
	r.refresh(true)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.admit()
}

// admit gives shares to those who wait, in their order. It wants the lock.
func (r *Room) admit() {
	for len(r.waiting) > 0 {
		w := r.waiting[0]
		if r.shares[w.uid] == nil {
			if r.fits(w.need) != nil {
				return
			}
			r.shares[w.uid] = &share{Need: w.need}
		}
		r.waiting = slices.Delete(r.waiting, 0, 1)
		close(w.done)
	}
}

// Keep notes a sandbox that is on the node already, whether it fits or not.
func (r *Room) Keep(uid string, need Need) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shares[uid] == nil {
		r.shares[uid] = &share{Need: need, settled: true}
	}
}

// Settle tells that the sandbox runs: what it was expected to touch it has touched.
func (r *Room) Settle(uid string) {
	used, err := r.o.Source.UsedBy(uid)
	if err != nil {
		r.o.Log.Warn("read the memory of a sandbox", "sandbox", uid, "error", err)
	}
	r.mu.Lock()
	s := r.shares[uid]
	if s != nil && !s.settled {
		s.settled, s.used = true, used
	}
	waited := len(r.waiting) > 0
	r.mu.Unlock()
	if waited {
		r.serveAll()
	}
}

// Leave tells that the sandbox's memory is free.
func (r *Room) Leave(uid string) {
	r.mu.Lock()
	delete(r.shares, uid)
	waited := len(r.waiting) > 0
	r.mu.Unlock()
	if waited {
		r.serveAll()
	}
}

// fits says why the need does not fit, or nil. It wants the lock.
func (r *Room) fits(need Need) error {
	if r.broken != nil {
		return r.broken
	}
	if r.o.Sandboxes > 0 && int64(len(r.shares)) >= r.o.Sandboxes {
		return errs.New(errs.NodeFull, "the node has all of its %d sandboxes; delete some, or use another node", r.o.Sandboxes).
			With("resource", "sandboxes").With("asked", "1").With("left", "0")
	}
	requests, unclaimed := r.sums()
	if left := r.limit() - r.o.Reserve - requests; need.Request > left {
		return outOfMemory("requests", "the node has, in requests,", need.Request, left)
	}
	if left := r.available() - r.o.Reserve - unclaimed; need.most() > left {
		return outOfMemory("memory", "the node can give", need.most(), left)
	}
	return nil
}

func outOfMemory(resource, what string, asked, left int64) error {
	left = max(left, 0)
	return errs.New(errs.OutOfMemory, "%s of memory is asked, %s %s; ask for less, delete some sandboxes, or use another node",
		config.FormatBytes(asked), what, config.FormatBytes(left)).
		With("resource", resource).With("asked", strconv.FormatInt(asked, 10)).With("left", strconv.FormatInt(left, 10))
}

// limit, available and sums want the lock.
func (r *Room) limit() int64 {
	if r.o.Limit > 0 {
		return r.o.Limit
	}
	return r.machine.Total
}

func (r *Room) available() int64 {
	if r.o.Limit > 0 {
		return min(r.machine.Available, r.o.Limit-r.used)
	}
	return r.machine.Available
}

func (r *Room) sums() (requests, unclaimed int64) {
	for _, s := range r.shares {
		requests += s.Request
		unclaimed += s.unclaimed()
	}
	return requests, unclaimed
}
