package bulk

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Driver starts helpers; runtime.Driver is one.
type Driver interface {
	Exec(ctx context.Context, id string, p runtime.Program) (runtime.Process, error)
}

const (
	// defaultPerSandbox and defaultPerNode are how many transfers there are at a time.
	defaultPerSandbox = 32
	defaultPerNode    = 512
	// pipeBytes is how much a pipe holds: more makes fewer and longer reads.
	pipeBytes = 256 << 10
	// settleTime is how long Freeze waits for helpers to have read what was sent.
	settleTime = 200 * time.Millisecond
	// leaveTime is how long a helper may take to end once its pipes are closed.
	leaveTime  = 5 * time.Second
	settlePoll = time.Millisecond
)

// Options of a manager. Driver and Helper are needed.
type Options struct {
	Driver Driver
	// Helper is the helper's path inside, Capabilities what it has.
	Helper       string
	Capabilities []string
	// PerSandbox and PerNode bound the transfers at a time; 0 is the usual.
	PerSandbox, PerNode int
	Log                 *slog.Logger
}

// Manager starts transfers and freezes them. Safe for concurrent use.
type Manager struct {
	opts Options
	// ctx ends with Close.
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	closed bool
	boxes  map[string]*box
	total  int
	wg     sync.WaitGroup
}

// box is what there is of one sandbox. It is kept while it is frozen or has transfers.
type box struct {
	places   int // taken
	starting int
	open     map[*Transfer]bool
	// thawed is closed when it is not frozen any more; nil while it is not frozen.
	thawed chan struct{}
	// settled is signalled when starting becomes zero.
	settled *sync.Cond
}

// New makes a manager.
func New(opts Options) *Manager {
	if opts.PerSandbox <= 0 {
		opts.PerSandbox = defaultPerSandbox
	}
	if opts.PerNode <= 0 {
		opts.PerNode = defaultPerNode
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	m := &Manager{opts: opts, boxes: make(map[string]*box)}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// Close ends all transfers and waits for what belongs to them here. Helpers end by themselves.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	var all []*Transfer
	for _, b := range m.boxes {
		for t := range b.open {
			all = append(all, t)
		}
		b.thaw()
	}
	m.mu.Unlock()
	m.cancel()
	for _, t := range all {
		t.cut(errs.New(errs.ShuttingDown, "agentd is stopping; go on from the offset reached once it has started"))
	}
	m.wg.Wait()
}

// box gives the sandbox's box, a new one where there is none. The caller holds mu.
func (m *Manager) box(uid string) *box {
	b := m.boxes[uid]
	if b == nil {
		b = &box{open: make(map[*Transfer]bool), settled: sync.NewCond(&m.mu)}
		m.boxes[uid] = b
	}
	return b
}

// drop forgets a box that holds nothing. The caller holds mu.
func (m *Manager) drop(uid string, b *box) {
	if b.places == 0 && b.thawed == nil && m.boxes[uid] == b {
		delete(m.boxes, uid)
	}
}

func (b *box) thaw() {
	if b.thawed != nil {
		close(b.thawed)
		b.thawed = nil
	}
}

// Freeze keeps new helpers from the sandbox and bytes from those that it has, and waits a moment for what
// was sent to be read. Idempotent; Thaw ends it.
func (m *Manager) Freeze(ctx context.Context, uid string) {
	m.mu.Lock()
	b := m.box(uid)
	if b.thawed == nil {
		b.thawed = make(chan struct{})
	}
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		b.settled.Broadcast()
	})
	for b.starting > 0 && ctx.Err() == nil {
		b.settled.Wait()
	}
	stop()
	var all []*Transfer
	for t := range b.open {
		all = append(all, t)
	}
	m.mu.Unlock()
	if len(all) == 0 {
		return
	}
	bound, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	tick := time.NewTicker(settlePoll)
	defer tick.Stop()
	for _, t := range all {
		for !t.settled() {
			select {
			case <-tick.C:
			case <-bound.Done():
				return
			}
		}
	}
}

// Thaw ends Freeze. Safe without one.
func (m *Manager) Thaw(uid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[uid]; b != nil {
		b.thaw()
		m.drop(uid, b)
	}
}

// Active counts the sandbox's transfers.
func (m *Manager) Active(uid string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[uid]; b != nil {
		return b.places
	}
	return 0
}

// enter takes a place and begins a start, once the sandbox is not frozen.
func (m *Manager) enter(ctx context.Context, uid string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		if m.closed {
			return errs.New(errs.ShuttingDown, "agentd is stopping; ask again once it has started")
		}
		b := m.box(uid)
		switch {
		case b.places >= m.opts.PerSandbox:
			return tooMany("transfers of the sandbox", m.opts.PerSandbox)
		case m.total >= m.opts.PerNode:
			m.drop(uid, b)
			return tooMany("transfers of the node", m.opts.PerNode)
		case b.thawed == nil:
			b.places++
			b.starting++
			m.total++
			m.wg.Add(1)
			return nil
		}
		thawed := b.thawed
		m.mu.Unlock()
		select {
		case <-thawed:
		case <-ctx.Done():
		}
		m.mu.Lock()
		if ctx.Err() != nil {
			return errs.From(ctx.Err()).WithOutcome(errs.NotStarted, errs.SameOperation)
		}
	}
}

func tooMany(what string, limit int) error {
	return errs.New(errs.TooMany, "there are %d %s at a time; wait for one to end", limit, what).With("resource", what).With("limit", strconv.Itoa(limit))
}

// started ends a start that enter began; t is nil where it failed.
func (m *Manager) started(uid string, t *Transfer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[uid]
	if b.starting--; b.starting == 0 {
		b.settled.Broadcast()
	}
	if t != nil {
		b.open[t] = true
	}
}

// leave gives a place back.
func (m *Manager) leave(uid string, t *Transfer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[uid]
	delete(b.open, t)
	b.places--
	m.total--
	m.drop(uid, b)
	m.wg.Done()
}

// frozen gives what to wait for before bytes are sent; nil for nothing.
func (m *Manager) frozen(uid string) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[uid]; b != nil {
		return b.thawed
	}
	return nil
}

// Start starts a helper in the sandbox and gives it the order. The transfer ends with ctx, or with Close,
// which has to be called.
func (m *Manager) Start(ctx context.Context, uid string, order bulkwire.Order) (*Transfer, error) {
	return m.begin(ctx, ctx, uid, order)
}

// begin is Start for a transfer that ends with life, while ctx bounds its start.
func (m *Manager) begin(ctx, life context.Context, uid string, order bulkwire.Order) (*Transfer, error) {
	if err := m.enter(ctx, uid); err != nil {
		return nil, err
	}
	t, err := m.start(ctx, life, uid)
	m.started(uid, t)
	if err != nil {
		m.leave(uid, nil)
		return nil, err
	}
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	if closed {
		t.cut(errs.New(errs.ShuttingDown, "agentd is stopping; ask again once it has started"))
	}
	if err := t.send(func() error { return t.out.WriteText(bulkwire.Request, order) }); err != nil {
		_ = t.Close()
		return nil, err
	}
	return t, nil
}

func (m *Manager) start(ctx, life context.Context, uid string) (*Transfer, error) {
	p, err := newPipes()
	if err != nil {
		return nil, err
	}
	proc, err := m.opts.Driver.Exec(ctx, uid, runtime.Program{
		Args: []string{m.opts.Helper}, Env: []string{"GOMAXPROCS=2"}, Capabilities: m.opts.Capabilities, Stdio: p.theirs,
	})
	for _, fd := range p.theirs {
		_ = unix.Close(fd)
	}
	if err != nil {
		p.close()
		if errs.Has(err, errs.CommandNotFound) {
			return nil, errs.Wrap(err, errs.NotSupported, "the bundle that runs sandbox %s has no bulk helper; it moves no files and reaches no ports", uid).With("feature", "bulk")
		}
		return nil, err
	}
	return newTransfer(life, m, uid, proc, p), nil
}
