package api

import (
	"context"
	"errors"
	"hash/fnv"
	"io"
	"sync"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// An attachment is one AttachProcess stream. Four parties share it:
//
//	receive   takes messages: input into a bounded queue, the rest done at once, so that a resize and a
//	          signal reach a process that does not read
//	write     takes the queue to guest init and acknowledges
//	read      copies both outputs, each from its offset
//	run       owns the others, sends opened first and exit last
//
// Nothing of it is kept: after this node's agentd was replaced, or the sandbox was restored, offsets and
// the writer's name say where to go on.

// Limits of what a client may send.
const (
	maxInputChunk  = 64 << 10
	maxInputAhead  = 256 << 10
	maxInputChunks = 1024 // however small they are
	maxWriterName  = 64
)

type attachStream = grpc.BidiStreamingServer[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]

type attachment struct {
	s      *Processes
	stream attachStream
	open   *dormousev1.AttachOpen
	conn   *guest.Conn
	writer uint64

	input chan *dormousev1.InputChunk
	ahead atomic.Int64 // bytes that are not acknowledged
	end   uint64       // where the next piece begins
	ended bool

	sending sync.Mutex
}

// AttachProcess implements ProcessService.
func (s *Processes) AttachProcess(stream attachStream) error {
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		err = errs.New(errs.InvalidField, "open: the first message opens the stream").With("field", "open")
	}
	if err != nil {
		return err
	}
	a := &attachment{s: s, stream: stream, open: first.GetOpen(), input: make(chan *dormousev1.InputChunk, maxInputChunks)}
	if err := a.check(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	err = a.run(ctx, cancel)
	if cause := context.Cause(ctx); err != nil && stream.Context().Err() == nil && cause != nil {
		return cause // why it was ended says more than that it was
	}
	return err
}

func (a *attachment) check() error {
	if a.open == nil {
		return errs.New(errs.InvalidField, "open: the first message opens the stream").With("field", "open")
	}
	if a.open.GetProcessId() == "" {
		return errs.New(errs.InvalidField, "open.process_id: name a process").With("field", "open.process_id")
	}
	if err := first(checkUID("open.sandbox_uid", a.open.GetSandboxUid()), checkProcessID(a.open.GetProcessId())); err != nil {
		return err
	}
	if !a.open.GetInput() {
		return nil
	}
	name := a.open.GetWriter()
	if name == "" || len(name) > maxWriterName || checkProcessID(name) != nil {
		return errs.New(errs.InvalidField, "open.writer: 1 to %d printable characters", maxWriterName).With("field", "open.writer")
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	a.writer = h.Sum64() | 1
	return nil
}

func (a *attachment) send(r *dormousev1.AttachProcessResponse) error {
	a.sending.Lock()
	defer a.sending.Unlock()
	return a.stream.Send(r)
}

func (a *attachment) sendOutput(c *dormousev1.OutputChunk) error {
	return a.send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Output{Output: c}})
}

func (a *attachment) sendExit(e *dormousev1.ProcessExit) error {
	return a.send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Exit{Exit: e}})
}

// run serves until the process has ended, the client has gone, or another takes its place as writer.
func (a *attachment) run(ctx context.Context, cancel context.CancelCauseFunc) error {
	uid, id := a.open.GetSandboxUid(), a.open.GetProcessId()
	r := &reader{s: a.s, sandboxUID: uid, processID: id, hold: a.open.GetHold(), emit: a.sendOutput,
		offsets: map[guest.Output]uint64{guest.Stdout: a.open.GetStdoutOffset(), guest.Stderr: a.open.GetStderrOffset()}}
	exit, err := a.follow(ctx, cancel, r)
	if err == nil {
		return a.sendExit(exit)
	}
	f, err := a.s.ended(uid, id, err)
	if err != nil {
		return err
	}
	if a.conn == nil { // it had ended before
		opened := &dormousev1.AttachOpened{Process: finalProcess(f), InputClosed: true}
		if err := a.send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Opened{Opened: opened}}); err != nil {
			return err
		}
	}
	if err := r.rest(f); err != nil {
		return err
	}
	return a.sendExit(finalExit(f))
}

// follow opens what the client asked for and reads until the process has ended.
func (a *attachment) follow(ctx context.Context, cancel context.CancelCauseFunc, r *reader) (*dormousev1.ProcessExit, error) {
	conn, err := a.s.Sandboxes.Channel(r.sandboxUID)
	if err != nil {
		return nil, err
	}
	p, err := conn.Get(ctx, r.processID)
	if err != nil {
		return nil, err
	}
	opened := &dormousev1.AttachOpened{Process: ProcessToProto(p)}
	if a.open.GetInput() {
		release, err := a.s.writers.claim(r.sandboxUID, r.processID, a.writer, a.open.GetResume(), cancel)
		if err != nil {
			return nil, err
		}
		defer release()
		state, err := conn.OpenStdin(ctx, r.processID, a.writer, a.open.GetResume())
		if err != nil {
			return nil, err
		}
		opened.InputOffset, opened.InputClosed = state.Accepted, state.Closed
		a.end = state.Accepted
	}
	a.conn = conn
	if err := a.send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Opened{Opened: opened}}); err != nil {
		return nil, err
	}
	// It ends with the stream, which gRPC ends when the handler has returned: nobody can wait for it before.
	go func() {
		if err := a.receive(ctx); err != nil {
			cancel(err)
		}
	}()
	// What is still to be written when the process has ended is not wanted.
	writing, stop := context.WithCancel(ctx)
	written := make(chan struct{})
	defer func() {
		stop()
		<-written
	}()
	go func() {
		defer close(written)
		if err := a.write(writing); err != nil && writing.Err() == nil {
			cancel(err)
		}
	}()
	return r.read(ctx, conn, true)
}

// receive takes what the client sends until it says no more.
func (a *attachment) receive(ctx context.Context) error {
	id := a.open.GetProcessId()
	for {
		m, err := a.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case m.GetInput() != nil:
			err = a.queue(m.GetInput())
		case m.GetResize() != nil:
			var size *guest.Size
			if size, err = sizeOf("resize", m.GetResize()); err == nil {
				err = a.conn.Resize(ctx, id, *size)
			}
		case m.GetSignal() != nil:
			sig := m.GetSignal()
			if err = checkSignal("signal.signal", sig.GetSignal()); err == nil {
				_, err = a.conn.Signal(ctx, id, syscall.Signal(sig.GetSignal()), sig.GetTree())
			}
		default:
			err = errs.New(errs.InvalidField, "a message after the first is input, resize or signal").With("field", "open")
		}
		if err != nil {
			return err
		}
	}
}

// queue takes a piece of input, which must go on where the last one ended.
func (a *attachment) queue(c *dormousev1.InputChunk) error {
	switch n := int64(len(c.GetData())); {
	case !a.open.GetInput():
		return errs.New(errs.InvalidField, "input: the stream was opened without").With("field", "input")
	case a.ended || c.GetOffset() != a.end:
		return errs.New(errs.InvalidField, "input.offset: %d does not go on at %d, where the last ended", c.GetOffset(), a.end).With("field", "input.offset")
	case n > maxInputChunk:
		return errs.New(errs.LimitExceeded, "input.data: at most %d bytes in a message", maxInputChunk).With("field", "input.data")
	case a.ahead.Add(n) > maxInputAhead:
		return errs.New(errs.LimitExceeded, "input: at most %d bytes before they are acknowledged", maxInputAhead).With("field", "input")
	}
	a.end += uint64(len(c.GetData()))
	a.ended = c.GetEof()
	select {
	case a.input <- c:
		return nil
	default:
		return errs.New(errs.LimitExceeded, "input: at most %d messages before they are acknowledged", maxInputChunks).With("field", "input")
	}
}

// write hands the queue to guest init, and says how far it came.
func (a *attachment) write(ctx context.Context) error {
	for {
		var c *dormousev1.InputChunk
		select {
		case c = <-a.input:
		case <-ctx.Done():
			return nil
		}
		state, err := a.conn.WriteStdinAt(ctx, a.open.GetProcessId(), a.writer, c.GetOffset(), c.GetData(), c.GetEof())
		if err != nil {
			return err
		}
		a.ahead.Add(-int64(len(c.GetData())))
		ack := &dormousev1.InputState{AcceptedOffset: state.Accepted, Closed: state.Closed}
		if err := a.send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Input{Input: ack}}); err != nil {
			return err
		}
	}
}

// writers knows who writes the inputs of processes through this node, so that a newer one can end an
// older one that is stuck. Whose an input is, is for guest init to say.
type writers struct {
	mu sync.Mutex
	of map[writerKey]*claim
}

type writerKey struct{ sandbox, process string }

type claim struct {
	writer uint64
	end    context.CancelCauseFunc
}

func inputTaken(process string) error {
	return errs.New(errs.InputTaken, "another writes the input of the process now; attach to it anew to take it back").With("process_id", process)
}

// claim makes the caller the writer and ends the one before it. With resume it is refused where that one
// is another. The caller must call release.
func (w *writers) claim(sandbox, process string, writer uint64, resume bool, end context.CancelCauseFunc) (release func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := writerKey{sandbox, process}
	old := w.of[key]
	if old != nil && resume && old.writer != writer {
		return nil, inputTaken(process)
	}
	if old != nil {
		old.end(inputTaken(process))
	}
	if w.of == nil {
		w.of = map[writerKey]*claim{}
	}
	c := &claim{writer: writer, end: end}
	w.of[key] = c
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.of[key] == c {
			delete(w.of, key)
		}
	}, nil
}

// displace ends the writer, if there is one.
func (w *writers) displace(sandbox, process string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if old := w.of[writerKey{sandbox, process}]; old != nil {
		old.end(inputTaken(process))
	}
}
