package robustness

import (
	"bytes"
	"errors"
	"net"
	"os"
	"regexp"
	"sync"
	"sync/atomic"
	"time"
)

// link is a way from one coordinator to the server, which the faults cut, slow down and hold up.
type link struct {
	socket, upstream string
	listener         net.Listener
	wg               sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	conns   map[net.Conn]bool // false: not to be cut now
	trap    *trap
	losing  *firsts
	refuse  bool          // new connections end at once
	mute    bool          // requests reach the server, its replies are dropped
	delay   time.Duration // before each reply
	tearing int           // so many of the next replies are torn and their connections reset
}

func newLink(socket, upstream string) (*link, error) {
	l := &link{socket: socket, upstream: upstream, conns: make(map[net.Conn]bool)}
	var err error
	if l.listener, err = net.Listen("unix", socket); err != nil {
		return nil, err
	}
	l.wg.Go(l.accept)
	return l, nil
}

func (l *link) close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	err := l.listener.Close()
	l.cut()
	l.wg.Wait()
	return err
}

// cut ends all connections but one whose request is held up; new ones are made as they come.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cutAll()
}

// cutAll wants the lock.
func (l *link) cutAll() {
	for c, may := range l.conns {
		if may {
			c.Close()
		}
	}
}

// trap waits for one request, the first with its mark. It is delivered once it may be; its reply is lost.
type trap struct {
	mark []byte
	// alone: from then on nothing else passes the link, until it is told otherwise.
	alone                    bool
	caught, deliver, replied chan struct{}
}

// lay sets a trap. The caller closes deliver in any case.
func (l *link) lay(mark string, alone bool) *trap {
	t := &trap{[]byte(mark), alone, make(chan struct{}), make(chan struct{}), make(chan struct{})}
	l.set(func(l *link) { l.trap = t })
	return t
}

// lift takes the trap away, and tells whether it has caught something.
func (l *link) lift(t *trap) bool {
	l.set(func(l *link) { l.trap = nil })
	select {
	case <-t.caught:
		return true
	default:
		return false
	}
}

// catches gives the trap that a request is caught by, and protects the connections that it takes from cuts.
func (l *link) catches(request []byte, takes ...net.Conn) *trap {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.trap
	if t == nil || !bytes.Contains(request, t.mark) {
		return nil
	}
	l.trap = nil
	for _, c := range takes {
		l.conns[c] = false
	}
	if t.alone {
		l.refuse = true
		l.cutAll()
	}
	close(t.caught)
	return t
}

// firsts are the requests that are the first to write some revision of the record of that name. They are lost with their connections, and
// what is sent in their place is not.
type firsts struct {
	mu    sync.Mutex
	write *regexp.Regexp
	seen  map[string]bool
}

func firstsOf(name string) *firsts {
	// The arguments of a put: its key, the revision that it expects, its name.
	return &firsts{write: regexp.MustCompile(`\r\n(\d+)\r\n\$\d+\r\n` + regexp.QuoteMeta(name) + `\r\n`), seen: make(map[string]bool)}
}

func (f *firsts) is(request []byte) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.write.FindSubmatch(request)
	if m == nil || f.seen[string(m[1])] {
		return false
	}
	f.seen[string(m[1])] = true
	return true
}

// count is how many were lost.
func (f *firsts) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.seen)
}

// loses tells whether the request is lost.
func (l *link) loses(request []byte) bool {
	l.mu.Lock()
	f := l.losing
	l.mu.Unlock()
	return f != nil && f.is(request)
}

// set changes how it treats what passes.
func (l *link) set(change func(*link)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
}

// track remembers a connection, unless the link takes none.
func (l *link) track(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.refuse {
		return false
	}
	l.conns[c] = true
	return true
}

func (l *link) forget(c net.Conn) {
	c.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}

func (l *link) accept() {
	for {
		c, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !l.track(c) {
			if c != nil {
				c.Close()
			}
			continue
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

func (l *link) serve(client net.Conn) {
	defer l.forget(client)
	server, err := net.Dial("unix", l.upstream)
	if err != nil {
		return
	}
	defer l.forget(server)
	if !l.track(server) {
		return
	}
	var caughtBy atomic.Pointer[trap]
	l.wg.Go(func() { // ends when either side is closed
		defer client.Close()
		defer server.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if t := caughtBy.Load(); t != nil {
				close(t.replied)
				return
			}
			if n > 0 && !l.pass(client, buf[:n]) {
				return
			}
			if err != nil {
				return
			}
		}
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if n > 0 {
			if l.loses(buf[:n]) {
				return
			}
			if t := l.catches(buf[:n], client, server); t != nil {
				<-t.deliver
				caughtBy.Store(t)
			}
			if _, err := server.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass hands a piece of a reply on, as the faults allow. False ends the connection.
func (l *link) pass(client net.Conn, piece []byte) bool {
	l.mu.Lock()
	delay, mute, tear := l.delay, l.mute, false
	if !mute && l.tearing > 0 {
		l.tearing--
		tear = true
	}
	l.mu.Unlock()
	switch {
	case mute:
		return true
	case tear:
		_, _ = client.Write(piece[:len(piece)/2]) // it ends in the middle, whatever comes of it
		return false
	}
	if delay > 0 {
		timer := time.NewTimer(delay) // longer by this is what the fault is for
		<-timer.C
	}
	_, err := client.Write(piece)
	return err == nil || errors.Is(err, os.ErrDeadlineExceeded)
}
