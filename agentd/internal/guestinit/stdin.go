package guestinit

import (
	"errors"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// stdinWindow is how much input waits in init for a process that does not read.
const stdinWindow = 64 << 10

// inPipe is init's end of a process's input.
type inPipe struct {
	fd       int // -1 when there is none, or closed
	pending  []byte
	accepted uint64 // bytes taken from the host
	closing  bool   // close when pending is written
	closed   bool
	broken   bool
	armed    bool
	told     uint64 // the limit last told
	stream   uint32
	writer   uint64 // who opened it last
	terminal bool   // fd is a master: an end is typed
	last     byte   // taken last
	ended    bool   // the end is typed
}

func (s *inPipe) limit() uint64 { return s.accepted - uint64(len(s.pending)) + stdinWindow }

func (s *inPipe) state() *guestwire.StdinState {
	s.told = s.limit()
	return &guestwire.StdinState{AcceptedOffset: s.accepted, LimitOffset: s.told, Closed: s.closed || s.closing, Broken: s.broken}
}

func (a *agent) openStdin(stream uint32, m *guestwire.StdinOpen) (guestwire.Message, *failure) {
	p, err := a.find(m.ProcessID)
	if err != nil {
		return nil, err
	}
	if m.Resume && p.stdin.writer != m.Writer {
		return nil, fail("INPUT_TAKEN", "another has written to the process since; open its input anew to take it").with("process_id", p.id)
	}
	if p.stdin.stream == 0 || stream == 0 {
		if err := a.takeStream(stream); err != nil {
			return nil, err
		}
	}
	p.stdin.stream, p.stdin.writer = stream, m.Writer
	return p.stdin.state(), nil
}

func (a *agent) stdinOf(stream uint32) (*process, *failure) {
	for _, p := range a.procs {
		if stream != 0 && p.stdin.stream == stream {
			return p, nil
		}
	}
	return nil, fail("PROCESS_NOT_FOUND", "the input stream is not open")
}

func (a *agent) stdinData(stream uint32, m *guestwire.StdinData) (guestwire.Message, *failure) {
	p, err := a.stdinOf(stream)
	if err != nil {
		return nil, err
	}
	s := &p.stdin
	if s.closed || s.closing {
		return s.state(), nil
	}
	if m.Offset > s.accepted {
		return nil, fail("INVALID_FIELD", "input was skipped; open the stream again for the right offset").with("field", "offset")
	}
	data := m.Data[min(uint64(len(m.Data)), s.accepted-m.Offset):]
	if room := stdinWindow - len(s.pending); len(data) > room {
		data = data[:room]
	}
	s.pending = append(s.pending, data...)
	s.accepted += uint64(len(data))
	if len(data) > 0 {
		s.last = data[len(data)-1]
	}
	a.writeStdin(p)
	return s.state(), nil
}

func (a *agent) stdinClose(stream uint32, m *guestwire.StdinClose) (guestwire.Message, *failure) {
	p, err := a.stdinOf(stream)
	if err != nil {
		return nil, err
	}
	if m.Offset > p.stdin.accepted {
		return nil, fail("INVALID_FIELD", "input is missing before the end; open the stream again for the right offset").with("field", "offset")
	}
	p.stdin.closing = true
	a.writeStdin(p)
	return p.stdin.state(), nil
}

// writeStdin hands on what waits, as far as the pipe takes it.
func (a *agent) writeStdin(p *process) {
	s := &p.stdin
	for s.fd >= 0 && len(s.pending) > 0 {
		n, err := write(s.fd, s.pending)
		s.pending = s.pending[n:]
		if errors.Is(err, syscall.EAGAIN) {
			if !s.armed {
				s.armed = true
				a.watch(s.fd, syscall.EPOLLOUT, func(events uint32) { a.stdinWritable(p, events) })
			}
			return
		}
		if err != nil {
			a.closeStdin(p, true)
			return
		}
	}
	if len(s.pending) == 0 {
		s.pending = nil
	}
	if s.armed {
		s.armed = false
		a.unwatch(s.fd)
	}
	switch {
	case !s.closing || s.fd < 0 || len(s.pending) > 0:
	case s.terminal && !s.ended:
		s.ended, s.pending = true, s.endOfInput()
		a.writeStdin(p)
	default:
		a.closeStdin(p, false)
	}
}

func (a *agent) stdinWritable(p *process, events uint32) {
	if p.stdin.terminal && events&syscall.EPOLLHUP != 0 { // nobody has it open
		a.closeStdin(p, true)
		return
	}
	a.writeStdin(p)
	if s := &p.stdin; s.closed || s.limit()-s.told >= stdinWindow/4 {
		a.news(p)
	}
}

// closeStdin closes the pipe. Broken says that the process will not read on; it matters only when
// something was, or could still have been, written.
func (a *agent) closeStdin(p *process, broken bool) {
	s := &p.stdin
	if s.fd < 0 {
		return
	}
	if s.armed {
		s.armed = false
		a.unwatch(s.fd)
	}
	_ = syscall.Close(s.fd)
	s.fd, s.closed, s.broken, s.pending = -1, true, broken, nil
	a.news(p)
}
