package app_test

import (
	"net"
	"sync"
	"testing"
)

// blackhole is a TCP connection's way to a server's unix socket that may come to carry nothing: connections stay open, and
// new ones are taken, as when a machine or a router is gone.
type blackhole struct {
	Address string

	listener net.Listener
	socket   string
	wg       sync.WaitGroup
	mu       sync.Mutex
	dark     bool
	conns    map[net.Conn]bool
}

func newBlackhole(t *testing.T, socket string) *blackhole {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &blackhole{Address: l.Addr().String(), listener: l, socket: socket, conns: make(map[net.Conn]bool)}
	b.wg.Go(b.accept)
	t.Cleanup(func() {
		_ = l.Close()
		b.set(false)
		b.wg.Wait()
	})
	return b
}

// set makes it carry nothing, or begin anew: what was open while it was dark is cut.
func (b *blackhole) set(dark bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.dark = dark; dark {
		return
	}
	for c := range b.conns {
		_ = c.Close()
	}
}

func (b *blackhole) isDark() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dark
}

func (b *blackhole) track(c net.Conn, open bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if open {
		b.conns[c] = true
	} else {
		delete(b.conns, c)
	}
}

func (b *blackhole) accept() {
	for {
		client, err := b.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("unix", b.socket)
		if err != nil {
			_ = client.Close()
			continue
		}
		b.track(client, true)
		b.track(server, true)
		var both sync.WaitGroup
		both.Go(func() { b.carry(client, server) })
		both.Go(func() { b.carry(server, client) })
		b.wg.Go(func() {
			both.Wait()
			b.track(client, false)
			b.track(server, false)
		})
	}
}

// carry drops what it reads while it is dark.
func (b *blackhole) carry(to, from net.Conn) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if b.isDark() {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
