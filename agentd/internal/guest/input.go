package guest

import (
	"context"
	"sync"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// A process's input has one writer at a time. Guest init knows who, so that one who comes back
// after a lost connection, or to another agentd, learns whether the input is still its own.

// input is the open input stream of a process. turn is held by the one who writes.
type input struct {
	turn   chan struct{}
	ready  chan struct{}
	stream uint32
	writer uint64
	sent   uint64

	mu    sync.Mutex
	known bool
	state guestwire.StdinState
	err   error
}

func (in *input) deliver(t guestwire.Type, payload []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch t {
	case guestwire.TypeStdinState:
		var m guestwire.StdinState
		if guestwire.Unmarshal(payload, &m) != nil {
			return
		}
		in.state, in.known = m, true
	case guestwire.TypeError:
		in.err = guestError(payload)
	default:
		return
	}
	in.signal()
}

func (in *input) broken(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.err == nil {
		in.err = err
	}
	in.signal()
}

func (in *input) signal() {
	select {
	case in.ready <- struct{}{}:
	default:
	}
}

// await waits until the state is what is looked for.
func (in *input) await(ctx context.Context, good func(guestwire.StdinState) bool) (guestwire.StdinState, error) {
	for {
		in.mu.Lock()
		state, known, err := in.state, in.known, in.err
		in.mu.Unlock()
		switch {
		case err != nil:
			return state, err
		case known && good(state):
			return state, nil
		}
		select {
		case <-in.ready:
		case <-ctx.Done():
			return state, errs.From(ctx.Err())
		}
	}
}

// takeInput gives the caller the process's input stream, opened for the writer if need be; with
// resume only if nobody else has opened it since the writer did. The caller must call giveInput.
func (c *Conn) takeInput(ctx context.Context, id string, writer uint64, resume bool) (*input, error) {
	var in *input
	for current := false; !current; {
		c.mu.Lock()
		in = c.inputs[id]
		if in == nil {
			in = &input{turn: make(chan struct{}, 1), ready: make(chan struct{}, 1)}
			c.inputs[id] = in
		}
		c.mu.Unlock()
		select {
		case in.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, notSent(ctx)
		case <-c.done:
			return nil, c.failure()
		}
		c.mu.Lock()
		// Where it failed while this waited, what comes now is another stream.
		current = c.inputs[id] == in
		c.mu.Unlock()
		if !current {
			<-in.turn
		}
	}
	err := c.openInput(ctx, id, in, writer, resume)
	if err != nil {
		c.giveInput(id, in, err)
		return nil, err
	}
	return in, nil
}

func (c *Conn) openInput(ctx context.Context, id string, in *input, writer uint64, resume bool) error {
	if in.stream != 0 {
		if in.writer == writer {
			return nil
		}
		c.abandon(in.stream)
		in.forget()
	}
	stream, err := c.register(in)
	if err != nil {
		return err
	}
	in.stream, in.writer = stream, writer
	if err := c.send(ctx, stream, &guestwire.StdinOpen{ProcessID: id, Writer: writer, Resume: resume}); err != nil {
		return err
	}
	state, err := in.await(ctx, func(guestwire.StdinState) bool { return true })
	in.sent = state.AcceptedOffset
	return err
}

// forget makes the stream one that is not open.
func (in *input) forget() {
	in.mu.Lock()
	in.known, in.state = false, guestwire.StdinState{}
	in.mu.Unlock()
	in.stream = 0
}

// letGo tells whether a stream is not worth keeping: its input is closed for good, or there are more
// streams than a guest has processes.
func (c *Conn) letGo(in *input) bool {
	in.mu.Lock()
	closed := in.state.Closed
	in.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return closed || len(c.inputs) > maxInputs
}

// giveInput lets the next one write. After an error the stream is opened anew, which finds out
// what the guest accepted.
func (c *Conn) giveInput(id string, in *input, err error) {
	if err != nil || c.letGo(in) {
		c.mu.Lock()
		if c.inputs[id] == in {
			delete(c.inputs, id)
		}
		c.mu.Unlock()
		if in.stream != 0 {
			c.abandon(in.stream)
		}
	}
	<-in.turn
}

// WriteStdin writes to the process's input and returns once guest init has taken all of it, or how
// much it took. A process that does not read holds up the caller, until ctx ends, and nobody else. WRONG_PHASE
// when the input is closed.
func (c *Conn) WriteStdin(ctx context.Context, id string, data []byte) (int, error) {
	in, err := c.takeInput(ctx, id, 0, false)
	if err != nil {
		return 0, err
	}
	base := in.sent
	err = c.writeInput(ctx, in, data)
	taken := max(in.accepted(), base) - base
	c.giveInput(id, in, err)
	return int(min(taken, uint64(len(data)))), err
}

func (in *input) accepted() uint64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.state.AcceptedOffset
}

func (c *Conn) writeInput(ctx context.Context, in *input, data []byte) error {
	for len(data) > 0 {
		state, err := in.await(ctx, func(s guestwire.StdinState) bool { return s.Closed || s.LimitOffset > in.sent })
		if err != nil {
			return err
		}
		if state.Closed {
			return errClosedInput()
		}
		n := min(uint64(len(data)), state.LimitOffset-in.sent, guestwire.MaxPayload-64)
		if err := c.send(ctx, in.stream, &guestwire.StdinData{Offset: in.sent, Data: data[:n]}); err != nil {
			return err
		}
		in.sent += n
		data = data[n:]
	}
	state, err := in.await(ctx, func(s guestwire.StdinState) bool { return s.Closed || s.AcceptedOffset >= in.sent })
	if err == nil && state.AcceptedOffset < in.sent {
		err = errClosedInput()
	}
	return err
}

func errClosedInput() error {
	return errs.New(errs.WrongPhase, "the process has no open input: it was closed, the process ended, or it was started without one")
}

// CloseStdin closes the process's input after what was written to it: the process reads the end.
// Closing a closed input is no error.
func (c *Conn) CloseStdin(ctx context.Context, id string) error {
	in, err := c.takeInput(ctx, id, 0, false)
	if err != nil {
		return err
	}
	err = c.closeInput(ctx, in)
	c.giveInput(id, in, err)
	return err
}

func (c *Conn) closeInput(ctx context.Context, in *input) error {
	if err := c.send(ctx, in.stream, &guestwire.StdinClose{Offset: in.sent}); err != nil {
		return err
	}
	_, err := in.await(ctx, func(s guestwire.StdinState) bool { return s.Closed })
	return err
}

// InputState is how far a process's input has come.
type InputState struct {
	// Accepted counts the bytes that guest init has taken for it.
	Accepted uint64
	// Closed says that it takes no more.
	Closed bool
}

func (in *input) report() InputState {
	in.mu.Lock()
	defer in.mu.Unlock()
	return InputState{Accepted: in.state.AcceptedOffset, Closed: in.state.Closed}
}

// OpenStdin makes writer, which is not 0, the one who writes the process's input; with resume only if
// nobody else became that since writer did, else INPUT_TAKEN.
func (c *Conn) OpenStdin(ctx context.Context, id string, writer uint64, resume bool) (InputState, error) {
	in, err := c.takeInput(ctx, id, writer, resume)
	if err != nil {
		return InputState{}, err
	}
	state := in.report()
	c.giveInput(id, in, nil)
	return state, nil
}

// WriteStdinAt writes for a writer of OpenStdin, from the offset that was accepted last, and with eof
// closes the input. It is INPUT_TAKEN when another became the writer. An input that is closed, or
// closes meanwhile, is no error: the state says so, and how much was taken before.
func (c *Conn) WriteStdinAt(ctx context.Context, id string, writer, offset uint64, data []byte, eof bool) (InputState, error) {
	in, err := c.takeInput(ctx, id, writer, true)
	if err != nil {
		return InputState{}, err
	}
	if state := in.report(); !state.Closed && offset != in.sent {
		c.giveInput(id, in, nil)
		return state, errs.New(errs.InvalidField, "input at offset %d does not go on at %d, where the last ended", offset, in.sent).With("field", "input.offset")
	}
	err = c.writeInput(ctx, in, data)
	if err == nil && eof {
		err = c.closeInput(ctx, in)
	}
	state := in.report()
	if errs.Has(err, errs.WrongPhase) {
		err = nil
	}
	c.giveInput(id, in, err)
	return state, err
}
