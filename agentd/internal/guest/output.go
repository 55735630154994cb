package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Output is one of a process's outputs.
type Output uint32

// The outputs.
const (
	Stdout Output = Output(guestwire.Stdout)
	Stderr Output = Output(guestwire.Stderr)
)

// Follow says when an output stream ends.
type Follow uint32

// NoFollow ends at what is there now, UntilExit at what the process itself had written when it
// ended, UntilEOF when the last holder of the pipe (a child left behind) has closed it.
const (
	NoFollow  Follow = Follow(guestwire.FollowNone)
	UntilExit Follow = Follow(guestwire.FollowUntilExit)
	UntilEOF  Follow = Follow(guestwire.FollowUntilEOF)
)

// FromEnd as From means: only what is written from now on.
const FromEnd = ^uint64(0)

// OutputRequest asks for an output from an absolute offset on.
type OutputRequest struct {
	Process string
	Output  Output
	From    uint64
	Follow  Follow
	// Hold makes the process wait for this reader instead of overwriting what it has not read, for
	// as long as the reader gets on: after 10 s without progress it is a reader like others. For
	// who follows a command and wants all of it, not for logs.
	Hold bool
}

// Chunk is a piece of output. Gap bytes before Offset were overwritten before they were read; a
// last chunk may have a gap and no data.
type Chunk struct {
	Offset uint64
	Gap    uint64
	Data   []byte
}

// maxChunks bounds the pieces that wait in a stream, however small they are.
const maxChunks = 1024

// OutputStream is an open output. Next and Close may not be called concurrently with each other.
// A reader that is slow holds up nobody else: what it does not read stays in the guest's ring.
type OutputStream struct {
	c      *Conn
	stream uint32
	ready  chan struct{}
	closed bool
	owed   int

	mu      sync.Mutex
	chunks  []Chunk
	allowed uint64 // bytes the guest may still send
	end     *Chunk
	eof     bool
	err     error
}

// Output opens an output stream. A process that is not known is PROCESS_NOT_FOUND and an offset
// beyond the end INVALID_FIELD; both come from the first Next.
func (c *Conn) Output(ctx context.Context, r OutputRequest) (*OutputStream, error) {
	s := &OutputStream{c: c, ready: make(chan struct{}, 1), allowed: uint64(c.window)}
	stream, err := c.register(s)
	if err != nil {
		return nil, err
	}
	s.stream = stream
	err = c.send(ctx, stream, &guestwire.OutputOpen{
		ProcessID: r.Process, Output: uint32(r.Output), FromOffset: r.From, Follow: uint32(r.Follow), Credit: uint32(c.window), Hold: r.Hold,
	})
	if err != nil {
		c.unregister(stream)
		return nil, err
	}
	return s, nil
}

// Tail reads the last bytes of an output, as many as are there up to most, and the offset at which
// they begin.
func (c *Conn) Tail(ctx context.Context, process string, which Output, most int) (begins uint64, data []byte, err error) {
	p, err := c.Get(ctx, process)
	if err != nil {
		return 0, nil, err
	}
	end := p.StdoutOffset
	if which == Stderr {
		end = p.StderrOffset
	}
	begins = end - min(end, uint64(max(most, 0)))
	s, err := c.Output(ctx, OutputRequest{Process: process, Output: which, From: begins, Follow: NoFollow})
	if err != nil {
		return 0, nil, err
	}
	defer s.Close()
	for {
		chunk, err := s.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return begins, data, nil
		case err != nil:
			return 0, nil, err
		case chunk.Gap > 0: // overwritten meanwhile: what was read before it is no tail
			data = nil
		}
		if len(data) == 0 {
			begins = chunk.Offset
		}
		data = append(data, chunk.Data...)
		if over := len(data) - most; over > 0 {
			data, begins = data[over:], begins+uint64(over)
		}
	}
}

func (s *OutputStream) deliver(t guestwire.Type, payload []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end != nil || s.err != nil {
		return
	}
	switch t {
	case guestwire.TypeOutputData:
		var m guestwire.OutputData
		if guestwire.Unmarshal(payload, &m) != nil {
			return
		}
		s.add(&m)
	case guestwire.TypeOutputEnd:
		var m guestwire.OutputEnd
		if guestwire.Unmarshal(payload, &m) != nil {
			return
		}
		s.end, s.eof = &Chunk{Offset: m.Offset, Gap: m.Gap}, m.EOF
	case guestwire.TypeError:
		s.err = guestError(payload)
	default:
		return
	}
	s.signal()
}

func (s *OutputStream) add(m *guestwire.OutputData) {
	if uint64(len(m.Data)) > s.allowed || len(s.chunks) >= maxChunks {
		s.err = errs.New(errs.InternalError, "guest init sent more output than it was given credit for")
		return
	}
	s.allowed -= uint64(len(m.Data))
	if n := len(s.chunks); n > 0 && m.Gap == 0 {
		if last := &s.chunks[n-1]; last.Offset+uint64(len(last.Data)) == m.Offset && len(last.Data) < guestwire.MaxPayload {
			last.Data = append(last.Data, m.Data...)
			return
		}
	}
	s.chunks = append(s.chunks, Chunk{Offset: m.Offset, Gap: m.Gap, Data: bytes.Clone(m.Data)})
}

func (s *OutputStream) signal() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

func (s *OutputStream) broken(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil && s.err == nil {
		s.err = err
	}
	s.signal()
}

// Next returns the next piece, or io.EOF at the end. A ctx that ends leaves the stream open.
func (s *OutputStream) Next(ctx context.Context) (Chunk, error) {
	for {
		chunk, ok, err := s.take()
		if ok || err != nil {
			return chunk, err
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return Chunk{}, errs.From(ctx.Err())
		}
	}
}

// take is Next without waiting: not ok, and no error, where there is nothing yet.
func (s *OutputStream) take() (chunk Chunk, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(s.chunks) > 0:
		chunk = s.chunks[0]
		s.chunks = s.chunks[1:]
		s.refill(len(chunk.Data))
		return chunk, true, nil
	case s.end != nil && s.end.Gap > 0:
		chunk = *s.end
		s.end.Gap = 0
		return chunk, true, nil
	case s.err != nil:
		return Chunk{}, false, s.err
	case s.end != nil:
		return Chunk{}, false, io.EOF
	}
	return Chunk{}, false, nil
}

// refill gives the guest new credit once half of the window was read.
func (s *OutputStream) refill(n int) {
	if s.owed += n; s.owed >= s.c.window/2 && s.end == nil {
		s.allowed += uint64(s.owed)
		s.c.owe(s.stream, s.owed)
		s.owed = 0
	}
}

// End tells, after io.EOF, the offset at which the stream ended and whether the output is closed
// for ever.
func (s *OutputStream) End() (offset uint64, eof bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil {
		return 0, false
	}
	return s.end.Offset, s.eof
}

// Close ends the stream. It may be called again.
func (s *OutputStream) Close() {
	if s.closed {
		return
	}
	s.closed = true
	s.mu.Lock()
	over := s.end != nil || s.err != nil
	s.mu.Unlock()
	if over {
		s.c.unregister(s.stream)
	} else {
		s.c.abandon(s.stream)
	}
}
