// Command hostile is a guest init that lies in wait. In a sandbox whose host name begins with
// "hostile-" it attacks the node agent in the way that the rest of the name says; in any other it is
// the real guest init, so that both live in one runtime bundle on one node.
package main

import (
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/guestinit"
	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

func main() {
	name, _ := os.Hostname()
	attack, hostile := strings.CutPrefix(name, "hostile-")
	if !hostile {
		_ = guestinit.Run(guestinit.Config{In: 0, Out: 1, Build: "hostile"})
		os.Exit(1)
	}
	p := &peer{}
	switch attack {
	case "silent":
		forever()
	case "exit":
		os.Exit(3)
	case "refuses":
		p.serve(func(f guestwire.Frame, _ []byte) {
			p.say(f.Channel, f.Stream, &guestwire.Rejected{Reason: strings.Repeat("\x1b[2J", 9000), Message: strings.Repeat("\xff\x00", 60000), CurrentGeneration: 1 << 63})
		})
	case "leaves": // PID 1 ends in the middle of a request
		p.serve(func(f guestwire.Frame, payload []byte) {
			if f.Type == guestwire.TypeStart {
				os.Exit(9)
			}
			p.obey(f, payload)
		})
	case "closes":
		p.serve(func(f guestwire.Frame, payload []byte) {
			p.obey(f, payload)
			if f.Type == guestwire.TypeConfigure {
				for fd := range 3 {
					_ = syscall.Close(fd)
				}
				forever()
			}
		})
	case "deaf": // reads nothing more: what is sent fills the FIFO
		p.serve(func(f guestwire.Frame, payload []byte) {
			p.obey(f, payload)
			if f.Type == guestwire.TypeConfigure {
				forever()
			}
		})
	case "restless": // never stands still
		go p.noise()
		p.serve(func(f guestwire.Frame, payload []byte) {
			if f.Type != guestwire.TypeQuiesce && f.Type != guestwire.TypeResume {
				p.obey(f, payload)
			}
		})
	case "noise": // says that it stands still, and goes on
		go p.noise()
		go p.stderr()
		p.serve(p.obey)
	case "liar":
		p.serve(p.lie)
	}
}

// forever keeps a timer, without which the Go runtime would call it a deadlock and end the process.
func forever() {
	for {
		time.Sleep(time.Hour)
	}
}

// peer is this end of the channel, badly kept.
type peer struct {
	mu   sync.Mutex
	ch   guestwire.Channel
	last []byte // a frame to say again
}

func (p *peer) write(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	writeAll(1, b)
}

// writeAll writes as long as the descriptor is open.
func writeAll(fd int, b []byte) bool {
	for len(b) > 0 {
		n, err := syscall.Write(fd, b)
		switch {
		case err == syscall.EAGAIN:
			time.Sleep(100 * time.Microsecond)
		case err != nil && err != syscall.EINTR:
			return false
		}
		b = b[max(n, 0):]
	}
	return true
}

func (p *peer) say(ch guestwire.Channel, stream uint32, m guestwire.Message) {
	if frame, ok := guestwire.AppendMessage(nil, ch, stream, m); ok {
		p.write(frame)
	}
}

func (p *peer) serve(handle func(guestwire.Frame, []byte)) {
	var dec guestwire.Decoder
	var asm guestwire.Assembler
	for {
		n, err := syscall.Read(0, dec.Space())
		switch {
		case err == syscall.EAGAIN:
			time.Sleep(time.Millisecond)
		case err != nil && err != syscall.EINTR:
			forever()
		}
		dec.Filled(max(n, 0))
		for {
			f, ok := dec.Next()
			if !ok {
				break
			}
			payload, whole := asm.Add(f)
			if !whole {
				continue
			}
			p.mu.Lock()
			p.ch = f.Channel
			p.mu.Unlock()
			handle(f, payload)
		}
	}
}

// obey answers as guest init would that runs nothing.
func (p *peer) obey(f guestwire.Frame, payload []byte) {
	switch f.Type {
	case guestwire.TypeHello:
		p.say(f.Channel, f.Stream, &guestwire.Welcome{Version: guestwire.Version, Build: "hostile", MaxPayload: 1 << 31, MaxMessage: 1 << 31, Processes: 1 << 31})
	case guestwire.TypeConfigure:
		p.say(f.Channel, f.Stream, &guestwire.Configured{HostnameSet: true})
	case guestwire.TypeQuiesce:
		p.say(f.Channel, f.Stream, &guestwire.Quiesced{})
	case guestwire.TypeResume:
		p.say(f.Channel, f.Stream, &guestwire.Resumed{})
	case guestwire.TypeList:
		p.say(f.Channel, f.Stream, &guestwire.Listed{})
	case guestwire.TypeStart:
		var m guestwire.Start
		_ = guestwire.Unmarshal(payload, &m)
		p.say(f.Channel, f.Stream, &guestwire.Started{Process: &guestwire.ProcessInfo{ProcessID: m.ProcessID, PID: 7}})
	}
}

// lie answers everything, and all of it wrongly.
func (p *peer) lie(f guestwire.Frame, payload []byte) {
	const most = ^uint64(0)
	switch f.Type {
	case guestwire.TypeHello:
		for range 2000 {
			p.say(f.Channel, f.Stream, &guestwire.Welcome{Version: guestwire.Version, PreviousSandboxUID: strings.Repeat("x", 9000)})
		}
	case guestwire.TypeStart:
		var m guestwire.Start
		_ = guestwire.Unmarshal(payload, &m)
		if m.Main {
			p.obey(f, payload)
			return
		}
		p.say(f.Channel, f.Stream, &guestwire.Started{Process: &guestwire.ProcessInfo{ProcessID: "another", PID: 1}})
	case guestwire.TypeList:
		p.crowd(f)
	case guestwire.TypeWait:
		p.say(f.Channel, f.Stream, &guestwire.Error{Reason: "NO_SUCH_REASON", Message: strings.Repeat("\x1b]0;", 50000), DetailKey: "../../etc", DetailValue: "\x00"})
	case guestwire.TypeOutputOpen:
		// More than the credit, in pieces of no size, at offsets that wrap.
		for i := range uint64(5000) {
			p.say(f.Channel, f.Stream, &guestwire.OutputData{Offset: most - i, Gap: most, Data: make([]byte, int(i%3)*16<<10)})
		}
	case guestwire.TypeStdinOpen:
		p.say(f.Channel, f.Stream, &guestwire.StdinState{AcceptedOffset: most - 10, LimitOffset: most})
		p.say(f.Channel, f.Stream, &guestwire.StdinState{AcceptedOffset: 0, LimitOffset: most})
	default:
		p.obey(f, payload)
	}
}

// crowd is a list without an end of processes without a name: two bytes each on the wire.
func (p *peer) crowd(f guestwire.Frame) {
	part := &guestwire.Listed{Processes: make([]guestwire.ProcessInfo, 125_000), More: true}
	fat := &guestwire.Listed{Processes: []guestwire.ProcessInfo{{ProcessID: "fat", Args: []string{strings.Repeat("\x01", 255<<10)}}}, More: true}
	for range 600 {
		p.say(f.Channel, f.Stream, fat)
	}
	for range 600 {
		p.say(f.Channel, f.Stream, part)
	}
}

// noise writes for ever what nobody asked for.
func (p *peer) noise() {
	garbage := make([]byte, 48<<10)
	for i := range garbage {
		garbage[i] = byte(rand.Uint32())
	}
	for n := uint32(0); ; n++ {
		p.mu.Lock()
		ch, again := p.ch, p.last
		p.mu.Unlock()
		switch n % 7 {
		case 0:
			p.write(garbage)
		case 1: // the beginning of a frame, without its rest
			p.write(guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypeListed, Stream: n, Channel: ch, Payload: garbage[:32<<10]})[:guestwire.HeaderSize])
		case 2: // a message without an end
			for range 40 {
				p.write(guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypeOutputData, More: true, Stream: n % 64, Channel: ch, Payload: garbage[:32<<10]}))
			}
		case 3: // to streams that are open, perhaps, of any type
			for t := range guestwire.Type(50) {
				p.write(guestwire.AppendFrame(nil, guestwire.Frame{Type: t, Stream: n % 64, Channel: ch, Payload: garbage[:int(n)%200]}))
			}
		case 4: // of another hello, or of an earlier generation
			p.write(guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypeWelcome, Stream: 1, Channel: guestwire.Channel{Generation: ch.Generation, Key: ch.Key - 1}}))
			p.write(guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypeWelcome, Stream: 1, Channel: guestwire.Channel{Generation: ch.Generation - 1, Key: ch.Key}}))
		case 5: // once more
			for range 20 {
				p.write(again)
			}
		case 6:
			frame, _ := guestwire.AppendMessage(nil, ch, n%64, &guestwire.Exited{Exit: &guestwire.Exit{Code: n}})
			p.mu.Lock()
			p.last = frame
			p.mu.Unlock()
		}
	}
}

// stderr writes to the FIFO that nobody has to read.
func (p *peer) stderr() {
	for writeAll(2, make([]byte, 4096)) {
	}
}
