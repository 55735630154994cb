package runner

import (
	"context"
	"encoding/json"
	"strconv"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Command is who asks for a mutation, and in whose name.
type Command struct {
	Coordinator, Session fence.Epoch
	ID                   string
	// Kind is the method, Digest that of its body without epochs and request ids.
	Kind, Digest string
	// Repeats: done again after it succeeded it finds in the records that it was done, and answers the
	// same. So its result need not be durable before it is given.
	Repeats bool
}

// Commands admits mutations: it refuses who has lost ownership, and answers a command that was
// finished, or is going on, without doing anything twice.
//
// Results are kept for successes and for failures that would be the same again (retry never). A failure that may
// pass leaves no result, and the same command id is run again.
type Commands struct {
	store *nodestate.Store
	// session is the node's current session, 0 for none.
	session func() fence.Epoch

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	running map[string]*flight
}

// flight is a command that is going on. result and err may be read once done is closed.
type flight struct {
	kind, digest string
	done         chan struct{}
	result       []byte
	err          error
}

// NewCommands makes one over the records.
func NewCommands(store *nodestate.Store, session func() fence.Epoch) *Commands {
	c := &Commands{store: store, session: session, running: make(map[string]*flight)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	return c
}

// Close ends the commands that are going on and waits for them.
func (c *Commands) Close() {
	c.cancel(errClosing)
	c.wg.Wait()
}

// Do admits the command and gives its result: a kept one, that of the same command that is going on,
// or run's. run goes on when ctx is cancelled, within ctx's deadline, and its result is kept; what was not begun by
// then is not begun.
func (c *Commands) Do(ctx context.Context, cmd Command, run func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	if cmd.ID == "" || len(cmd.ID) > 256 {
		return nil, errs.New(errs.InvalidField, "a command needs an id of 1 to 256 bytes").With("field", "command.command_id")
	}
	if err := c.Admit(ctx, cmd); err != nil {
		return nil, err
	}
	f, err := c.join(ctx, cmd, run)
	if err != nil {
		return nil, err
	}
	select {
	case <-f.done:
		return f.result, f.err
	case <-ctx.Done():
		return nil, errs.From(ctx.Err())
	}
}

// welcomeTime bounds the wait for a session that the coordinator speaks of and this node is just about
// to enter: its Welcome is on the way, on another connection.
const welcomeTime = 2 * time.Second

// Admit checks the epochs alone; it persists a newer coordinator's epoch before anything is done in its name.
func (c *Commands) Admit(ctx context.Context, cmd Command) error {
	if err := c.store.AdmitCoordinator(cmd.Coordinator); err != nil {
		return err
	}
	fault.At("command.admit.after")
	bound := time.NewTimer(welcomeTime)
	defer bound.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for waiting := true; ; {
		now := c.session()
		switch verdict := fence.Check(now, cmd.Session); {
		case verdict == fence.Current:
			return nil
		case verdict == fence.Stale || !waiting:
			return errs.New(errs.Fenced, "the session epoch %d is not this node's, which is %d; use the current session", cmd.Session, now).
				With("epoch", strconv.FormatUint(uint64(cmd.Session), 10)).With("current_epoch", strconv.FormatUint(uint64(now), 10))
		}
		select {
		case <-look.C:
		case <-bound.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
	}
}

// join gives the flight of the command, and starts it if there is none.
func (c *Commands) join(ctx context.Context, cmd Command, run func(ctx context.Context) ([]byte, error)) (*flight, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.running[cmd.ID]; f != nil {
		if f.kind != cmd.Kind || f.digest != cmd.Digest {
			return nil, errs.New(errs.OperationBodyMismatch, "the command id %s is in use with another body", cmd.ID)
		}
		return f, nil
	}
	if c.ctx.Err() != nil {
		return nil, errClosing
	}
	f := &flight{kind: cmd.Kind, digest: cmd.Digest, done: make(chan struct{})}
	c.running[cmd.ID] = f
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		work, cancel := budget(context.WithValue(ctx, callerKey{}, ctx), c.ctx)
		defer cancel()
		f.result, f.err = c.runOnce(work, cmd, run)
		c.mu.Lock()
		delete(c.running, cmd.ID)
		c.mu.Unlock()
		close(f.done)
	}()
	return f, nil
}

func (c *Commands) runOnce(ctx context.Context, cmd Command, run func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	kept, ok, err := c.store.Command(cmd.ID, cmd.Kind, cmd.Digest)
	if err != nil {
		return nil, err
	}
	if ok {
		return replay(kept)
	}
	if err := left(ctx); err != nil {
		return nil, err
	}
	result, err := run(ctx)
	if err != nil && !final(err) {
		return nil, err
	}
	keep := nodestate.Command{ID: cmd.ID, Kind: cmd.Kind, Digest: cmd.Digest, Result: result}
	if err != nil {
		if keep.Error, err = json.Marshal(errs.From(err)); err != nil {
			return nil, err
		}
	}
	fault.At("command.keep.before")
	if cmd.Repeats && len(keep.Error) == 0 {
		c.store.PutCommandLater(keep)
		fault.At("command.keep.after")
		return result, nil
	}
	if err := c.store.PutCommand(keep); err != nil {
		// It was done, whatever the store says of itself: only the same command id may be asked again.
		return nil, errs.From(err).WithOutcome(errs.Unknown, errs.SameOperation)
	}
	fault.At("command.keep.after")
	return replay(keep)
}

type callerKey struct{}

// left is an error once nobody waits for what the command is to give. It is asked where something begins: who gave
// a start up may have deleted the sandbox already, and a start that was held up must not come after that. A call is
// seen to be given up before any later call of its connection is served.
func left(ctx context.Context) error {
	caller, ok := ctx.Value(callerKey{}).(context.Context)
	if !ok || caller.Err() == nil {
		return nil
	}
	return errs.From(caller.Err()).WithOutcome(errs.NotStarted, errs.SameOperation)
}

func final(err error) bool {
	e := errs.From(err)
	return e.Retry == errs.Never && e.Outcome != errs.Unknown
}

func replay(cmd nodestate.Command) ([]byte, error) {
	if len(cmd.Error) == 0 {
		return cmd.Result, nil
	}
	var e errs.Error
	if err := json.Unmarshal(cmd.Error, &e); err != nil {
		return nil, errs.Wrap(err, errs.StateDamaged, "the kept result of command %s cannot be read", cmd.ID)
	}
	return nil, &e
}
