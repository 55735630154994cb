// Package bulkguest is the bulk helper: a program that runs in a sandbox for one transfer. It reads an order
// from its standard input, does it as the user it is told, and ends (package bulkwire says how it talks).
//
// Paths are resolved here, by the sandbox's own kernel, and nowhere else: whatever links a sandbox
// makes, they lead to the sandbox's own files.
//
// # Invariants
//
//   - It ends when either pipe's other end is closed, whatever it is doing then: a goroutine does nothing
//     but wait for that. What it had begun and can undo, it undoes.
//   - Its memory does not grow with what it moves.
//   - What it reports as done is done: written, synced and in its place. An error that came late is an error.
//   - It trusts agentd and nothing else: archives, links, account files and servers inside are anybody's.
package bulkguest

import (
	"errors"
	"io"
	"os"
	"runtime/debug"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

// helper is one order being done.
type helper struct {
	order bulkwire.Order
	in    *bulkwire.Reader
	out   *bulkwire.Writer

	mu   sync.Mutex
	undo func() // what has to be done before leaving early; nil for nothing
}

// Main does one order and returns the exit code.
func Main(in, out *os.File) int {
	debug.SetGCPercent(50)
	// Nobody else inside needs to look into a helper that may act as root.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	h := &helper{in: bulkwire.NewReader(in), out: bulkwire.NewWriter(out)}
	go h.leaveWithHost(int(in.Fd()), int(out.Fd()))
	kind, text, err := h.in.Next()
	if err != nil || kind != bulkwire.Request || bulkwire.Decode(text, &h.order) != nil {
		return 2
	}
	if err := h.run(); err != nil {
		r := refusalOf(err)
		if err := h.out.WriteText(bulkwire.Failure, r); err != nil {
			return 3
		}
		return 1
	}
	return 0
}

// leaveWithHost ends the process when agentd has closed a pipe, or has ended. What it sent before may
// then be unread, and is dropped.
func (h *helper) leaveWithHost(in, out int) {
	fds := []unix.PollFd{{Fd: int32(in)}, {Fd: int32(out)}}
	for {
		_, err := unix.Poll(fds, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || (fds[0].Revents|fds[1].Revents)&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0 {
			h.mu.Lock() // for good: nothing is to be begun any more
			if h.undo != nil {
				h.undo()
			}
			os.Exit(4)
		}
	}
}

// onLeave sets what has to be undone if the host goes; nil when there is nothing any more.
func (h *helper) onLeave(undo func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.undo = undo
}

func (h *helper) run() error {
	if h.order.User != "" {
		if err := actAs(h.order.User); err != nil {
			return err
		}
	}
	switch h.order.Op {
	case bulkwire.Dial:
		return h.dial()
	case bulkwire.Stat:
		return h.stat()
	case bulkwire.List:
		return h.list()
	case bulkwire.Read:
		return h.read()
	case bulkwire.Write:
		return h.write()
	case bulkwire.MakeDir:
		return h.makeDir()
	case bulkwire.Remove:
		return h.remove()
	case bulkwire.Move:
		return h.move()
	case bulkwire.Pack:
		return h.pack()
	case bulkwire.Unpack:
		return h.unpack()
	case bulkwire.Watch:
		return h.watch()
	}
	return refuse("NOT_SUPPORTED", "the sandbox's bulk helper does not know %q; it is of another bundle", h.order.Op).with("feature", string(h.order.Op))
}

// answer sends an answer.
func (h *helper) answer(v any) error { return h.out.WriteText(bulkwire.Answer, v) }

// done ends the order.
func (h *helper) done(v any) error { return h.out.WriteText(bulkwire.End, v) }

// input is what the host sends, up to its End.
type input struct {
	in   *bulkwire.Reader
	rest []byte
	end  bool
}

// Next gives the next bytes, io.EOF at the end.
func (i *input) Next() ([]byte, error) {
	if len(i.rest) > 0 {
		data := i.rest
		i.rest = nil
		return data, nil
	}
	for !i.end {
		kind, data, err := i.in.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil, io.ErrUnexpectedEOF
		case err != nil:
			return nil, err
		case kind == bulkwire.End:
			i.end = true
		case kind != bulkwire.Data:
			return nil, bulkwire.ErrGarbage
		case len(data) > 0:
			return data, nil
		}
	}
	return nil, io.EOF
}

// Read implements io.Reader.
func (i *input) Read(p []byte) (int, error) {
	data, err := i.Next()
	if err != nil {
		return 0, err
	}
	n := copy(p, data)
	i.rest = data[n:]
	return n, nil
}

// output makes Data frames of what is written.
type output struct {
	out *bulkwire.Writer
	n   int64
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	if err := o.out.WriteData(p); err != nil {
		return 0, err
	}
	o.n += int64(len(p))
	return len(p), nil
}
