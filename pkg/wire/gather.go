package wire

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
)

// TLS gives gRPC's TLS, which sends what is written to it at once in one system call. Go's TLS makes one for each record
// of 16 KiB, and with each the network's whole work for it.
func TLS(cfg *tls.Config) credentials.TransportCredentials { return gathering{credentials.NewTLS(cfg)} }

type gathering struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials.
func (g gathering) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	below := &gathered{Conn: raw}
	conn, info, err := g.TransportCredentials.ClientHandshake(ctx, authority, below)
	return above(conn, below), info, err
}

// ServerHandshake implements credentials.TransportCredentials.
func (g gathering) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	below := &gathered{Conn: raw}
	conn, info, err := g.TransportCredentials.ServerHandshake(below)
	return above(conn, below), info, err
}

// Clone implements credentials.TransportCredentials.
func (g gathering) Clone() credentials.TransportCredentials {
	return gathering{g.TransportCredentials.Clone()}
}

// recordBytes is the most that goes into a record: what is no more is one write anyway.
const recordBytes = 16 << 10

// writer is the connection that gRPC writes to, with TLS and the gathered connection below.
type writer struct {
	net.Conn
	below *gathered
}

func above(conn net.Conn, below *gathered) net.Conn {
	if conn == nil {
		return nil
	}
	return &writer{conn, below}
}

// Write implements net.Conn. TLS writes all records of it, or fails.
func (w *writer) Write(data []byte) (int, error) {
	if len(data) <= recordBytes {
		return w.Conn.Write(data)
	}
	w.below.hold()
	n, err := w.Conn.Write(data)
	if sent := w.below.release(); err == nil && sent != nil {
		return 0, sent
	}
	return n, err
}

// Close implements net.Conn. TLS would say goodbye first, and wait for a peer that takes nothing.
func (w *writer) Close() error {
	if w.below.sending.Load() {
		return w.below.Close()
	}
	return w.Conn.Close()
}

// gathered is the connection below TLS. While it is held, what is written to it is kept.
type gathered struct {
	net.Conn
	mu      sync.Mutex
	held    *[]byte     // nil while it is not held
	sending atomic.Bool // what was held is being written
}

// gatherings are the buffers: of what gRPC writes at a time, and the records' heads and ends.
var gatherings = sync.Pool{New: func() any {
	buf := make([]byte, 0, connBuffer+8<<10)
	return &buf
}}

func (g *gathered) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = gatherings.Get().(*[]byte)
}

func (g *gathered) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	buf := g.held
	g.held = nil
	g.sending.Store(true)
	_, err := g.Conn.Write(*buf)
	g.sending.Store(false)
	*buf = (*buf)[:0]
	gatherings.Put(buf)
	return err
}

// Write implements net.Conn.
func (g *gathered) Write(data []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		return g.Conn.Write(data)
	}
	*g.held = append(*g.held, data...)
	return len(data), nil
}
