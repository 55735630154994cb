package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const protocol = "dormouse.attach.v1"

// wired is one WebSocket.
type wired struct {
	t    *testing.T
	ctx  context.Context //nolint:containedctx // of the test
	conn *websocket.Conn
}

// socket opens a WebSocket of the web's sandbox with a header and subprotocols.
func (w *web) socket(header http.Header, subprotocols ...string) (*wired, http.Header, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w.t.Cleanup(cancel)
	conn, resp, err := websocket.Dial(ctx, "https://"+w.app.Addresses("rest")[0]+"/v1/sandboxes/"+w.uid+"/attach", //nolint:bodyclose // it needs no closing, by its contract
		&websocket.DialOptions{HTTPClient: w.client, HTTPHeader: header, Subprotocols: subprotocols})
	if err == nil {
		w.t.Cleanup(func() { _ = conn.CloseNow() })
		conn.SetReadLimit(1 << 20)
	}
	var head http.Header
	if resp != nil {
		head = resp.Header
	}
	return &wired{w.t, ctx, conn}, head, err
}

// at opens one with the user's key.
func (w *web) at(first string) *wired {
	w.t.Helper()
	c, _, err := w.socket(http.Header{"Authorization": {"Bearer " + w.user}}, protocol)
	if err != nil {
		w.t.Fatal(err)
	}
	c.text(first)
	return c
}

func (c *wired) text(text string) {
	c.t.Helper()
	if err := c.conn.Write(c.ctx, websocket.MessageText, []byte(text)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *wired) input(data []byte) {
	c.t.Helper()
	if err := c.conn.Write(c.ctx, websocket.MessageBinary, append([]byte{0}, data...)); err != nil {
		c.t.Fatal(err)
	}
}

// event reads the next text message that has the field, and gives it; output and the others before it are left out.
func (c *wired) event(field string) map[string]any {
	c.t.Helper()
	for {
		kind, data, err := c.conn.Read(c.ctx)
		if err != nil {
			c.t.Fatalf("no %s: %v", field, err)
		}
		var m map[string]map[string]any
		if kind == websocket.MessageText && json.Unmarshal(data, &m) == nil && m[field] != nil {
			return m[field]
		}
	}
}

// hears reads output until all of it is there.
func (c *wired) hears(channel byte, want []byte) {
	c.t.Helper()
	var got []byte
	for len(got) < len(want) {
		kind, data, err := c.conn.Read(c.ctx)
		if err != nil {
			c.t.Fatal(err)
		}
		if kind == websocket.MessageBinary && data[0] == channel {
			got = append(got, data[1:]...)
		}
	}
	if !bytes.Equal(got, want) {
		c.t.Fatalf("heard %d bytes, %.40q; want %.40q", len(got), got, want)
	}
}

// ends reads until the connection is closed.
func (c *wired) ends(code int, reason string) {
	c.t.Helper()
	for {
		_, _, err := c.conn.Read(c.ctx)
		if err == nil {
			continue
		}
		var closed websocket.CloseError
		if !errors.As(err, &closed) || int(closed.Code) != code || closed.Reason != reason && code >= 4000 {
			c.t.Fatalf("%v; want %d %s", err, code, reason)
		}
		return
	}
}

// TestSocketExec: a process that the first message starts: input, output, a resize, the end of input, the exit.
func TestSocketExec(t *testing.T) {
	w := newWeb(t)
	c := w.at(`{"start": {"spec": {"argv": ["cat"], "stdin": true}}}`)
	if got := c.event("opened"); got["process"].(map[string]any)["process_id"] != "started" {
		t.Fatalf("%v", got)
	}
	c.text(`{"resize": {"rows": 30, "cols": 100}}`)
	c.hears(2, []byte("30 by 100"))
	big := bytes.Repeat([]byte("x"), 64<<10)
	for range 16 { // more than may be on its way
		c.input(big)
		c.hears(1, big)
	}
	c.text(`{"input": {"data": "aGVsbG8=", "eof": true}}`)
	c.hears(1, []byte("hello"))
	if got := c.event("exit"); got["code"] != 7.0 {
		t.Errorf("exit %v", got)
	}
	c.ends(1000, "")

	c = w.at(`{"start": {"spec": {"argv": ["sh"], "terminal": {}}, "process_id": "mine"}, "open": {"input": true}}`)
	if got := c.event("opened"); got["process"].(map[string]any)["process_id"] != "mine" {
		t.Fatalf("%v", got)
	}
	c.text(`{"signal": {"signal": 15, "tree": true}}`)
	if got := c.event("exit"); got["code"] != 143.0 || got["signal"] != 15.0 {
		t.Errorf("exit %v", got)
	}
	c.ends(1000, "")
}

// TestSocketAttach: a gap is told with its size, input goes on from the offset that the process has.
func TestSocketAttach(t *testing.T) {
	w := newWeb(t)
	c := w.at(`{"open": {"process_id": "p9", "stdout_offset": "100", "input": true, "writer": "me", "resume": true}}`)
	if got := c.event("opened"); got["input_offset"] != "3" {
		t.Fatalf("%v", got)
	}
	if got := c.event("output"); got["gap_bytes"] != "5" || got["offset"] != "105" || got["stream"] != "OUTPUT_STREAM_STDOUT" {
		t.Fatalf("%v", got)
	}
	c.hears(1, []byte("after"))
	c.input([]byte("more"))
	c.hears(1, []byte("more"))
	if got := c.event("input"); got["accepted_offset"] != "7" {
		t.Fatalf("%v", got)
	}

}

// TestSocketSlowProcess: input that the process does not take waits, and the client is not taken for dead for what it cannot be asked meanwhile.
func TestSocketSlowProcess(t *testing.T) {
	const pieces, piece = 8, 60 << 10 // twice what may be on its way
	try := func(ping time.Duration) bool {
		w := newWeb(t, func(c *app.Config) { c.WebSocket.Ping = ping })
		slow := w.at(`{"open": {"process_id": "greedy", "input": true}}`)
		all := make(chan bool, 1)
		go func() {
			for {
				_, data, err := slow.conn.Read(slow.ctx)
				if err != nil || strings.Contains(string(data), fmt.Sprintf(`"accepted_offset":"%d"`, pieces*piece)) {
					all <- err == nil
					return
				}
			}
		}()
		for range pieces {
			if slow.conn.Write(slow.ctx, websocket.MessageBinary, make([]byte, 1+piece)) != nil {
				return false
			}
		}
		<-time.After(5 * ping)
		select {
		case w.node.feed <- struct{}{}:
			return <-all
		case <-all:
			return false
		}
	}
	// On a machine that stands still for so long a client may be taken for dead before its input waits.
	for ping := 100 * time.Millisecond; ping < 20*time.Second; ping *= 2 {
		if try(ping) {
			return
		}
	}
	t.Error("who waits for the process is taken for dead")
}

// TestSocketEnds: what is wrong is told in a message and in the code that the connection is closed with.
func TestSocketEnds(t *testing.T) {
	w := newWeb(t)
	for name, c := range map[string]struct {
		first, then string
		code        int
		reason      string
	}{
		"no object":          {`[]`, "", 4400, "INVALID_FIELD"},
		"an empty one":       {`{}`, "", 4400, "INVALID_FIELD"},
		"two":                {`{"open": {"process_id": "p"}} {}`, "", 4400, "INVALID_FIELD"},
		"an unknown field":   {`{"open": {"process": "p"}}`, "", 4400, "UNKNOWN_FIELD"},
		"another sandbox":    {`{"open": {"process_id": "p", "sandbox_uid": "` + uid.New() + `"}}`, "", 4400, "INVALID_FIELD"},
		"two processes":      {`{"start": {"spec": {"argv": ["cat"]}}, "open": {"process_id": "p"}}`, "", 4400, "INVALID_FIELD"},
		"no such process":    {`{"open": {"process_id": "absent"}}`, "", 4404, "PROCESS_NOT_FOUND"},
		"no such command":    {`{"start": {"spec": {"argv": ["missing"]}}}`, "", 4400, "COMMAND_NOT_FOUND"},
		"opened twice":       {`{"open": {"process_id": "p"}}`, `{"open": {"process_id": "p"}}`, 4400, "INVALID_FIELD"},
		"nothing":            {`{"open": {"process_id": "p"}}`, `{}`, 4400, "INVALID_FIELD"},
		"not to write":       {`{"open": {"process_id": "p"}}`, `{"input": {"eof": true}}`, 4400, "INVALID_FIELD"},
		"an offset":          {`{"open": {"process_id": "p", "input": true}}`, `{"input": {"offset": "9", "eof": true}}`, 4400, "INVALID_FIELD"},
		"an unknown message": {`{"open": {"process_id": "p"}}`, `{"resise": {}}`, 4400, "UNKNOWN_FIELD"},
	} {
		t.Run(name, func(t *testing.T) {
			s := w.at(c.first)
			s.t = t
			if c.then != "" {
				s.text(c.then)
			}
			if e := s.event("error"); e["reason"] != c.reason || e["message"] == "" || e["request_id"] == "" {
				t.Errorf("%v", e)
			}
			s.ends(c.code, c.reason)
		})
	}
	s := w.at(`{"open": {"process_id": "p", "input": true}}`)
	_ = s.event("opened")
	if err := s.conn.Write(s.ctx, websocket.MessageBinary, []byte{1, 'x'}); err != nil {
		t.Fatal(err)
	}
	s.ends(4400, "INVALID_FIELD")
	s = w.at(`{"open": {"process_id": "p", "input": true}}`)
	_ = s.event("opened")
	s.input(make([]byte, 64<<10+1))
	s.ends(1009, "")
	if _, err := dormousev1.NewSandboxServiceClient(w.conn(w.user)).PauseSandbox(s.ctx, &dormousev1.PauseSandboxRequest{Uid: w.uid}); err != nil {
		t.Fatal(err)
	}
	s = w.at(`{"open": {"process_id": "p"}}`)
	s.ends(4409, "SANDBOX_PAUSED")
}

// TestSocketDoor: who may open one, and that it is refused before it is one.
func TestSocketDoor(t *testing.T) {
	w := newWeb(t, func(c *app.Config) {
		c.Tickets.Keys = filepath.Join(t.TempDir(), "tickets.yaml")
		c.WebSocket.Origins = []string{"https://app.example.com"}
	})
	keys, err := ticket.OpenKeys(w.cfg.Tickets.Keys, nil)
	if err != nil {
		t.Fatal(err)
	}
	strange, err := ticket.OpenKeys(filepath.Join(t.TempDir(), "others.yaml"), nil)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(k *ticket.Keys, tenant, sandbox string, life time.Duration, v dataplane.Verb) string {
		text, err := k.Issue(tenant, sandbox, "n1", []dataplane.Verb{v}, life)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	issued, err := dormousev1.NewTicketServiceClient(w.conn(w.user)).IssueTicket(context.Background(), &dormousev1.IssueTicketRequest{SandboxUid: w.uid})
	if err != nil || issued.GetAddress() != "" || issued.GetTicket() == "" {
		t.Fatalf("a node without a listener for clients: %v, %v", issued, err)
	}
	key := http.Header{"Authorization": {"Bearer " + w.user}}
	from := func(origin string) http.Header { return http.Header{"Origin": {origin}} }
	good, p := issued.GetTicket(), dataplane.Process
	for name, c := range map[string]struct {
		header  http.Header
		offered []string
		reason  string // "": it is opened
	}{
		"a key":                       {key, []string{protocol}, ""},
		"a ticket":                    {nil, []string{protocol, good}, ""},
		"a ticket, of a known origin": {from("https://app.example.com"), []string{protocol, good}, ""},
		"of the own origin":           {from("https://" + w.app.Addresses("rest")[0]), []string{protocol, good}, ""},
		"of another origin":           {from("https://example.com"), []string{protocol, good}, "NOT_ALLOWED"},
		"of no origin":                {from("null"), []string{protocol, good}, "NOT_ALLOWED"},
		"nothing":                     {nil, []string{protocol}, "CREDENTIALS_MISSING"},
		"both":                        {key, []string{protocol, good}, "CREDENTIALS_INVALID"},
		"no protocol":                 {key, nil, "INVALID_FIELD"},
		"another protocol":            {key, []string{"chat"}, "INVALID_FIELD"},
		"another tenant":              {http.Header{"Authorization": {"Bearer " + w.other}}, []string{protocol}, "OBJECT_NOT_FOUND"},
		"expired":                     {nil, []string{protocol, sign(keys, "acme", w.uid, -time.Second, p)}, "TICKET_INVALID"},
		"another's key":               {nil, []string{protocol, sign(strange, "acme", w.uid, time.Minute, p)}, "TICKET_INVALID"},
		"for another sandbox":         {nil, []string{protocol, sign(keys, "acme", uid.New(), time.Minute, p)}, "NOT_ALLOWED"},
		"for files":                   {nil, []string{protocol, sign(keys, "acme", w.uid, time.Minute, dataplane.File)}, "NOT_ALLOWED"},
		"another tenant's ticket":     {nil, []string{protocol, sign(keys, "rival", w.uid, time.Minute, p)}, "OBJECT_NOT_FOUND"},
	} {
		s, head, err := w.socket(c.header, c.offered...)
		if c.reason != "" {
			if err == nil || head.Get("Dormouse-Error") != c.reason {
				t.Errorf("%s: %v, %v; want %s", name, head, err, c.reason)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.text(`{"open": {"process_id": "p", "input": true}}`)
		s.input([]byte("hello"))
		s.hears(1, []byte("hello"))
	}
	if code, reason := plain(t, w), "INVALID_FIELD"; code != fmt.Sprint(http.StatusBadRequest, reason) {
		t.Errorf("a request that is no upgrade: %s", code)
	}
}

func plain(t *testing.T, w *web) string {
	req, err := http.NewRequest("GET", "https://"+w.app.Addresses("rest")[0]+"/v1/sandboxes/"+w.uid+"/attach", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+w.user)
	resp, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return fmt.Sprint(resp.StatusCode, resp.Header.Get("Dormouse-Error"))
}

// TestSocketSilent: a client that gives no sign of life is cut, and the process is left alone.
func TestSocketSilent(t *testing.T) {
	for ping := 100 * time.Millisecond; ; ping *= 2 { // until that is long enough for the node to hear of the client before it is taken for dead
		w := newWeb(t, func(c *app.Config) { c.WebSocket.Ping = ping })
		_ = w.at(`{"open": {"process_id": "p"}}`) // it reads nothing, so it answers nothing
		late := time.After(20 * ping)
		for came := false; !came; {
			select {
			case <-time.After(time.Millisecond):
				came = w.node.came.Load() == 1
				continue
			case <-late:
			}
			break
		}
		if w.node.came.Load() == 1 {
			eventually(t, "it is cut", func() bool { return w.node.there.Load() == 0 })
			return
		}
		if ping > 20*time.Second {
			t.Fatal("the node never hears of it")
		}
	}
}

// TestSocketOfWhoDoesNotRead: a client that reads nothing while the process talks holds up neither another nor the coordinator's end, which
// tells those that listen.
func TestSocketOfWhoDoesNotRead(t *testing.T) {
	w := newWeb(t)
	silent := w.at(`{"open": {"process_id": "flood"}}`)
	_ = silent.event("opened")
	c := w.at(`{"open": {"process_id": "p", "input": true}}`)
	_ = c.event("opened")
	c.input([]byte("hello"))
	c.hears(1, []byte("hello"))
	w.app.Stop()
	if e := c.event("error"); e["message"] == "" {
		t.Errorf("%v", e)
	}
	_, _, err := c.conn.Read(c.ctx)
	if websocket.CloseStatus(err) < 4000 {
		t.Errorf("the end of the coordinator: %v", err)
	}
}
