package network

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Mode is what a sandbox may reach.
type Mode string

// ModeNone reaches nothing but the sandbox itself, ModeOutbound what its policy lets it.
const (
	ModeNone     Mode = "none"
	ModeOutbound Mode = "outbound"
)

// Lease is one sandbox's network.
type Lease struct {
	uid     string
	mode    Mode
	path    string
	servers []string

	mu sync.Mutex
	fd int // -1 once released
}

// UID is the sandbox it was acquired for.
func (l *Lease) UID() string { return l.uid }

// Mode is the mode it was acquired with.
func (l *Lease) Mode() Mode { return l.mode }

// Nameservers are the addresses of the resolver that the sandbox is to ask; none in ModeNone.
func (l *Lease) Nameservers() []string { return l.servers }

// Path names the namespace for the OCI spec. It is good until Release and in every process that sees
// the host's processes.
func (l *Lease) Path() string { return l.path }

// Release lets go of the namespace; a sandbox that has entered it keeps it. It may be called as soon
// as the sandbox runs, and must be called in the end. Idempotent.
func (l *Lease) Release() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	if err := unix.Close(fd); err != nil {
		return errs.Wrap(err, errs.InternalError, "close the network namespace of sandbox %s: %v", l.uid, err)
	}
	return nil
}

// calm is how long no namespace was asked for when the pool fills up again, unless little is left: making one takes the
// CPU that starts want, and who starts many at a time pauses sooner or later.
const calm = 300 * time.Millisecond

// Options of a pool.
type Options struct {
	// Size is how many namespaces are kept ready; 0 makes each when it is asked for.
	Size int
	// Log is slog.Default() when nil.
	Log *slog.Logger
}

// Pool keeps namespaces ready. Safe for concurrent use.
type Pool struct {
	log    *slog.Logger
	idle   chan int
	taken  chan struct{} // signalled when one was taken
	last   atomic.Int64  // when, since began
	began  time.Time
	cancel context.CancelFunc
	done   chan struct{}
}

// NewPool starts a pool; it fills in the background. Close ends it.
func NewPool(opts Options) *Pool {
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Pool{log: opts.Log, idle: make(chan int, max(opts.Size, 0)), taken: make(chan struct{}, 1), began: time.Now(), cancel: cancel, done: make(chan struct{})}
	if opts.Size <= 0 {
		close(p.done)
		return p
	}
	go p.fill(ctx)
	return p
}

// Idle is how many are ready now.
func (p *Pool) Idle() int { return len(p.idle) }

// Acquire gives the sandbox a network of the mode: a ready namespace, or a new one when none is.
// NOT_SUPPORTED for a mode that this node does not have. Nothing is held after an error.
func (p *Pool) Acquire(ctx context.Context, uid string, mode Mode) (*Lease, error) {
	if mode != ModeNone {
		return nil, NotHere(mode)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case <-p.done:
		if cap(p.idle) > 0 {
			return nil, errs.New(errs.ShuttingDown, "the network pool is closed")
		}
	default:
	}
	fd, err := p.take()
	if err != nil {
		return nil, err
	}
	return &Lease{uid: uid, mode: mode, fd: fd, path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)}, nil
}

// NotHere is the error for a mode that this node does not have.
func NotHere(mode Mode) error {
	return errs.New(errs.NotSupported, "the network mode %q is not available on this node; ask for %q, or set network.cidr in the configuration of agentd", mode, ModeNone).
		With("feature", "network "+string(mode))
}

func (p *Pool) take() (int, error) {
	select {
	case fd := <-p.idle:
		p.last.Store(int64(time.Since(p.began)))
		select {
		case p.taken <- struct{}{}:
		default:
		}
		return fd, nil
	default:
		return newNamespace(nil)
	}
}

// fill keeps the pool full until its context ends.
func (p *Pool) fill(ctx context.Context) {
	defer close(p.done)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.taken:
		case <-pause.C:
		}
		if len(p.idle) == cap(p.idle) {
			continue // until one is taken
		}
		if wait := p.uncalm(); wait > 0 {
			pause.Reset(wait)
			continue
		}
		fd, err := newNamespace(nil)
		if err != nil {
			p.log.Error("make a network namespace for the pool", "error", err)
			pause.Reset(time.Second)
			continue
		}
		p.idle <- fd // has room: nobody else adds
		pause.Reset(0)
	}
}

// uncalm is how long filling is to wait.
func (p *Pool) uncalm() time.Duration {
	last := time.Duration(p.last.Load())
	if last == 0 || len(p.idle) <= cap(p.idle)/4 {
		return 0
	}
	return calm - (time.Since(p.began) - last)
}

// Close ends the pool and gives up the namespaces that nobody leased. Leases stay good.
func (p *Pool) Close() error {
	p.cancel()
	<-p.done
	for {
		select {
		case fd := <-p.idle:
			_ = unix.Close(fd) // the last holder: nothing can be left of it
		default:
			return nil
		}
	}
}

// newNamespace makes an anonymous namespace with loopback up and gives a descriptor of it. furnish, if not nil, is
// called in it, on its thread.
func newNamespace(furnish func(h *netlink.Handle) error) (int, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result, 1)
	var attempt func()
	attempt = func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// The first thread cannot end, and stands for the process in /proc: it stays where it is. While this
			// goroutine holds it, another one gets another thread.
			defer runtime.UnlockOSThread()
			again := make(chan struct{})
			go func() { defer close(again); attempt() }()
			<-again
			return
		}
		// Never unlocked: the thread that entered the new namespace ends with this goroutine.
		fd, err := namespaceOnThread(furnish)
		done <- result{fd, err}
	}
	go attempt()
	r := <-done
	if r.err != nil {
		return -1, errs.Wrap(r.err, errs.InternalError, "make a network namespace: %v", r.err)
	}
	return r.fd, nil
}

func namespaceOnThread(furnish func(h *netlink.Handle) error) (int, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("unshare: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return -1, fmt.Errorf("find loopback: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return -1, fmt.Errorf("set loopback up: %w", err)
	}
	if furnish != nil {
		if err := furnish(h); err != nil {
			return -1, err
		}
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open the namespace: %w", err)
	}
	return fd, nil
}
