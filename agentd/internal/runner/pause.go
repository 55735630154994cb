package runner

import (
	"context"
	"errors"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// live tells whether there are processes of a sandbox in this phase: their end is its end.
func live(p sandbox.Phase) bool {
	return p == sandbox.Running || p == sandbox.Paused || p == sandbox.Resuming || p == sandbox.Hibernating
}

// Pause freezes a running sandbox in memory, and returns when it stands still and that is recorded. Pausing a
// paused one succeeds. After any error it runs on.
func (n *Node) Pause(ctx context.Context, uid string) (nodestate.Sandbox, error) {
	return n.turn(ctx, uid, func(ctx context.Context, o *owner) error {
		if o.rec.Phase == sandbox.Paused && o.stands() {
			return nil
		}
		if err := o.mustRun(); err != nil {
			return err
		}
		return because(ctx, o.pause(ctx))
	})
}

// Resume ends a pause or a hibernation, and returns when the sandbox runs. Resuming a running one succeeds. After an error
// a hibernated sandbox is Hibernated.
func (n *Node) Resume(ctx context.Context, uid string) (nodestate.Sandbox, error) {
	return n.turn(ctx, uid, func(ctx context.Context, o *owner) error {
		switch o.rec.Phase {
		case sandbox.Running:
			return nil
		case sandbox.Hibernated:
			return because(ctx, o.wake(ctx))
		case sandbox.Paused, sandbox.Resuming:
			return because(ctx, o.resume(ctx))
		}
		return wrongPhase(o.rec, "only a paused or hibernated sandbox can be resumed")
	})
}

// turn runs a change of a sandbox that is there, and gives what is recorded afterwards.
func (n *Node) turn(ctx context.Context, uid string, fn func(context.Context, *owner) error) (nodestate.Sandbox, error) {
	return doFor(ctx, n, uid, true, func(ctx context.Context, o *owner) (nodestate.Sandbox, error) {
		if !o.exists {
			return nodestate.Sandbox{}, noSandbox(uid)
		}
		err := fn(ctx, o)
		return o.rec, err
	})
}

func noSandbox(uid string) error {
	return errs.New(errs.ObjectNotFound, "this node has no sandbox %s", uid).With("kind", "sandbox").With("uid", uid)
}

// asleep is what who wants something of a paused sandbox is told.
func asleep(rec nodestate.Sandbox) error {
	return errs.New(errs.SandboxPaused, "sandbox %s is %s: resume it first", rec.UID, rec.Phase).With("uid", rec.UID).With("phase", string(rec.Phase))
}

// pause records the intent (phase Paused, with a freeze that is going on), makes the sandbox stand still, and
// records that it does.
func (o *owner) pause(ctx context.Context) error {
	g := o.openGuest()
	if g == nil {
		return o.silent()
	}
	rec := o.rec
	rec.Phase, rec.Capture = sandbox.Paused, &nodestate.Capture{Began: o.n.Now().UTC()}
	if err := o.put(rec); err != nil {
		return err
	}
	if err := o.n.fault("pause.intent.after"); err != nil {
		return err
	}
	o.stand(true) // calls are refused from now on: they would wait for the resume
	err := checkpoint.Halt(ctx, checkpoint.Subject{ID: o.uid, Machine: o.n.Driver, Channel: g})
	var lost *checkpoint.NotResumedError
	if errors.As(err, &lost) {
		return o.loseFrozen(ctx, err)
	}
	if err == nil {
		if err := o.n.fault("pause.frozen.after"); err != nil {
			return err
		}
		rec = o.rec
		rec.Capture = nil
		if err = o.observe(rec); err == nil {
			return o.n.fault("pause.record.after")
		}
	}
	// It runs, or is made to.
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return errors.Join(err, o.resume(after))
}

// resume makes the sandbox run and its guest speak, and records that it does. A guest that does not answer is asked again
// later; the sandbox counts as running.
func (o *owner) resume(ctx context.Context) error { return o.resumeAs(ctx, o.rec) }

// resumeAs is resume with a record that says more than the one before: what it says and the intent (phase Resuming) are one write. A guest that
// is to take a new identity has done so before the sandbox counts as running.
func (o *owner) resumeAs(ctx context.Context, rec nodestate.Sandbox) error {
	rec.Phase = sandbox.Resuming
	if err := o.put(rec); err != nil {
		return err
	}
	if err := o.n.fault("resume.intent.after"); err != nil {
		return err
	}
	// It is not left half way because a caller has no time any more.
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	verb, claimed := "resume", o.claiming()
	if claimed {
		verb = "claim"
	}
	if err := o.measured(verb, runtimeStep, func() error { return o.n.Driver.Resume(after, o.uid) }); err != nil {
		return o.loseFrozen(after, &checkpoint.NotResumedError{Err: err})
	}
	if err := o.n.fault("resume.thawed.after"); err != nil {
		return err
	}
	rec = o.rec
	rec.Phase, rec.Capture, rec.Parked = sandbox.Running, nil, false
	if claimed {
		if err := o.measured(verb, "guest", func() error { return o.tell(after) }); err != nil {
			return err
		}
		rec.Claim = &nodestate.Claim{CommandID: rec.Claim.CommandID, Told: true}
	}
	if err := o.observe(rec); err != nil {
		return err
	}
	if err := o.n.fault("resume.record.after"); err != nil {
		return err
	}
	if claimed { // its channel is open
		o.watch()
		o.stand(false)
		return nil
	}
	o.speak(after)
	return nil
}

// measured does a step and tells how long it took.
func (o *owner) measured(verb, step string, do func() error) error {
	began := o.n.Now()
	err := do()
	o.n.measure(verb, step, o.n.Now().Sub(began), err)
	return err
}

// speak opens the channel of a sandbox that runs again to everybody, and watches.
func (o *owner) speak(ctx context.Context) {
	var err error
	if g := o.openGuest(); g == nil || ended(g) {
		err = o.reopen(ctx)
	} else {
		hello, cancel := context.WithTimeout(ctx, helloTimeout)
		defer cancel()
		err = g.Resume(hello)
		o.watch()
	}
	o.stand(false)
	if err != nil {
		o.log.Warn("guest init does not answer after a resume; trying again later", "error", err)
		o.again(o.reopen)
	}
}

func ended(g Guest) bool {
	select {
	case <-g.Done():
		return true
	default:
		return false
	}
}

// loseFrozen ends a sandbox that could not be made to run again: it is not to be relied on.
func (o *owner) loseFrozen(ctx context.Context, err error) error {
	o.stand(false)
	return errors.Join(err, o.endLost(ctx, "the sandbox could not be resumed and was ended"))
}

// settle brings what is found of a paused sandbox, or of a pause or resume that a crash interrupted, to its end. found is what the
// runtime says.
func (o *owner) settle(ctx context.Context, found runtime.Phase) error {
	switch {
	case o.rec.Phase == sandbox.Resuming:
		return o.resume(ctx)
	case found == runtime.Paused && o.rec.Capture == nil:
		o.stand(true)
		o.watch() // its channel is opened by the resume
		return nil
	}
	// What lies in its channel is not known: it runs for the moment in which the guest is asked to be quiet.
	if err := o.n.Driver.Resume(ctx, o.uid); err != nil {
		return o.loseFrozen(ctx, &checkpoint.NotResumedError{Err: err})
	}
	if err := o.n.fault("recover.resume.after"); err != nil {
		return err
	}
	if err := o.openChannel(ctx); err != nil {
		return errors.Join(err, o.resume(ctx))
	}
	return o.pause(ctx)
}

// still is a sandbox that stands still already, and stays so, as who captures it sees it.
func (o *owner) still() checkpoint.Subject {
	return checkpoint.Subject{ID: o.uid, Machine: faultyMachine{o.n}, Still: true}
}

func (o *owner) silent() error {
	return errs.New(errs.GuestSilent, "guest init of sandbox %s does not answer; ask again later", o.uid).With("uid", o.uid)
}

// stand notes whether the sandbox stands still, for who asks for its channel.
func (o *owner) stand(still bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.standing = still
}

func (o *owner) stands() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.standing
}
