package runner

import (
	"context"
	"errors"
	"fmt"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// step is one step of making a sandbox. undo is idempotent and safe when do never ran.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error
	// keeps: undo takes something from the runtime, and waits until its absence was observed.
	keeps bool
	// stays: a hibernated sandbox keeps it.
	stays bool
}

// build is what the steps hand to each other.
type build struct {
	// verb names the fault points: "start" or "restore".
	verb string

	main     *Main
	identity Identity
	image    Image
	bundle   Bundle
	binds    []Bind
	spec     *specs.Spec

	// began is when the first step was due, queued how long it and the runtime waited for their turns.
	began  time.Time
	queued time.Duration

	// from is set for a restore.
	from    *checkpoint.Manifest
	fromDir string
	// parked: it is to stand still when it is recorded.
	parked bool
}

// steps is how a sandbox is made, and from the last to the first how it is removed.
func (o *owner) steps(b *build) []step {
	return []step{
		{name: "image", do: b.with(o.holdImage), undo: o.releaseImage, keeps: true, stays: true},
		{name: "volumes", do: b.with(o.attachVolumes), undo: o.detachVolumes, keeps: true, stays: true},
		{name: "folder", do: b.with(o.makeFolder), undo: o.removeFolder, keeps: true, stays: true},
		{name: "network", do: b.with(o.acquireNetwork), undo: o.removeNetwork},
		{name: "spec", do: b.with(o.makeSpec), undo: nothing},
		{name: runtimeStep, do: b.with(o.startRuntime), undo: o.deleteRuntime},
		{name: "guest", do: b.with(o.greetGuest), undo: o.leaveGuest},
		{name: "main", do: b.with(o.startMain), undo: nothing},
		{name: "running", do: b.with(o.recordRunning), undo: nothing},
	}
}

// runtimeStep is the step whose undoing observes that the runtime's side is gone.
const runtimeStep = "runtime"

func nothing(context.Context) error { return nil }

func (b *build) with(fn func(context.Context, *build) error) func(context.Context) error {
	return func(ctx context.Context) error { return fn(ctx, b) }
}

// make runs the steps in order. A step that fails ends it; the error names the step.
func (o *owner) make(ctx context.Context, b *build) error {
	b.began = o.n.Now()
	entrance := o.n.makes
	if b.from != nil {
		entrance = o.n.restores
	}
	var leave func()
	leave, b.queued = o.n.enterTimed(ctx, entrance)
	defer leave()
	for _, s := range o.steps(b) {
		point := b.verb + "." + s.name
		if err := o.n.fault(point + ".before"); err != nil {
			return err
		}
		err := context.Cause(ctx)
		if err == nil {
			began := o.n.Now()
			waited := b.queued
			err = s.do(ctx)
			o.n.measure(b.verb, s.name, o.n.Now().Sub(began)-(b.queued-waited), err)
		}
		if err != nil {
			return inStep(ctx, s.name, err)
		}
		if err := o.n.fault(point + ".after"); err != nil {
			return err
		}
		o.rec.Step = s.name
	}
	return nil
}

// inStep gives an error its envelope and the step. A context that was ended for a reason ends with it.
func inStep(ctx context.Context, name string, err error) error {
	if crashed(err) {
		return err
	}
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, ctx.Err()) {
		err = cause
	}
	e := errs.From(err)
	if e.Details["step"] != "" {
		return e
	}
	return e.With("step", name)
}

// unmake undoes every step from the last to the first and joins the errors. Steps that take something
// from the runtime are passed over while it may still be there.
func (o *owner) unmake(ctx context.Context) error {
	var all []error
	present := false
	list := o.steps(&build{})
	for i := len(list) - 1; i >= 0; i-- {
		s := list[i]
		if err := o.n.fault("delete." + s.name + ".before"); err != nil {
			return err
		}
		if s.keeps && present {
			continue
		}
		err := s.undo(ctx)
		if crashed(err) {
			return err
		}
		if err != nil {
			all = append(all, fmt.Errorf("undo the step %s: %w", s.name, err))
			present = present || s.name == runtimeStep
		}
		if err := o.n.fault("delete." + s.name + ".after"); err != nil {
			return err
		}
	}
	return errors.Join(all...)
}
