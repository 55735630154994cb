// Package guest is agentd's end of the channel to guest init: it starts processes in a sandbox,
// follows their output, and quiets the channel for a checkpoint.
//
// # The channel
//
// A sandbox's channel is two FIFOs. agentd opens them here, read-write and non-blocking, on
// descriptions of its own; those given to the runtime are opened elsewhere, for it alone, because
// the sentry depends on their flags. There must be one Conn at a time for a pair: two would take
// each other's bytes. After agentd was killed, a new Conn on the same pair with the same or a
// higher generation goes on; replies meant for the earlier one are dropped by their key. Nothing
// about processes is stored on this side: guest init knows.
//
// # Checkpoint and restore
//
//	Quiesce(ctx)    no request leaves any more; the guest has read all and will write nothing
//	(pause the sandbox)
//	Drain(ctx)      both FIFOs are empty, so that the image holds no bytes of the channel
//	(checkpoint with -leave-running, then resume the sandbox)
//	Resume(ctx)     requests that waited go out
//
// A crash of agentd anywhere in between needs nothing but resuming the sandbox and Open, whose
// hello ends the guest's quiet. A restored sandbox gets fresh FIFOs and Open with a generation
// above that of the snapshot; then Configure gives it its new identity.
//
// # What comes from the guest
//
// It is an enemy's until shown otherwise. Frames and messages are bounded, unknown types and
// unasked data are dropped, a stream that sends more than its credit is ended, texts are cut and
// cleaned before they go into an error.
package guest

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Options say which channel to open.
type Options struct {
	// InPath is the FIFO that guest init reads, OutPath the one it writes.
	InPath, OutPath string
	SandboxUID      string
	// Generation must be at least the last one used with this sandbox, and above that of the
	// snapshot it was restored from.
	Generation fence.Epoch
	// Window bounds what an output stream may hold in memory, in bytes; 0 is 128 KiB.
	Window int
	Log    *slog.Logger
}

// Info is what the guest said of itself in answer to the hello.
type Info struct {
	Version      uint32
	Build        string
	Capabilities []string
	// PreviousUID and PreviousGeneration were in force before this Conn; "" and 0 at the first.
	PreviousUID        string
	PreviousGeneration fence.Epoch
	Processes          int
}

// Limits of what is kept of a guest's answers.
const (
	defaultWindow = 128 << 10
	maxListed     = 4096
	// maxListedBytes is what the parts of one list may have together.
	maxListedBytes = 8 << 20
	// maxInputs is how many open input streams are remembered; beyond it each is opened anew.
	maxInputs = 1024
	// A guest that sends what nobody asked for is read slowly: at most wasteStep in wastePause. An
	// honest one wastes less than that when this node forgets what it asked for.
	wasteStep  = 1 << 20
	wastePause = 50 * time.Millisecond
	maxText    = 512
	helloFirst = 100 * time.Millisecond
	helloMost  = 2 * time.Second
)

// receiver takes the frames of one call or stream. deliver runs on the reader's goroutine: it must
// not block, and the payload is not valid after it.
type receiver interface {
	deliver(t guestwire.Type, payload []byte)
	// broken is called once when the Conn ends.
	broken(err error)
}

// Conn is an open channel. Its methods may be called concurrently.
type Conn struct {
	log     *slog.Logger
	uid     string
	ch      guestwire.Channel
	window  int
	in, out *os.File
	info    Info

	sendq chan []byte // frames that the gate may hold back
	ctl   chan control
	poke  chan struct{}
	done  chan struct{}
	lists chan struct{} // held by who lists
	wg    sync.WaitGroup

	mu         sync.Mutex
	next       uint32
	receivers  map[uint32]receiver
	credits    map[uint32]uint32 // owed to the guest
	closing    []uint32          // streams to be closed
	inputs     map[string]*input
	gated      bool // quiesced: sendq and credits wait
	mustResume bool // a quiesce failed: the guest may be quiet without need
	err        error
}

// control is a frame that passes the gate; after runs once it is written.
type control struct {
	frame []byte
	after func()
}

// Open opens the FIFOs and says hello until guest init answers or ctx ends (GUEST_SILENT). It may
// be called before the sandbox is started. A refused hello is FENCED (a lower generation), STALE_UID
// (another sandbox's channel) or NOT_SUPPORTED (no version in common).
func Open(ctx context.Context, o Options) (*Conn, error) {
	if o.Generation == 0 || o.SandboxUID == "" {
		return nil, errs.New(errs.InvalidField, "a guest channel needs a sandbox uid and a generation above zero").With("field", "generation")
	}
	in, err := openFIFO(o.InPath)
	if err != nil {
		return nil, err
	}
	out, err := openFIFO(o.OutPath)
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	c := &Conn{
		log: o.Log, uid: o.SandboxUID, window: o.Window, in: in, out: out,
		ch:    guestwire.Channel{Generation: uint64(o.Generation), Key: newKey()},
		sendq: make(chan []byte), ctl: make(chan control), poke: make(chan struct{}, 1), done: make(chan struct{}), lists: make(chan struct{}, 1),
		receivers: map[uint32]receiver{}, credits: map[uint32]uint32{}, inputs: map[string]*input{},
	}
	if c.window <= 0 {
		c.window = defaultWindow
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.log = c.log.With("sandbox", o.SandboxUID, "generation", uint64(o.Generation))
	c.wg.Add(2)
	go c.read()
	go c.write()
	if err := c.hello(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func openFIFO(path string) (*os.File, error) {
	// Read-write: no end of file and no ENXIO while the sandbox is not up, or away.
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "the guest channel's FIFO cannot be opened")
	}
	if st, err := f.Stat(); err != nil || st.Mode()&fs.ModeNamedPipe == 0 {
		return nil, errors.Join(errs.New(errs.InternalError, "the guest channel's path is not a FIFO"), f.Close())
	}
	return f, nil
}

func newKey() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// Info is what the guest said of itself.
func (c *Conn) Info() Info { return c.info }

// Generation is the channel's.
func (c *Conn) Generation() fence.Epoch { return fence.Epoch(c.ch.Generation) }

// Done is closed when the Conn has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close ends the Conn and every call on it, and waits for its goroutines. The guest is not told:
// its processes go on.
func (c *Conn) Close() error {
	c.fail(errs.New(errs.GuestSilent, "the guest channel was closed by this node; ask again").With("uid", c.uid))
	c.wg.Wait()
	return nil
}

// fail ends the Conn with a reason, once.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	receivers := c.receivers
	c.receivers = map[uint32]receiver{}
	close(c.done)
	c.mu.Unlock()
	// Closing wakes the reader and a writer that waits for room.
	_, _ = c.in.Close(), c.out.Close()
	for _, r := range receivers {
		r.broken(err)
	}
}

func (c *Conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// read hands frames to their receivers until the FIFO is closed.
func (c *Conn) read() {
	defer c.wg.Done()
	dec := guestwire.Decoder{Accept: func(f guestwire.Frame) bool { return f.Channel == c.ch }}
	var asm guestwire.Assembler
	var waste waste
	raw, err := c.out.SyscallConn()
	for {
		n := 0
		if err == nil {
			n, err = receive(raw, &dec)
		}
		if err != nil {
			c.fail(errs.Wrap(err, errs.GuestSilent, "the guest channel cannot be read").With("uid", c.uid))
			return
		}
		dec.Filled(n)
		for {
			f, ok := dec.Next()
			if !ok {
				break
			}
			payload, whole := asm.Add(f)
			if !whole {
				waste.parts += uint64(len(f.Payload))
				continue
			}
			c.mu.Lock()
			r := c.receivers[f.Stream]
			c.mu.Unlock()
			if r != nil {
				r.deliver(f.Type, payload)
				waste.parts = 0
			} else {
				waste.unasked += uint64(guestwire.HeaderSize + len(payload))
			}
		}
		if waste.more(dec.Skipped) && !c.rest(&waste) {
			return
		}
	}
}

// receive reads what there is, and waits for it without memory.
func receive(raw syscall.RawConn, dec *guestwire.Decoder) (n int, err error) {
	waitErr := raw.Read(func(fd uintptr) bool {
		for {
			n, err = unix.Read(int(fd), dec.Space())
			switch {
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				dec.Rest()
				return false
			default:
				return true
			}
		}
	})
	if waitErr != nil {
		err = waitErr
	}
	return max(n, 0), err
}

// waste counts bytes that were of no use. What is a part of a message is, until the message is whole.
type waste struct {
	unasked, parts uint64
	paid, told     uint64
}

// more tells whether another wasteStep is full.
func (w *waste) more(skipped uint64) bool {
	if w.parts > guestwire.MaxMessage {
		w.unasked, w.parts = w.unasked+w.parts, 0
	}
	return w.unasked+skipped >= w.paid+wasteStep
}

// rest lets the guest wait, and with it the bytes that it is about to waste. It reports false when
// the Conn has ended. The log hears of it each time that the sum has doubled.
func (c *Conn) rest(w *waste) bool {
	w.paid += wasteStep
	if w.paid >= 2*w.told {
		w.told = w.paid
		c.log.Warn("guest channel: the guest sends what nobody asked for; it is read slowly", "bytes", w.paid)
	}
	timer := time.NewTimer(wastePause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.done:
		return false
	}
}

// write owns the in-FIFO: a frame is written whole before the next, whatever becomes of its caller.
func (c *Conn) write() {
	defer c.wg.Done()
	for {
		frame, gated := c.owed()
		var after func()
		if len(frame) == 0 {
			sendq := c.sendq
			if gated {
				sendq = nil
			}
			select {
			case frame = <-sendq:
			case ctl := <-c.ctl:
				frame, after = ctl.frame, ctl.after
			case <-c.poke:
				continue
			case <-c.done:
				return
			}
		}
		if _, err := c.in.Write(frame); err != nil {
			c.fail(errs.Wrap(err, errs.GuestSilent, "the guest channel cannot be written").With("uid", c.uid))
			return
		}
		if after != nil {
			after()
		}
	}
}

// owed collects what the writer has to say by itself.
func (c *Conn) owed() (frame []byte, gated bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gated {
		return nil, true
	}
	if c.mustResume {
		c.mustResume = false
		frame, _ = guestwire.AppendMessage(frame, c.ch, 0, &guestwire.Resume{})
	}
	for stream, n := range c.credits {
		frame, _ = guestwire.AppendMessage(frame, c.ch, stream, &guestwire.Credit{Bytes: n})
	}
	clear(c.credits)
	for _, stream := range c.closing {
		frame, _ = guestwire.AppendMessage(frame, c.ch, stream, &guestwire.StreamClose{})
	}
	c.closing = nil
	return frame, false
}

func (c *Conn) wakeWriter() {
	select {
	case c.poke <- struct{}{}:
	default:
	}
}

func (c *Conn) setGate(gated bool) {
	c.mu.Lock()
	c.gated = gated
	c.mu.Unlock()
	c.wakeWriter()
}

func (c *Conn) register(r receiver) (uint32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	for {
		c.next++
		if _, used := c.receivers[c.next]; c.next != 0 && !used {
			c.receivers[c.next] = r
			return c.next, nil
		}
	}
}

func (c *Conn) unregister(stream uint32) {
	c.mu.Lock()
	delete(c.receivers, stream)
	delete(c.credits, stream)
	c.mu.Unlock()
}

// owe gives credit for a stream as soon as the gate is open.
func (c *Conn) owe(stream uint32, n int) {
	c.mu.Lock()
	if _, ok := c.receivers[stream]; ok {
		c.credits[stream] += uint32(n)
	}
	c.mu.Unlock()
	c.wakeWriter()
}

// send queues a request. An error means that nothing of it was sent.
func (c *Conn) send(ctx context.Context, stream uint32, m guestwire.Message) error {
	frame, ok := guestwire.AppendMessage(nil, c.ch, stream, m)
	if !ok {
		return tooLarge()
	}
	return c.queue(ctx, frame)
}

func tooLarge() error {
	return errs.New(errs.LimitExceeded, "the request to the sandbox is larger than 256 KiB; pass large input in a file or on standard input").
		With("field", "args").With("limit", "262144")
}

// queue hands whole frames to the writer. An error means that nothing of them was sent.
func (c *Conn) queue(ctx context.Context, frames []byte) error {
	select {
	case c.sendq <- frames:
		return nil
	case <-ctx.Done():
		return notSent(ctx)
	case <-c.done:
		return c.failure()
	}
}

func (c *Conn) sendControl(ctx context.Context, stream uint32, m guestwire.Message, after func()) error {
	frame, _ := guestwire.AppendMessage(nil, c.ch, stream, m)
	select {
	case c.ctl <- control{frame, after}:
		return nil
	case <-ctx.Done():
		return notSent(ctx)
	case <-c.done:
		return c.failure()
	}
}

// abandon lets the writer tell the guest, when it may, that a stream is no longer wanted.
func (c *Conn) abandon(stream uint32) {
	c.unregister(stream)
	c.mu.Lock()
	c.closing = append(c.closing, stream)
	c.mu.Unlock()
	c.wakeWriter()
}

// buffered tells how many bytes lie unread in a FIFO.
func buffered(f *os.File) (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return n, errors.Join(err, cerr)
}
