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
	hold   bool  // the process waits for it
	moved  int64 // when it last got on
}

// holdLimit is how long, in nanoseconds, a process waits for a reader that does not read.
const holdLimit = 10_000_000_000

// readOutput takes what a process wrote, a bounded amount at a time.
func (a *agent) readOutput(p *process, i int) {
	for range readsPerTurn {
		room := a.room(p, i)
		if room <= 0 {
			p.out[i].held = true
			a.unwatch(p.out[i].fd)
			return
		}
		if a.readOnce(p, i, room) == 0 {
			if p.out[0].fd < 0 && p.out[1].fd < 0 {
				a.ending = true
			}
			return
		}
	}
}

// room is how much may be read of an output before it would overwrite what a reader that the
// process waits for has not had.
func (a *agent) room(p *process, i int) int {
	r := &p.out[i].ring
	room := pipeMost
	if p.out[i].awaited != 0 {
		room = r.limit - r.size
	}
	for _, o := range a.outputs {
		if o.hold && o.p == p && o.which == i {
			unread := int(r.end - min(max(o.offset, r.start()), r.end))
			room = min(room, r.limit-unread)
		}
	}
	return room
}

// release polls an output again that was held.
func (a *agent) release(p *process, i int) {
	if o := &p.out[i]; o.held && o.fd >= 0 {
		o.held = false
		a.watch(o.fd, syscall.EPOLLIN, func(uint32) { a.readOutput(p, i) })
	}
}

// removeOutput ends a stream.
func (a *agent) removeOutput(at int) {
	o := a.outputs[at]
	a.outputs = append(a.outputs[:at], a.outputs[at+1:]...)
	a.streams--
	a.release(o.p, o.which)
}

func (a *agent) readOnce(p *process, i, most int) int {
	o := &p.out[i]
	b := a.buffer()
	n, err := read(o.fd, b[:min(len(b), most)])
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
		o.fd, o.held = -1, false
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
		hold: m.Hold, moved: clock(clockMonotonic),
	})
	p.out[which].awaited = 0
	a.release(p, which)
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
			a.removeOutput(a.turn)
			continue
		}
		a.turn++
		if o.hold {
			o.moved = clock(clockMonotonic)
			if o.p.out[o.which].held && a.room(o.p, o.which) >= o.p.out[o.which].ring.limit/4 {
				a.release(o.p, o.which)
			}
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
