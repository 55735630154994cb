// Package portconn makes a net.Conn of a stream of PortService: a connection to a port inside a sandbox.
//
// A chunk at a time is on its way to a reader, so that one that is slow, or reads no more, slows the server inside and holds nothing here but that
// chunk and the stream's window.
package portconn

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Conn is a connection to a port inside a sandbox. It is a net.Conn with a half-close. When a deadline passes during
// a Write the connection is broken: what of it has arrived is not known.
type Conn struct {
	stream grpc.BidiStreamingClient[dormousev1.ForwardPortRequest, dormousev1.ForwardPortResponse]
	cancel context.CancelFunc
	peer   addr

	chunks chan []byte   // from the reader; closed after its last
	done   chan struct{} // closed when the connection is
	failed error         // why chunks was closed; io.EOF is the server's half-close
	rest   []byte        // of a chunk; Read's own
	reads  sync.Mutex
	writes sync.Mutex
	once   sync.Once
	reader sync.WaitGroup

	mu       sync.Mutex
	readEnd  time.Time
	writeEnd time.Time
	changed  chan struct{} // closed when the deadline of Read is another
}

var _ net.Conn = (*Conn)(nil)

// maxChunk bounds what is sent at once.
const maxChunk = 64 << 10

type addr struct {
	sandbox string
	port    int
}

func (addr) Network() string  { return "dormouse" }
func (a addr) String() string { return a.sandbox + ":" + strconv.Itoa(a.port) }

// Open connects to a TCP port inside, also to one that listens on loopback only. ctx bounds connecting; the
// connection lasts until Close. PORT_CLOSED when nothing listens there. Close it.
func Open(ctx context.Context, ports dormousev1.PortServiceClient, sandboxUID string, port int) (*Conn, error) {
	if port < 1 || port > 65535 {
		return nil, errs.New(errs.InvalidField, "port: %d is no port; use 1 to 65535", port).With("field", "port")
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	stream, err := ports.ForwardPort(life)
	if err == nil {
		err = stream.Send(&dormousev1.ForwardPortRequest{Message: &dormousev1.ForwardPortRequest_Open{Open: &dormousev1.ForwardOpen{SandboxUid: sandboxUID, Port: uint32(port)}}})
		if err == nil || errors.Is(err, io.EOF) {
			_, err = stream.Recv() // opened, or why not
		}
	}
	if !stop() {
		err = errs.From(context.Cause(ctx))
	}
	if err != nil {
		cancel()
		if errors.Is(err, io.EOF) {
			err = errs.New(errs.ReplyLost, "the connection ended before it was open")
		}
		return nil, err
	}
	c := &Conn{stream: stream, cancel: cancel, peer: addr{sandboxUID, port}, chunks: make(chan []byte), done: make(chan struct{}), changed: make(chan struct{})}
	c.reader.Go(c.receive)
	return c, nil
}

// receive hands on what comes, one chunk at a time, so that a slow reader slows the server inside.
func (c *Conn) receive() {
	defer close(c.chunks)
	for {
		msg, err := c.stream.Recv()
		if err == nil && msg.GetEnd() != nil {
			err = io.EOF
		}
		if err != nil {
			c.failed = err
			return
		}
		if len(msg.GetData()) == 0 {
			continue
		}
		select {
		case c.chunks <- msg.GetData():
		case <-c.done:
			c.failed = net.ErrClosed
			return
		}
	}
}

// Read implements net.Conn, as the following do.
func (c *Conn) Read(p []byte) (int, error) {
	c.reads.Lock()
	defer c.reads.Unlock()
	for len(c.rest) == 0 {
		c.mu.Lock()
		end, changed := c.readEnd, c.changed
		c.mu.Unlock()
		var timeout <-chan time.Time
		if !end.IsZero() {
			timer := time.NewTimer(time.Until(end))
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-c.done:
			return 0, net.ErrClosed
		case <-timeout:
			return 0, os.ErrDeadlineExceeded
		case <-changed:
			continue
		case chunk, ok := <-c.chunks:
			if !ok {
				return 0, c.failed
			}
			c.rest = chunk
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write sends all of p.
func (c *Conn) Write(p []byte) (int, error) {
	c.writes.Lock()
	defer c.writes.Unlock()
	c.mu.Lock()
	end := c.writeEnd
	c.mu.Unlock()
	if !end.IsZero() {
		left := time.Until(end)
		if left <= 0 {
			return 0, os.ErrDeadlineExceeded
		}
		late := time.AfterFunc(left, c.cancel)
		defer late.Stop()
	}
	sent := 0
	for sent < len(p) {
		chunk := p[sent:min(sent+maxChunk, len(p))]
		if err := c.stream.Send(&dormousev1.ForwardPortRequest{Message: &dormousev1.ForwardPortRequest_Data{Data: chunk}}); err != nil {
			if !end.IsZero() && !time.Now().Before(end) {
				err = os.ErrDeadlineExceeded
			} else if errors.Is(err, io.EOF) {
				err = io.ErrClosedPipe // Read has the reason
			}
			return sent, err
		}
		sent += len(chunk)
	}
	return sent, nil
}

// CloseWrite closes the half that is written to; the other goes on.
func (c *Conn) CloseWrite() error {
	c.writes.Lock()
	defer c.writes.Unlock()
	return c.stream.CloseSend()
}

// Close ends both directions and waits for what runs for the connection.
func (c *Conn) Close() error {
	c.once.Do(func() {
		close(c.done)
		c.cancel()
		c.reader.Wait()
	})
	return nil
}

// LocalAddr is the same as RemoteAddr: the client has no address inside.
func (c *Conn) LocalAddr() net.Addr { return c.peer }

// RemoteAddr names the sandbox and the port.
func (c *Conn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline is for Reads that wait now too.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readEnd = t
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

// SetWriteDeadline is for Writes that begin from now on.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeEnd = t
	return nil
}
