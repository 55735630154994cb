package runner

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/spread"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Bounds of what goes on although a caller's context ended, or that has no caller.
const (
	defaultBudget = 10 * time.Minute
	undoTimeout   = 60 * time.Second
	helloTimeout  = 15 * time.Second
	recordTimeout = 10 * time.Second
	firstRetry    = time.Second
	longestRetry  = time.Minute
	mailboxLength = 16
)

// Options are what a node is made of. All but Room, Log, Now, Measure and Fault are needed.
type Options struct {
	Store    *nodestate.Store
	Driver   runtime.Driver
	Images   Images
	Volumes  Volumes
	Networks Networks
	Bundles  Bundles
	Groups   Groups
	Specs    Specs
	Guests   Guests
	// Room (may be nil: there is always enough) admits what is to run.
	Room Room

	Snapshots *checkpoint.Store
	Capturer  *checkpoint.Capturer
	Host      checkpoint.Host

	// Root is the folder of the sandboxes' own folders.
	Root string
	// ReadyRoot is a folder on the same disk for Ready folders that are made ahead; none are with 0.
	ReadyRoot string
	Ready     int
	// Flags are the driver's, for new sandboxes.
	Flags []string
	// Width is how many sandboxes are started or restored at a time; 0 is one. Restores is how many of them may be restored; 0 is all.
	Width, Restores int

	Log *slog.Logger
	Now func() time.Time
	// Measure is told of each step of a start or restore, and of a capture: their waits for a turn are steps of their own, "queue".
	// And of a resume or claim. For metrics. May be nil.
	Measure func(verb, step string, took time.Duration, err error)
	// Fault is asked at each fault point; an error stops the owner dead, as a crash would. Tests only.
	Fault func(point string) error
}

// Node runs the sandboxes of a node. Its methods may be called concurrently.
type Node struct {
	Options

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	owners map[string]*owner
	// inUse counts who reads a snapshot; -1 while it is being deleted.
	inUse map[string]int

	changed chan struct{}
	turns   turns
	shelf   *shelf
	// ends, makes, restores and captures bound how many are being ended, started, restored and captured, with all that surrounds their turns.
	ends, makes, restores, captures *gate
	trims                           *trims
}

var errClosing = errs.New(errs.ShuttingDown, "agentd is stopping; ask again with the same command id once it has started")

// New makes a node. It starts nothing: Recover first, then calls.
func New(opts Options) (*Node, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Room == nil {
		opts.Room = roomy{}
	}
	if err := os.MkdirAll(opts.Root, 0o700); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "make the sandboxes' folder: %v", err)
	}
	if err := os.Chmod(opts.Root, 0o700); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "protect the sandboxes' folder: %v", err)
	}
	_ = spread.Below(opts.Root) // a hint
	n := &Node{Options: opts, owners: make(map[string]*owner), inUse: make(map[string]int), changed: make(chan struct{}, 1),
		ends: newEnds(), trims: newTrims(), turns: newTurns(opts.Width, opts.Restores)}
	n.makes, n.restores, n.captures = newGate(cap(n.turns.all)+ahead), newGate(cap(n.turns.restores)+ahead), newGate(opts.Capturer.Width()+ahead)
	var err error
	if n.shelf, err = openShelf(opts.ReadyRoot, opts.Ready); err != nil {
		return nil, err
	}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	n.wg.Go(func() {
		n.shelf.fill(n.ctx, func(err error) { n.Log.Error("make a sandbox's folder ahead", "error", err) })
	})
	n.wg.Go(func() { n.trim(n.ctx) })
	return n, nil
}

// Close cancels what is going on, undoes what was being made, and waits. Sandboxes go on.
func (n *Node) Close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel(errClosing)
	n.wg.Wait()
}

// Changed has a value whenever an observation of a sandbox was recorded since it was last read.
func (n *Node) Changed() <-chan struct{} { return n.changed }

// queueStep is what the wait for a turn is measured as, and captureStep the work at a capture.
const queueStep, captureStep = "queue", "capture"

func (n *Node) measure(verb, step string, took time.Duration, err error) {
	if n.Measure != nil {
		n.Measure(verb, step, took, err)
	}
}

func (n *Node) notify() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Dir is a sandbox's own folder.
func (n *Node) Dir(uid string) string { return filepath.Join(n.Root, uid) }

const fifoDir = "fifo"

func (n *Node) stdio(uid string) runtime.Stdio {
	dir := filepath.Join(n.Dir(uid), fifoDir)
	return runtime.Stdio{In: filepath.Join(dir, "in"), Out: filepath.Join(dir, "out"), Err: filepath.Join(dir, "err")}
}

// do runs fn in the sandbox's own goroutine and waits for it, or for the caller's end: then fn goes on,
// within the caller's deadline.
func (n *Node) do(ctx context.Context, uid string, yields bool, fn func(ctx context.Context, o *owner) error) error {
	return n.submit(ctx, uid, &task{fn: fn, yields: yields})
}

// submit gives a task to the owner and waits as do does. What runs or is before it yields to it at once, if it ends others.
func (n *Node) submit(ctx context.Context, uid string, t *task) error {
	o, err := n.acquire(uid)
	if err != nil {
		return err
	}
	t.done = make(chan struct{})
	t.ctx, t.cancel = budget(ctx, n.ctx)
	o.announce(t)
	select {
	case o.inbox <- t:
		err = nil
	case <-ctx.Done():
		err = errs.From(ctx.Err()).WithOutcome(errs.NotStarted, errs.SameOperation)
	case <-n.ctx.Done():
		err = errClosing
	case <-o.dead:
		err = n.ownerEnded(uid)
	}
	if err != nil {
		o.arrived(t)
		n.release(o)
		t.cancel()
		return err
	}
	select {
	case <-t.done:
		return t.err
	case <-o.dead:
		// It may have done the task and then ended, having nothing left to own.
		select {
		case <-t.done:
			return t.err
		default:
			t.cancel()
			return n.ownerEnded(uid)
		}
	case <-ctx.Done():
		return errs.From(ctx.Err())
	}
}

// doFor is do for work that has a result. A caller that left before the work ended gets none: the work goes on, and
// shares nothing with who does not wait for it.
func doFor[T any](ctx context.Context, n *Node, uid string, yields bool, fn func(ctx context.Context, o *owner) (T, error)) (T, error) {
	result := make(chan T, 1)
	err := n.do(ctx, uid, yields, func(ctx context.Context, o *owner) error {
		v, err := fn(ctx, o)
		result <- v
		return err
	})
	select {
	case v := <-result:
		return v, err
	default:
		var none T
		return none, err
	}
}

func (n *Node) ownerEnded(uid string) error {
	if n.ctx.Err() != nil {
		return errClosing.WithOutcome(errs.Unknown, errs.SameOperation)
	}
	return errs.New(errs.InternalError, "the owner of sandbox %s has ended", uid)
}

// budget is the context of work: the caller's values and deadline, not its cancellation; ended with
// the owner's.
func budget(caller, owner context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := caller.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultBudget)
	}
	work, cancelDeadline := context.WithDeadline(context.WithoutCancel(caller), deadline)
	work, cancel := context.WithCancelCause(work)
	stop := context.AfterFunc(owner, func() { cancel(context.Cause(owner)) })
	return work, func() {
		stop()
		cancel(nil)
		cancelDeadline()
	}
}

// acquire gives the sandbox's owner, and starts one where there is none. release gives it back; do's
// task does so itself once it ran.
func (n *Node) acquire(uid string) (*owner, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, errClosing
	}
	o := n.owners[uid]
	if o == nil {
		o = newOwner(n, uid)
		n.owners[uid] = o
		n.wg.Add(1)
		go o.run()
	}
	o.users++
	return o, nil
}

func (n *Node) release(o *owner) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o.users--
	select {
	case o.idle <- struct{}{}:
	default:
	}
}

// retire forgets an owner whom nobody uses. false: somebody does.
func (n *Node) retire(o *owner, dead bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if o.users > 0 && !dead {
		return false
	}
	if n.owners[o.uid] == o {
		delete(n.owners, o.uid)
	}
	return true
}

// Guest gives the open channel of a running sandbox, or why there is none.
func (n *Node) Guest(uid string) (Guest, error) {
	n.mu.Lock()
	o := n.owners[uid]
	n.mu.Unlock()
	if o != nil && !o.stands() {
		if g := o.openGuest(); g != nil {
			return g, nil
		}
	}
	rec, err := n.Store.Sandbox(uid)
	if err != nil {
		return nil, err
	}
	switch rec.Phase {
	case sandbox.Paused, sandbox.Resuming, sandbox.Hibernating, sandbox.Hibernated:
		return nil, asleep(rec)
	}
	if rec.Phase != sandbox.Running {
		return nil, wrongPhase(rec, "it has no processes to ask for")
	}
	return nil, errs.New(errs.GuestSilent, "guest init of sandbox %s does not answer; ask again later", uid).With("uid", uid)
}

func wrongPhase(rec nodestate.Sandbox, what string) error {
	return errs.New(errs.WrongPhase, "sandbox %s is %s: %s", rec.UID, rec.Phase, what).With("uid", rec.UID).With("phase", string(rec.Phase))
}

// errCrash stops an owner where it stands. Only Fault makes one.
type errCrash struct{ point string }

func (e *errCrash) Error() string { return "stopped dead at " + e.point }

// fault is a named fault point.
func (n *Node) fault(point string) error {
	if n.Fault == nil {
		return nil
	}
	if err := n.Fault(point); err != nil {
		return &errCrash{point}
	}
	return nil
}

func crashed(err error) bool {
	var c *errCrash
	return errors.As(err, &c)
}
