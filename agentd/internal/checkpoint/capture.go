package checkpoint

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Machine is the part of a driver that freezes and saves one sandbox.
type Machine interface {
	Pause(ctx context.Context, id string) error
	Save(ctx context.Context, id string, opts runtime.SaveOptions) error
	Resume(ctx context.Context, id string) error
}

// Channel is the part of a guest channel that a freeze needs.
type Channel interface {
	Quiesce(ctx context.Context) error
	Drain(ctx context.Context) error
	Resume(ctx context.Context) error
}

// Subject is the sandbox that is frozen.
type Subject struct {
	ID      string
	Machine Machine
	Channel Channel
	// Still: it was halted before, and stays so. It needs no channel.
	Still bool
}

// NotResumedError says that the sandbox could not be made to run again: it cannot be relied on.
type NotResumedError struct{ Err error }

func (e *NotResumedError) Error() string { return "the sandbox could not be resumed: " + e.Err.Error() }
func (e *NotResumedError) Unwrap() error { return e.Err }

// Frozen is when a sandbox stood still, and for how long.
type Frozen struct {
	At  time.Time
	For time.Duration
}

// Bounds of what happens although the caller's context may have ended.
const (
	resumeTimeout = 60 * time.Second
	// quiesceTimeout is the guest's time to obey, and that to speak again.
	quiesceTimeout = 10 * time.Second
	// quickQuiesce is how much of it a guest gets while others wait for its turn to end.
	quickQuiesce = time.Second
)

// Freeze quiesces the channel, pauses the sandbox, drains what is on its way, runs fn, and makes the
// sandbox run and the channel speak again, whatever failed before. The error is fn's or that of a step;
// a *NotResumedError is in it when the sandbox does not run.
func Freeze(ctx context.Context, s Subject, fn func(ctx context.Context) error) (Frozen, error) {
	return freeze(ctx, s, func(ctx context.Context) (func(), bool, error) {
		if s.Still {
			return func() {}, true, nil
		}
		return func() {}, true, quiesce(ctx, s.Channel, quiesceTimeout)
	}, fn)
}

// Halt quiesces the channel, pauses the sandbox and drains what is on its way, and leaves it so. After an
// error it runs and its channel speaks, but for a *NotResumedError.
func Halt(ctx context.Context, s Subject) error {
	err := quiesce(ctx, s.Channel, quiesceTimeout)
	if err == nil {
		if err = halted(ctx, s); err == nil {
			return nil
		}
		err = resumed(ctx, s, err)
	}
	var lost *NotResumedError
	if errors.As(err, &lost) {
		return err
	}
	return spoken(ctx, s, err)
}

func halted(ctx context.Context, s Subject) error {
	if err := s.Machine.Pause(ctx, s.ID); err != nil {
		return err
	}
	return s.Channel.Drain(ctx)
}

// resumed makes the sandbox run, whatever err is, and adds to it if it does not.
func resumed(ctx context.Context, s Subject, err error) error {
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), resumeTimeout)
	defer cancel()
	if resumeErr := s.Machine.Resume(after, s.ID); resumeErr != nil {
		return errors.Join(err, &NotResumedError{resumeErr})
	}
	return err
}

// spoken makes the channel of a sandbox that runs speak, whatever err is.
func spoken(ctx context.Context, s Subject, err error) error {
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), quiesceTimeout)
	defer cancel()
	if resumeErr := s.Channel.Resume(after); resumeErr != nil && err == nil {
		// The sandbox runs; a channel that does not answer is opened anew by who owns it.
		return resumeErr
	}
	return err
}

func quiesce(ctx context.Context, ch Channel, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return ch.Quiesce(ctx)
}

// freeze is Freeze with a way to quiesce. It tells whether the guest was asked at all, and gives what is to
// be called as soon as the sandbox runs again.
func freeze(ctx context.Context, s Subject, quiet func(context.Context) (leave func(), asked bool, err error), fn func(ctx context.Context) error) (Frozen, error) {
	var frozen Frozen
	leave, asked, err := quiet(ctx)
	if !asked {
		return frozen, err
	}
	if err == nil {
		frozen.At = time.Now()
		err = whilePaused(ctx, s, fn)
		frozen.For = time.Since(frozen.At)
		leave()
	}
	var lost *NotResumedError
	if s.Still || errors.As(err, &lost) {
		return frozen, err
	}
	return frozen, spoken(ctx, s, err)
}

func whilePaused(ctx context.Context, s Subject, fn func(ctx context.Context) error) error {
	if s.Still {
		return fn(ctx)
	}
	err := halted(ctx, s)
	if err == nil {
		err = fn(ctx)
	}
	return resumed(ctx, s, err)
}

// Capturer captures, few sandboxes at a time.
type Capturer struct {
	store  *Store
	slots  chan struct{}
	turns  atomic.Int64 // who has a slot or waits for one
	direct bool
	// slack is added to every estimate: what the runtime's own state takes.
	slack int64
}

// NewCapturer makes one that captures width sandboxes at a time and writes past the page cache if direct.
func NewCapturer(store *Store, width int, direct bool) *Capturer {
	return &Capturer{store: store, slots: make(chan struct{}, max(width, 1)), direct: direct, slack: 16 << 20}
}

// Capture makes the artefact that the manifest describes; it fills in the files, the sizes, the freeze, and
// what took how long, after an error too. estimate is how many bytes the memory may take. DISK_FULL before anything is touched when
// there is no room. After an error the sandbox runs (but for a *NotResumedError) and nothing of the
// artefact is left. A sandbox that stood still before stands still after it, whatever came of it.
func (c *Capturer) Capture(ctx context.Context, s Subject, m *Manifest, estimate int64) (err error) {
	began := time.Now()
	defer func() { m.Service = time.Since(began) - m.Queued }()
	release, err := c.store.reserve(estimate + c.slack)
	if err != nil {
		return err
	}
	defer release()
	dir, err := c.store.stage(m.UID)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			// Delete, because the rename may have happened although its sync failed.
			err = errors.Join(err, c.store.Delete(m.UID))
		}
	}()
	quiet := func(ctx context.Context) (func(), bool, error) { return c.quiet(ctx, s.Channel, &m.Queued) }
	if s.Still {
		quiet = func(ctx context.Context) (func(), bool, error) {
			leave, err := c.enter(ctx, &m.Queued)
			return leave, err == nil, err
		}
	}
	frozen, err := freeze(ctx, s, quiet, func(ctx context.Context) error {
		return s.Machine.Save(ctx, s.ID, runtime.SaveOptions{Dir: dir, Direct: c.direct})
	})
	if err != nil {
		return err
	}
	m.Version, m.FrozenAt, m.Freeze = ManifestVersion, frozen.At.UTC(), frozen.For
	if m.Files, err = c.store.inspect(m.UID, dir); err != nil {
		return err
	}
	m.SizeBytes = 0
	for _, f := range m.Files {
		m.SizeBytes += f.SizeBytes
	}
	return c.store.publish(m)
}

// Width is how many are captured at a time.
func (c *Capturer) Width() int { return cap(c.slots) }

// Busy tells whether something is being captured, or waits for its turn.
func (c *Capturer) Busy() bool { return c.turns.Load() > 0 }

// enter waits for one of the slots, and adds to queued how long.
func (c *Capturer) enter(ctx context.Context, queued *time.Duration) (leave func(), err error) {
	asked := time.Now()
	defer func() { *queued += time.Since(asked) }()
	c.turns.Add(1)
	select {
	case c.slots <- struct{}{}:
		return func() {
			<-c.slots
			c.turns.Add(-1)
		}, nil
	case <-ctx.Done():
		c.turns.Add(-1)
		return nil, errs.From(context.Cause(ctx)).WithOutcome(errs.NotStarted, errs.SameOperation)
	}
}

// quiet gives a slot with the channel quiesced in it; none after an error. A guest that is slow to obey, or
// does not mean to, waits outside: it must not keep the slots from the captures of others.
func (c *Capturer) quiet(ctx context.Context, ch Channel, queued *time.Duration) (leave func(), asked bool, err error) {
	leave, err = c.enter(ctx, queued)
	if err != nil {
		return nil, false, err
	}
	quick, cancel := context.WithTimeout(ctx, quickQuiesce)
	defer cancel()
	if err = ch.Quiesce(quick); err == nil {
		return leave, true, nil
	}
	leave()
	if quick.Err() == nil || ctx.Err() != nil {
		return nil, true, err // not for want of time
	}
	if err := quiesce(ctx, ch, quiesceTimeout-quickQuiesce); err != nil {
		return nil, true, err
	}
	leave, err = c.enter(ctx, queued)
	return leave, true, err
}
