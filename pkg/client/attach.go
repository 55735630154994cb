package client

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Bounds of an attachment.
const (
	// inputAhead is how much input may be on its way, below what the server allows.
	inputAhead = 128 << 10
	// attachPatience is how long a lost stream is tried to be taken up again: an agentd that is replaced, or a
	// coordinator that takes over, is away for seconds.
	attachPatience = time.Minute
)

// AttachOptions say what an attachment does.
type AttachOptions struct {
	// Output is where the process's output goes, from where it stands (see Output.From). Nil discards it.
	Output *Output
	// Input makes it the process's writer; an earlier one is ended.
	Input bool
	// Hold makes the process wait for this reader as it would for a terminal, instead of overwriting
	// what it is too slow to read.
	Hold bool
}

// Attachment is a process with somebody at it. It outlives lost connections: output goes on where it
// was, and every byte of input reaches the process once.
type Attachment struct {
	p      *Process
	opts   AttachOptions
	writer string
	cancel context.CancelFunc
	opened chan struct{} // closed once the first stream is open
	done   chan struct{}
	exit   *dormousev1.ProcessExit
	err    error

	mu       sync.Mutex
	poke     chan struct{} // something is to be sent
	moved    chan struct{} // closed, and made anew, when something was acknowledged
	acked    uint64        // the process has all input before this offset
	pending  []byte        // from acked on
	sent     int           // of pending, on the stream in use
	eof      bool
	eofSent  bool
	closed   bool // the process takes no more
	size     *dormousev1.Terminal
	sizeSent bool
}

// Attach follows the process, and writes its input if asked to, until the process ends, the context ends or
// Close. It returns once that has begun. The caller must call Close.
func (p *Process) Attach(ctx context.Context, opts AttachOptions) (*Attachment, error) {
	if opts.Output == nil {
		opts.Output = &Output{}
	}
	a := &Attachment{p: p, opts: opts, writer: uid.New(), opened: make(chan struct{}), done: make(chan struct{}),
		poke: make(chan struct{}, 1), moved: make(chan struct{})}
	ctx, a.cancel = context.WithCancel(ctx)
	go a.run(ctx)
	select {
	case <-a.opened:
		return a, nil
	case <-a.done:
		a.cancel()
		select {
		case <-a.opened: // and over already
			return a, nil
		default:
			return nil, a.err
		}
	}
}

// Wait returns how the process ended, after the last of its output was written; or why it is not
// followed any more, while it may go on. SANDBOX_MOVED names the sandbox in which it does.
func (a *Attachment) Wait() (*dormousev1.ProcessExit, error) {
	<-a.done
	return a.exit, a.err
}

// Done is closed when Wait would return.
func (a *Attachment) Done() <-chan struct{} { return a.done }

// Close leaves the process as it is. Input that was not acknowledged may not reach it: see Flush.
func (a *Attachment) Close() {
	a.cancel()
	<-a.done
}

// Write sends input. It returns once there is room for what may be on its way, before the process has
// it. EPIPE's meaning, that the process takes no more, is WRONG_PHASE.
func (a *Attachment) Write(b []byte) (int, error) {
	total := 0
	for len(b) > 0 {
		n, moved, err := a.take(b)
		if err != nil {
			return total, err
		}
		b, total = b[n:], total+n
		if n > 0 {
			wake(a.poke)
			continue
		}
		select {
		case <-moved:
		case <-a.done:
			return total, a.over()
		}
	}
	return total, nil
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (a *Attachment) over() error {
	if a.err != nil {
		return a.err
	}
	return errs.New(errs.WrongPhase, "the process takes no more input")
}

func (a *Attachment) take(b []byte) (n int, moved <-chan struct{}, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !a.opts.Input:
		return 0, nil, errs.New(errs.InvalidField, "the attachment was made without input")
	case a.closed || a.eof:
		return 0, nil, errs.New(errs.WrongPhase, "the process takes no more input")
	}
	n = min(len(b), inputAhead-len(a.pending))
	a.pending = append(a.pending, b[:n]...)
	return n, a.moved, nil
}

// CloseInput ends the input after what was written: a terminal gets its end-of-file character.
func (a *Attachment) CloseInput() {
	a.mu.Lock()
	a.eof = true
	a.mu.Unlock()
	wake(a.poke)
}

// Feed sends what the reader gives, and at its end, or when it fails, ends the input; not when it fails
// with io.ErrClosedPipe. It returns then, or at the reader's next return after the process has ended.
func (a *Attachment) Feed(r io.Reader) {
	buf := make([]byte, inputChunk)
	for {
		n, err := r.Read(buf)
		if _, werr := a.Write(buf[:n]); werr != nil {
			return // its exit tells
		}
		if errors.Is(err, io.ErrClosedPipe) {
			return
		}
		if err != nil {
			a.CloseInput()
			return
		}
	}
}

// Flush waits until the process has all that was written, and knows the input's end if it was closed.
func (a *Attachment) Flush(ctx context.Context) error {
	for {
		a.mu.Lock()
		all, moved := a.closed || len(a.pending) == 0 && !a.eof, a.moved
		a.mu.Unlock()
		if all {
			return nil
		}
		select {
		case <-moved:
		case <-a.done:
			return a.err
		case <-ctx.Done():
			return errs.From(ctx.Err())
		}
	}
}

// Resize sets the size of the process's terminal, once more after a lost connection. A process that
// has none ends the attachment.
func (a *Attachment) Resize(rows, cols int) {
	a.mu.Lock()
	a.size, a.sizeSent = &dormousev1.Terminal{Rows: int32(min(rows, 1<<16)), Cols: int32(min(cols, 1<<16))}, false
	a.mu.Unlock()
	wake(a.poke)
}

// run follows the process from stream to stream.
func (a *Attachment) run(ctx context.Context) {
	defer close(a.done)
	backoff, lost := firstBackoff, time.Time{}
	for {
		progress, err := a.once(ctx)
		// What was attached to and was paused meanwhile is waited for, as the stream would have.
		paused := a.begun() && errs.Has(err, errs.SandboxPaused) && ctx.Err() == nil
		switch {
		case err == nil || !again(ctx, err) && !paused:
			a.err = err
			return
		case progress:
			backoff, lost = firstBackoff, time.Time{}
		}
		if lost.IsZero() || paused {
			lost = time.Now()
		}
		if time.Since(lost) > attachPatience || wait.For(ctx, backoff/2+rand.N(backoff)) != nil {
			a.err = err
			return
		}
		backoff = min(backoff*3, followBackoff)
	}
}

// once is one stream. Progress says that it was open.
func (a *Attachment) once(ctx context.Context) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := a.p.c.processes.AttachProcess(ctx)
	if err != nil {
		return false, err
	}
	out := a.opts.Output
	resume := a.begun()
	open := &dormousev1.AttachOpen{SandboxUid: a.p.Sandbox, ProcessId: a.p.ID, StdoutOffset: out.stdout, StderrOffset: out.stderr,
		Hold: a.opts.Hold, Input: a.opts.Input, Resume: a.opts.Input && resume}
	if open.GetInput() {
		open.Writer = a.writer
	}
	// A failed send has its reason in what is received.
	if err := stream.Send(&dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	first, err := stream.Recv()
	if err != nil {
		return false, lostReply(err)
	}
	if first.GetOpened() == nil {
		return false, errs.New(errs.InternalError, "the server did not open the stream")
	}
	if err := a.begin(first.GetOpened(), resume); err != nil {
		return true, err
	}
	sender := make(chan struct{})
	defer func() {
		cancel()
		<-sender
	}()
	go func() {
		defer close(sender)
		a.feed(ctx, stream)
	}()
	return true, a.receive(stream)
}

func lostReply(err error) error {
	if errors.Is(err, io.EOF) {
		return errs.New(errs.ReplyLost, "the stream ended before the process did")
	}
	return err
}

func (a *Attachment) begun() bool {
	select {
	case <-a.opened:
		return true
	default:
		return false
	}
}

// begin takes up the input where the process has it.
func (a *Attachment) begin(o *dormousev1.AttachOpened, resumed bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sizeSent, a.eofSent, a.sent = false, false, 0
	if !resumed {
		a.p.Last = o.GetProcess()
		a.acked = o.GetInputOffset()
		a.closed = o.GetInputClosed()
		close(a.opened)
		return nil
	}
	if !a.opts.Input {
		return nil
	}
	if o.GetInputOffset() < a.acked || o.GetInputOffset()-a.acked > uint64(len(a.pending)) {
		return errs.New(errs.InputTaken, "another has written to the process meanwhile").With("process_id", a.p.ID)
	}
	a.acknowledge(&dormousev1.InputState{AcceptedOffset: o.GetInputOffset(), Closed: o.GetInputClosed()})
	return nil
}

// acknowledge is called with mu held.
func (a *Attachment) acknowledge(s *dormousev1.InputState) {
	if s.GetAcceptedOffset() > a.acked {
		n := int(min(s.GetAcceptedOffset()-a.acked, uint64(len(a.pending))))
		a.pending = a.pending[n:]
		a.sent = max(a.sent-n, 0)
		a.acked += uint64(n)
	}
	if s.GetClosed() {
		a.closed, a.pending, a.sent = true, nil, 0
	}
	close(a.moved)
	a.moved = make(chan struct{})
}

// next is what is to be sent now, or nil.
func (a *Attachment) next() *dormousev1.AttachProcessRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.size != nil && !a.sizeSent {
		a.sizeSent = true
		return &dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Resize{Resize: a.size}}
	}
	left := len(a.pending) - a.sent
	if a.closed || left == 0 && (!a.eof || a.eofSent) {
		return nil
	}
	n := min(left, inputChunk)
	c := &dormousev1.InputChunk{Offset: a.acked + uint64(a.sent), Data: append([]byte(nil), a.pending[a.sent:a.sent+n]...)}
	a.sent += n
	if n == left && a.eof {
		c.Eof, a.eofSent = true, true
	}
	return &dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Input{Input: c}}
}

// feed sends what there is to send until the stream ends; why it did is received.
func (a *Attachment) feed(ctx context.Context, stream grpc.BidiStreamingClient[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]) {
	for {
		for m := a.next(); m != nil; m = a.next() {
			if stream.Send(m) != nil {
				return
			}
		}
		select {
		case <-a.poke:
		case <-ctx.Done():
			return
		}
	}
}

func (a *Attachment) receive(stream grpc.BidiStreamingClient[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]) error {
	for {
		m, err := stream.Recv()
		switch {
		case err != nil:
			return lostReply(err)
		case m.GetOutput() != nil:
			if err := a.opts.Output.write(m.GetOutput()); err != nil {
				return err
			}
		case m.GetInput() != nil:
			a.mu.Lock()
			a.acknowledge(m.GetInput())
			a.mu.Unlock()
		case m.GetExit() != nil:
			a.exit = m.GetExit()
			return nil
		}
	}
}
