package guest

import (
	"context"
	"errors"
	"io"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Running is a process that was started, with both outputs followed from their beginning until it ends, and its end waited for. All four
// are asked for in one write to the guest, so that it has them in one turn and is not woken again while the process begins. Its methods may
// not be called concurrently.
type Running struct {
	// Process is as it was when it had started.
	Process Process

	c       *Conn
	ready   chan struct{} // of both outputs
	outputs [2]*OutputStream
	turn    int
	wait    *call
	waiting uint32 // the wait's stream; 0 once it was answered
}

// StartFollowed is Start of a process that waits for its reader, which is what it gives. The process is not ended by an error, nor by Close.
func (c *Conn) StartFollowed(ctx context.Context, r StartRequest) (*Running, error) {
	r.HoldOutput = true
	start := newCall(guestwire.TypeStarted)
	run := &Running{c: c, ready: make(chan struct{}, 1), wait: newCall(guestwire.TypeExited)}
	stream, frames, err := run.requests(start, r)
	if err == nil {
		err = c.queue(ctx, frames)
	}
	if err != nil { // nothing was sent
		c.unregister(stream)
		run.forget()
		return nil, err
	}
	select {
	case res := <-start.ch:
		c.unregister(stream)
		if run.Process, err = started(res, r.ID); err != nil {
			run.refused(ctx, err)
			run.Close()
			return nil, err
		}
		return run, nil
	case <-ctx.Done():
		c.abandon(stream)
		run.Close()
		return nil, errs.From(ctx.Err())
	}
}

// requests registers who takes the answers, and gives the frames.
func (r *Running) requests(start *call, req StartRequest) (stream uint32, frames []byte, err error) {
	ask := func(to receiver, m guestwire.Message) (stream uint32) {
		if err != nil {
			return 0
		}
		if stream, err = r.c.register(to); err != nil {
			return 0
		}
		var ok bool
		if frames, ok = guestwire.AppendMessage(frames, r.c.ch, stream, m); !ok {
			err = tooLarge()
		}
		return stream
	}
	stream = ask(start, req.message())
	for i := range r.outputs {
		which := Stdout + Output(i)
		s := &OutputStream{c: r.c, ready: r.ready, allowed: uint64(r.c.window)}
		s.stream = ask(s, &guestwire.OutputOpen{
			ProcessID: req.ID, Output: uint32(which), Follow: uint32(UntilExit), Credit: uint32(r.c.window), Hold: true,
		})
		r.outputs[i] = s
	}
	r.waiting = ask(r.wait, &guestwire.Wait{ProcessID: req.ID})
	return stream, frames, err
}

// forget is Close where the guest knows nothing.
func (r *Running) forget() {
	for _, s := range r.outputs {
		r.c.unregister(s.stream)
	}
	r.c.unregister(r.waiting)
}

// refused takes the answers to what was asked for together with a start that was refused: there is no such process. Where there is another of that
// id, they are not errors; then nothing is waited for.
func (r *Running) refused(ctx context.Context, why error) {
	if errs.Has(why, errs.OperationBodyMismatch) || errs.Has(why, errs.InternalError) || errs.Has(why, errs.GuestSilent) {
		return
	}
	for _, s := range r.outputs {
		_, _ = s.Next(ctx)
	}
	_, _ = r.Wait(ctx)
}

// Next returns the next piece of either output, or io.EOF when all that the process itself wrote was returned. A ctx that ends changes nothing.
func (r *Running) Next(ctx context.Context) (Output, Chunk, error) {
	for {
		ended := 0
		for range r.outputs {
			r.turn = 1 - r.turn
			chunk, ok, err := r.outputs[r.turn].take()
			switch {
			case ok:
				return Stdout + Output(r.turn), chunk, nil
			case errors.Is(err, io.EOF):
				ended++
			case err != nil:
				return 0, Chunk{}, err
			}
		}
		if ended == len(r.outputs) {
			return 0, Chunk{}, io.EOF
		}
		select {
		case <-r.ready:
		case <-ctx.Done():
			return 0, Chunk{}, errs.From(ctx.Err())
		}
	}
}

// Wait waits until the process has ended and returns how, once.
func (r *Running) Wait(ctx context.Context) (Exit, error) {
	select {
	case res := <-r.wait.ch:
		r.c.unregister(r.waiting)
		r.waiting = 0
		return exited(res)
	case <-ctx.Done():
		return Exit{}, errs.From(ctx.Err())
	}
}

// Close ends the following. It may be called again.
func (r *Running) Close() {
	for _, s := range r.outputs {
		s.Close()
	}
	if r.waiting != 0 {
		r.c.abandon(r.waiting)
		r.waiting = 0
	}
}
