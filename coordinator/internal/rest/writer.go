package rest

import (
	"bufio"
	"net"
	"net/http"
	"sync"
	"time"
)

// patientWriter is a response that a client has to go on reading: one that takes nothing for too long is cut. A connection
// that became another protocol's is held to the same.
type patientWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	idle    time.Duration
	taken   *hijacked
}

func patient(w http.ResponseWriter, idle time.Duration, taken *hijacked) *patientWriter {
	return &patientWriter{ResponseWriter: w, control: http.NewResponseController(w), idle: idle, taken: taken}
}

// Unwrap is for http.ResponseController.
func (w *patientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *patientWriter) Write(b []byte) (int, error) {
	_ = w.control.SetWriteDeadline(time.Now().Add(w.idle)) // a writer without deadlines has nobody who could be slow
	return w.ResponseWriter.Write(b)
}

// done leaves the connection to the next request.
func (w *patientWriter) done() { _ = w.control.SetWriteDeadline(time.Time{}) }

// Hijack implements http.Hijacker.
func (w *patientWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := w.control.Hijack()
	if err != nil {
		return nil, nil, err
	}
	return w.taken.add(&patientConn{Conn: conn, idle: w.idle, taken: w.taken}), rw, nil
}

type patientConn struct {
	net.Conn
	idle  time.Duration
	taken *hijacked
}

func (c *patientConn) Write(b []byte) (int, error) {
	if err := c.Conn.SetWriteDeadline(time.Now().Add(c.idle)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *patientConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Conn.Close()
}

func (c *patientConn) Close() error {
	c.taken.remove(c)
	return c.Conn.Close()
}

// hijacked are the connections that the HTTP server no longer knows.
type hijacked struct {
	mu    sync.Mutex
	over  bool
	conns map[*patientConn]struct{}
}

func (h *hijacked) add(c *patientConn) *patientConn {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		_ = c.Conn.Close() // who uses it finds out
		return c
	}
	if h.conns == nil {
		h.conns = make(map[*patientConn]struct{})
	}
	h.conns[c] = struct{}{}
	return c
}

func (h *hijacked) remove(c *patientConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.conns, c)
}

// close closes all, and those that come.
func (h *hijacked) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	for c := range h.conns {
		_ = c.Conn.Close() // it has an end either way
	}
}
