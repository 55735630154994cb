package publish_test

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// fault is what the proxy does to the one request that it is armed for.
type fault int

const (
	cutReply   fault = iota // the server gets the request; its reply is dropped and the connection cut
	cutRequest              // the connection is cut after the client sent, before the server got it
	holdback                // the connection is cut, and the server gets the request when release is called
)

// proxy stands between a client and a server's unix socket and breaks chosen exchanges.
type proxy struct {
	Socket string

	upstream string
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]bool
	armed  bool
	fault  fault
	marker []byte
	struck chan struct{}
	held   func()
}

func newProxy(t *testing.T, upstream string) *proxy {
	t.Helper()
	dir, err := os.MkdirTemp("", "dmproxy")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{upstream: upstream, Socket: filepath.Join(dir, "s"), conns: make(map[net.Conn]bool)}
	if p.listener, err = net.Listen("unix", p.Socket); err != nil {
		t.Fatal(err)
	}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		p.listener.Close()
		p.mu.Lock()
		for c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		p.wg.Wait()
		os.RemoveAll(dir)
	})
	return p
}

// arm makes the next script call that holds the marker fail; the channel is closed when it did.
func (p *proxy) arm(f fault, marker string) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed, p.fault, p.marker, p.struck = true, f, []byte(marker), make(chan struct{})
	return p.struck
}

// release lets the server have the request that was held back.
func (p *proxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held()
}

func (p *proxy) strike(request []byte) (fault, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.armed || !bytes.Contains(request, []byte("evalsha")) || !bytes.Contains(request, p.marker) {
		return 0, false
	}
	p.armed = false
	close(p.struck)
	return p.fault, true
}

func (p *proxy) track(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = true
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.track(client)
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("unix", p.upstream)
	if err != nil {
		return
	}
	p.track(server)
	defer server.Close()
	replies := make(chan struct{})
	p.wg.Go(func() { // ends when either side is closed
		defer close(replies)
		_, _ = io.Copy(client, server)
		client.Close()
	})
	request := make([]byte, 1<<20)
	for {
		n, err := client.Read(request)
		if err != nil {
			return
		}
		f, strike := p.strike(request[:n])
		if !strike {
			if _, err := server.Write(request[:n]); err != nil {
				return
			}
			continue
		}
		switch f {
		case cutReply:
			p.applyAlone(request[:n])
		case holdback:
			late := bytes.Clone(request[:n])
			p.mu.Lock()
			p.held = func() { p.applyAlone(late) }
			p.mu.Unlock()
		}
		return
	}
}

// applyAlone sends a request over a connection of its own and waits until the server has replied.
func (p *proxy) applyAlone(request []byte) {
	server, err := net.Dial("unix", p.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	if _, err := server.Write(request); err != nil {
		return
	}
	_, _ = server.Read(make([]byte, 4096))
}
