package guestinit

import (
	"errors"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// readChannel takes what the host sent.
func (a *agent) readChannel() {
	for range readsPerTurn {
		n, err := read(a.cfg.In, a.dec.Space())
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		if err != nil || n == 0 {
			// Opened read-write, a FIFO has no end; given otherwise, wait for the next writer.
			a.unwatch(a.cfg.In)
			a.inOff, a.inRetry = true, clock(clockMonotonic)+retryInput*1_000_000
			return
		}
		a.dec.Filled(n)
		for {
			f, ok := a.dec.Next()
			if !ok {
				break
			}
			if payload, whole := a.asm.Add(f); whole {
				a.handle(f, payload)
			}
		}
		if len(a.out)-a.outAt > outHigh {
			a.unwatch(a.cfg.In)
			a.inOff = true
			return
		}
	}
}

// flush writes what is to be said, as far as the FIFO takes it, and reports whether the loop may
// sleep: false means that there is more to do.
func (a *agent) flush() bool {
	for range readsPerTurn {
		if a.outAt == len(a.out) {
			a.out, a.outAt = a.out[:0], 0
			if cap(a.out) > outFill+guestwire.MaxFrame {
				a.out = nil
			}
			if a.open && !a.quiesced {
				a.tell()
				a.pump()
			}
		}
		if a.outAt == len(a.out) {
			if a.outArmed {
				a.outArmed = false
				a.unwatch(a.cfg.Out)
			}
			return true
		}
		n, err := write(a.cfg.Out, a.out[a.outAt:])
		a.outAt += n
		if errors.Is(err, syscall.EAGAIN) {
			if !a.outArmed {
				a.outArmed = true
				a.watch(a.cfg.Out, syscall.EPOLLOUT, func(uint32) {})
			}
			return true
		}
		if err != nil {
			a.out, a.outAt = nil, 0
		}
		if a.inOff && a.inRetry == 0 && len(a.out)-a.outAt <= outHigh/2 {
			a.inOff = false
			a.watch(a.cfg.In, syscall.EPOLLIN, func(uint32) { a.readChannel() })
		}
	}
	return false
}

func (a *agent) send(stream uint32, m guestwire.Message) { a.sendOn(a.ch, stream, m) }

func (a *agent) sendOn(ch guestwire.Channel, stream uint32, m guestwire.Message) {
	a.out, _ = guestwire.AppendMessage(a.out, ch, stream, m)
}

func (a *agent) refuse(stream uint32, f *failure) { a.send(stream, (*guestwire.Error)(f)) }

// handle does one request. A mistake in here must not cost the sandbox its init.
func (a *agent) handle(f guestwire.Frame, payload []byte) {
	defer func() {
		if recover() != nil && a.open {
			a.refuse(f.Stream, fail("INTERNAL_ERROR", "guest init failed in this request"))
		}
	}()
	if f.Type == guestwire.TypeHello {
		a.hello(f, payload)
		return
	}
	if a.quiesced && f.Type != guestwire.TypeResume && f.Type != guestwire.TypeQuiesce {
		return
	}
	reply, err := a.request(f.Type, f.Stream, payload)
	if err != nil {
		a.refuse(f.Stream, err)
	} else if reply != nil {
		a.send(f.Stream, reply)
	}
}

func (a *agent) request(t guestwire.Type, stream uint32, payload []byte) (guestwire.Message, *failure) {
	switch t {
	case guestwire.TypeConfigure:
		return with(payload, a.configure)
	case guestwire.TypeQuiesce:
		a.quiesced = true
		return &guestwire.Quiesced{Processes: uint32(len(a.procs))}, nil
	case guestwire.TypeResume:
		a.quiesced = false
		return &guestwire.Resumed{}, nil
	case guestwire.TypePing:
		a.lookAgain()
		return with(payload, func(m *guestwire.Ping) (guestwire.Message, *failure) {
			return &guestwire.Pong{Nonce: m.Nonce}, nil
		})
	case guestwire.TypeCredit:
		return with(payload, func(m *guestwire.Credit) (guestwire.Message, *failure) { return a.credit(stream, m) })
	case guestwire.TypeStreamClose:
		a.closeStream(stream)
		return nil, nil
	case guestwire.TypeStart:
		return with(payload, func(m *guestwire.Start) (guestwire.Message, *failure) { return a.start(m) })
	case guestwire.TypeList:
		return with(payload, func(m *guestwire.List) (guestwire.Message, *failure) { return a.list(stream, m) })
	case guestwire.TypeSignal:
		return with(payload, a.signal)
	case guestwire.TypeWait:
		return with(payload, func(m *guestwire.Wait) (guestwire.Message, *failure) { return a.wait(stream, m) })
	case guestwire.TypeOutputOpen:
		return with(payload, func(m *guestwire.OutputOpen) (guestwire.Message, *failure) { return a.openOutput(stream, m) })
	case guestwire.TypeStdinOpen:
		return with(payload, func(m *guestwire.StdinOpen) (guestwire.Message, *failure) { return a.openStdin(stream, m) })
	case guestwire.TypeStdinData:
		return with(payload, func(m *guestwire.StdinData) (guestwire.Message, *failure) { return a.stdinData(stream, m) })
	case guestwire.TypeStdinClose:
		return with(payload, func(m *guestwire.StdinClose) (guestwire.Message, *failure) { return a.stdinClose(stream, m) })
	case guestwire.TypeResize:
		return with(payload, a.resize)
	case guestwire.TypeForget:
		return with(payload, a.forget)
	}
	return nil, fail("NOT_SUPPORTED", "this guest init does not know the request; the sandbox's runtime bundle is older than agentd").with("feature", "frame type "+itoa(uint64(t)))
}

// with decodes a request and does it.
func with[T any, P interface {
	*T
	guestwire.Message
}](payload []byte, do func(P) (guestwire.Message, *failure)) (guestwire.Message, *failure) {
	m := P(new(T))
	if guestwire.Unmarshal(payload, m) != nil {
		return nil, fail("INTERNAL_ERROR", "the request cannot be read")
	}
	return do(m)
}

func (a *agent) hello(f guestwire.Frame, payload []byte) {
	var m guestwire.Hello
	if f.Channel.Generation == 0 || f.Channel.Key == 0 || guestwire.Unmarshal(payload, &m) != nil ||
		m.SandboxUID == "" || len(m.SandboxUID) > 128 {
		return
	}
	reject := func(reason, message string) {
		a.sendOn(f.Channel, f.Stream, &guestwire.Rejected{Reason: reason, Message: message, CurrentGeneration: a.ch.Generation})
	}
	switch {
	case m.MinVersion > guestwire.Version || m.MaxVersion < guestwire.Version:
		reject("NOT_SUPPORTED", "no protocol version in common; use the runtime bundle that made the sandbox")
		return
	case f.Channel.Generation < a.ch.Generation:
		reject("FENCED", "the channel has a later generation; another agentd holds it")
		return
	case f.Channel.Generation == a.ch.Generation && m.SandboxUID != a.uid:
		reject("STALE_UID", "another sandbox has this channel; a restored one takes a higher generation")
		return
	}
	if f.Channel != a.ch {
		a.prev = guestwire.Welcome{PreviousSandboxUID: a.uid, PreviousGeneration: a.ch.Generation}
		a.dropStreams()
		a.ch, a.uid, a.open = f.Channel, m.SandboxUID, true
	}
	a.quiesced = false
	a.lookAgain()
	a.send(f.Stream, &guestwire.Welcome{
		Version: guestwire.Version, PreviousSandboxUID: a.prev.PreviousSandboxUID, PreviousGeneration: a.prev.PreviousGeneration,
		Capabilities: []string{"process", "stdin", "quiesce", "identity", "terminal"}, Build: a.cfg.Build,
		MaxPayload: guestwire.MaxPayload, MaxMessage: guestwire.MaxMessage, Processes: uint32(len(a.procs)),
	})
}

// dropStreams ends every call and stream without a word.
func (a *agent) dropStreams() {
	for _, p := range a.procs {
		p.waits, p.stdin.stream = nil, 0
	}
	for _, p := range a.dirty { // some may be forgotten already
		p.waits, p.stdin.stream = nil, 0
	}
	for len(a.outputs) > 0 {
		a.removeOutput(len(a.outputs) - 1)
	}
	a.streams = 0
}

func (a *agent) closeStream(stream uint32) {
	if stream == 0 {
		return
	}
	for i, o := range a.outputs {
		if o.stream == stream {
			a.removeOutput(i)
			return
		}
	}
	for _, p := range a.procs {
		if p.stdin.stream == stream {
			p.stdin.stream = 0
			a.streams--
			return
		}
		for i, w := range p.waits {
			if w == stream {
				p.waits = append(p.waits[:i], p.waits[i+1:]...)
				a.streams--
				return
			}
		}
	}
}

// takeStream counts one more open stream. Zero numbers none.
func (a *agent) takeStream(stream uint32) *failure {
	if stream == 0 {
		return fail("INVALID_FIELD", "a stream needs a number above zero").with("field", "stream")
	}
	if a.streams >= maxStreams {
		return fail("TOO_MANY", "too many waits and streams are open in this sandbox").with("limit", itoa(maxStreams))
	}
	a.streams++
	return nil
}
