package integration

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// socket is a WebSocket at a process.
type socket struct {
	*world
	*websocket.Conn
	out  [3]string // heard of each channel
	last map[string]map[string]any
}

// socket opens one with what says who asks, and sends the first message.
func (w *world) socket(uid, first string, header http.Header, subprotocols ...string) *socket {
	w.Helper()
	conn, _, err := w.dialSocket(uid, header, subprotocols...) //nolint:bodyclose // it needs no closing, by its contract
	w.ok(err)
	w.Cleanup(func() { _ = conn.CloseNow() })
	conn.SetReadLimit(1 << 20)
	s := &socket{world: w, Conn: conn}
	s.text(first)
	return s
}

func (w *world) dialSocket(uid string, header http.Header, subprotocols ...string) (*websocket.Conn, *http.Response, error) {
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", w.RESTSocket())
	}}}
	defer hc.CloseIdleConnections()
	return websocket.Dial(w.ctx, "http://dormouse/v1/sandboxes/"+uid+"/attach",
		&websocket.DialOptions{HTTPClient: hc, HTTPHeader: header, Subprotocols: append(subprotocols, "dormouse.attach.v1")})
}

func (w *world) keyed(uid, first string) *socket {
	w.Helper()
	return w.socket(uid, first, http.Header{"Authorization": {"Bearer " + w.key}})
}

func (s *socket) text(text string) {
	s.Helper()
	s.ok(s.Conn.Write(s.ctx, websocket.MessageText, []byte(text)))
}

func (s *socket) input(text string) {
	s.Helper()
	s.ok(s.Conn.Write(s.ctx, websocket.MessageBinary, append([]byte{0}, text...)))
}

// until reads until the condition holds; what ends the connection before is an error of the test.
func (s *socket) until(what string, cond func() bool) {
	s.Helper()
	for s.last = nil; !cond(); {
		kind, data, err := s.Conn.Read(s.ctx)
		if err != nil {
			s.Fatalf("%s: %v; heard %q", what, err, s.out)
		}
		if kind == websocket.MessageBinary {
			s.out[data[0]] += string(data[1:])
			continue
		}
		s.last = nil
		s.ok(json.Unmarshal(data, &s.last))
	}
}

func (s *socket) event(name string) map[string]any {
	s.Helper()
	s.until(name, func() bool { return s.last[name] != nil })
	return s.last[name]
}

func (s *socket) hears(text string) {
	s.Helper()
	s.until(text, func() bool { return strings.Contains(s.out[1], text) })
}

func (s *socket) ends(code int, reason string) {
	s.Helper()
	for {
		_, _, err := s.Conn.Read(s.ctx)
		var closed websocket.CloseError
		if errors.As(err, &closed) && int(closed.Code) == code && closed.Reason == reason {
			return
		}
		if err != nil {
			s.Fatalf("%v; want %d %s", err, code, reason)
		}
	}
}

// TestSocketShell: a shell on a terminal over a WebSocket: its size, a change of it, and the code that it ends with.
func TestSocketShell(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	c := w.keyed(s.UID, `{"start": {"spec": {"argv": ["sh"], "terminal": {"rows": 30, "cols": 100}}}}`)
	_ = c.event("opened")
	c.input("stty size\n")
	c.hears("30 100")
	c.text(`{"resize": {"rows": 40, "cols": 120}}`)
	c.input("trap 'stty size' WINCH; stty size\n")
	c.hears("40 120")
	c.input("exit 5\n")
	if got := c.event("exit"); got["code"] != 5.0 {
		t.Errorf("exit %v", got)
	}
	c.ends(1000, "")
}

// TestSocketAcrossFreezes: output and input go on through a pause, a checkpoint and a lost connection, byte for byte; the newest
// writer ends the one before; a restored copy has the same process, at the offset that was reached.
func TestSocketAcrossFreezes(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	c := w.keyed(s.UID, `{"start": {"spec": {"argv": ["cat"], "stdin": true}, "process_id": "echo"}}`)
	_ = c.event("opened")
	c.input("one\n")
	c.hears("one\n")
	w.ok(s.Pause(w.ctx, ""))
	c.input("two\n")
	w.ok(s.Resume(w.ctx, ""))
	c.hears("two\n")
	snap := w.checkpoint(s)
	c.input("three\n")
	c.hears("three\n")
	w.ok(c.Conn.CloseNow())

	c = w.keyed(s.UID, `{"open": {"process_id": "echo", "stdout_offset": "4", "input": true}}`)
	if got := c.event("opened"); got["input_offset"] != "14" {
		t.Errorf("opened %v", got)
	}
	c.hears("two\nthree\n")
	if c.out[1] != "two\nthree\n" {
		t.Errorf("from offset 4: %q", c.out[1])
	}
	newest := w.keyed(s.UID, `{"open": {"process_id": "echo", "stdout_offset": "14", "input": true}}`)
	_ = newest.event("opened")
	c.ends(4409, "INPUT_TAKEN")
	newest.text(`{"input": {"eof": true}}`)
	if got := newest.event("exit"); got["code"] != nil {
		t.Errorf("exit %v", got)
	}
	newest.ends(1000, "")

	copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	c = w.keyed(copied.UID, `{"open": {"process_id": "echo", "stdout_offset": "8", "input": true}}`)
	_ = c.event("opened")
	c.input("here\n")
	c.hears("here\n")
}

// TestSocketTicket: a page that cannot send headers shows a ticket as a subprotocol.
func TestSocketTicket(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	a := w.rest(w.key, "POST", "/v1/sandboxes/"+s.UID+"/tickets", `{"verbs": ["TICKET_VERB_PROCESS"]}`)
	var got struct{ Ticket string }
	w.ok(json.Unmarshal(a.body, &got))
	c := w.socket(s.UID, `{"start": {"spec": {"argv": ["echo", "hello"]}}}`, http.Header{"Origin": {"http://dormouse"}}, got.Ticket)
	c.hears("hello\n")
	_ = c.event("exit")
	c.ends(1000, "")
}
