package guestinit

import (
	"errors"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// output is an open output stream of the channel.
type output struct {
	stream uint32
	p      *process
	which  int
	offset uint64
	follow uint32
	until  uint64 // with FollowNone
	credit uint64
}

// readOutput takes what a process wrote, a bounded amount at a time.
func (a *agent) readOutput(p *process, i int) {
	for range readsPerTurn {
		if a.readOnce(p, i) == 0 {
			return
		}
	}
}

func (a *agent) readOnce(p *process, i int) int {
	o := &p.out[i]
	n, err := read(o.fd, a.buffer())
	if errors.Is(err, syscall.EAGAIN) {
		return 0
	}
	if err != nil || n == 0 {
		a.closeOutput(p, i)
		return 0
	}
	o.ring.write(a.scratch[:n])
	return n
}

func (a *agent) closeOutput(p *process, i int) {
	if o := &p.out[i]; o.fd >= 0 {
		a.unwatch(o.fd)
		_ = syscall.Close(o.fd)
		o.fd = -1
		o.ring.trim()
	}
}

func (a *agent) openOutput(stream uint32, m *guestwire.OutputOpen) (guestwire.Message, *failure) {
	p, err := a.find(m.ProcessID)
	if err != nil {
		return nil, err
	}
	if m.Output != guestwire.Stdout && m.Output != guestwire.Stderr {
		return nil, fail("INVALID_FIELD", "a process has the outputs stdout and stderr").with("field", "output")
	}
	which := int(m.Output - guestwire.Stdout)
	end := p.out[which].ring.end
	if m.FromOffset == ^uint64(0) {
		m.FromOffset = end
	}
	if m.FromOffset > end {
		return nil, fail("INVALID_FIELD", "the offset lies beyond what was written; this sandbox may have been restored from before it").with("field", "from_offset")
	}
	if err := a.takeStream(stream); err != nil {
		return nil, err
	}
	a.outputs = append(a.outputs, &output{
		stream: stream, p: p, which: which, offset: m.FromOffset, follow: m.Follow, until: end, credit: uint64(m.Credit),
	})
	return nil, nil
}

func (a *agent) credit(stream uint32, m *guestwire.Credit) (guestwire.Message, *failure) {
	for _, o := range a.outputs {
		if o.stream == stream {
			o.credit += uint64(m.Bytes)
		}
	}
	return nil, nil
}

// pump makes output frames, one for each stream in turn, until there are enough for now or no
// stream has anything to say.
func (a *agent) pump() {
	idle := 0
	for len(a.out) < outFill && idle < len(a.outputs) {
		if a.turn >= len(a.outputs) {
			a.turn = 0
		}
		o := a.outputs[a.turn]
		m, done := o.next()
		if m == nil {
			idle++
			a.turn++
			continue
		}
		idle = 0
		a.send(o.stream, m)
		if done {
			a.outputs = append(a.outputs[:a.turn], a.outputs[a.turn+1:]...)
			a.streams--
		} else {
			a.turn++
		}
	}
}

// next is the stream's next message, or nil when it must wait; done is true for the last one.
func (o *output) next() (m guestwire.Message, done bool) {
	pipe := &o.p.out[o.which]
	limit, final := pipe.ring.end, pipe.fd < 0
	switch {
	case o.follow == guestwire.FollowNone:
		limit, final = o.until, true
	case o.follow == guestwire.FollowUntilExit && o.p.exit != nil:
		limit, final = o.p.exit.StdoutOffset, true
		if o.which == 1 {
			limit = o.p.exit.StderrOffset
		}
	}
	// What was read before the process ended may lie beyond the offset of its end.
	limit = max(limit, o.offset)
	data, begins, gap := pipe.ring.from(o.offset)
	if begins >= limit {
		if !final {
			return nil, false
		}
		end := &guestwire.OutputEnd{Offset: limit, Gap: limit - o.offset, EOF: pipe.fd < 0 && limit == pipe.ring.end}
		return end, true
	}
	n := min(uint64(len(data)), limit-begins, o.credit, guestwire.MaxPayload-64)
	if n == 0 {
		return nil, false
	}
	o.credit -= n
	o.offset = begins + n
	return &guestwire.OutputData{Offset: begins, Gap: gap, Data: data[:n]}, false
}
