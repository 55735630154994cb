package app_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// inside is an HTTP server as a guest may have one.
func inside(t *testing.T) *httptest.Server {
	mux := http.NewServeMux()
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "the guest's")
		w.Header().Set("Dormouse-Error", "NO_LEADER")
		w.Header().Set("Service-Worker-Allowed", "/")
		_ = json.NewEncoder(w).Encode(map[string]any{"uri": r.RequestURI, "host": r.Host, "header": r.Header, "method": r.Method})
	})
	mux.HandleFunc("/sum", func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		w.Header().Set("Trailer", "X-Size")
		_, _ = fmt.Fprintf(w, "%x %v", h.Sum(nil), err)
		w.Header().Set("X-Size", fmt.Sprint(n))
	})
	mux.HandleFunc("/login", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "session", Value: "1", Path: "/", Domain: "example.com", HttpOnly: true})
		http.Redirect(w, r, r.URL.Query().Get("to"), http.StatusSeeOther)
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Large", strings.Repeat("x", 128<<10)) })
	mux.HandleFunc("/cut", func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.Close() // the point of it
		}
	})
	mux.HandleFunc("/silent", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/up", func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(conn, rw)
	})
	mux.HandleFunc("/flood", func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		for err = rw.Flush(); err == nil; {
			_, err = conn.Write(make([]byte, 32<<10))
		}
	})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(r); pattern != "" && r.URL.Path == pattern {
			mux.ServeHTTP(w, r)
		} else {
			echo(w, r) // of a path that a multiplexer would redirect, too
		}
	}))
	t.Cleanup(srv.Close)
	return srv
}

// web is a rig with a sandbox that exposes port 8080, where inside listens, and 9090, where nobody does.
type web struct {
	*rig
	node   *fakeNode
	uid    string
	client *http.Client
}

func newWeb(t *testing.T, change ...func(*app.Config)) *web {
	w := &web{rig: newRig(t, change...)}
	w.node = w.rig.node("n1")
	srv := inside(t)
	w.node.ports[8080], w.node.ports[7070] = srv.Listener.Addr().String(), srv.Listener.Addr().String()
	req := box("one")
	req.Spec.ExposedPorts = []uint32{8080, 9090}
	made, err := dormousev1.NewSandboxServiceClient(w.conn(w.user)).CreateSandbox(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	w.uid = made.GetSandbox().GetMeta().GetUid()
	w.client = &http.Client{Transport: &http.Transport{TLSClientConfig: w.trust()}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(w.client.CloseIdleConnections)
	return w
}

func (w *web) trust() *tls.Config {
	return mustOpen(w.t, pki.Files{CA: w.cfg.TLS.CA}).Client(pki.RoleCoordinator, "")
}

// ask makes a request below a port, with the user's key, and gives the answer with its body read.
func (w *web) ask(method, port, path string, body io.Reader, header ...string) (head, string) {
	w.t.Helper()
	req, err := http.NewRequest(method, "https://"+w.app.Addresses("rest")[0]+"/v1/sandboxes/"+w.uid+"/ports/"+port+path, body)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+w.user)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	resp, err := w.client.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return head{resp.StatusCode, resp.Header, resp.Trailer}, string(got)
}

// head is an answer without its body.
type head struct {
	StatusCode      int
	Header, Trailer http.Header
}

// TestPortRoute: what the guest's server is asked, and what the client is answered.
func TestPortRoute(t *testing.T) {
	w := newWeb(t)
	const path = "/a//b/%2F../c%20d?q=1;2&x=%zz"
	resp, body := w.ask("GET", "8080", path, nil, "Cookie", "own=1", "X-Guest-Authorization", "Basic abc", "X-Forwarded-For", "1.2.3.4", "Connection", "X-Hop", "X-Hop", "1", "Keep-Alive", "5")
	var seen struct {
		URI, Host, Method string
		Header            http.Header
	}
	if err := json.Unmarshal([]byte(body), &seen); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if seen.URI != path || seen.Host != "localhost:8080" {
		t.Errorf("the guest was asked for %s at %s", seen.URI, seen.Host)
	}
	prefix := "/v1/sandboxes/" + w.uid + "/ports/8080"
	for name, want := range map[string]string{"Cookie": "own=1", "Authorization": "Basic abc", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https",
		"X-Forwarded-Host": w.app.Addresses("rest")[0], "X-Forwarded-Prefix": prefix, "X-Hop": "", "Keep-Alive": "", "Connection": "", "X-Guest-Authorization": "",
		"X-Request-Id": resp.Header.Get("X-Request-Id")} {
		if got := strings.Join(seen.Header.Values(name), "|"); got != want {
			t.Errorf("the guest sees %s: %q, want %q", name, got, want)
		}
	}
	if strings.Contains(body, w.user) {
		t.Error("the guest sees the API key")
	}
	if resp.Header.Get("Dormouse-Error") != "" || resp.Header.Get("Service-Worker-Allowed") != "" || len(resp.Header.Values("X-Request-Id")) != 1 || resp.Header.Get("Content-Security-Policy") != "" {
		t.Errorf("the client sees %v", resp.Header)
	}

	// Bodies both ways, larger than all windows, with a trailer.
	big := bytes.Repeat([]byte("dormouse"), 1<<20)
	resp, body = w.ask("PUT", "8080", "/sum", bytes.NewReader(big))
	if want := fmt.Sprintf("%x <nil>", sha256.Sum256(big)); body != want || resp.Trailer.Get("X-Size") != fmt.Sprint(len(big)) {
		t.Errorf("%s, want %s; %v", body, want, resp.Trailer)
	}

	for to, want := range map[string]string{"/next?a=b#c": prefix + "/next?a=b#c", "next": prefix + "/next", "http://localhost:8080/x": prefix + "/x", "https://example.com/x": "https://example.com/x"} {
		resp, _ = w.ask("GET", "8080", "/login?to="+strings.NewReplacer("?", "%3F", "#", "%23").Replace(to), nil)
		if got := resp.Header.Get("Location"); resp.StatusCode != http.StatusSeeOther || got != want {
			t.Errorf("%d to %s; want %s", resp.StatusCode, got, want)
		}
		if got := resp.Header.Get("Set-Cookie"); got != "session=1; Path="+prefix+"/; HttpOnly" {
			t.Errorf("Set-Cookie: %s", got)
		}
	}
	if resp, _ = w.ask("GET", "8080", "?q=1", nil); resp.StatusCode != http.StatusPermanentRedirect || resp.Header.Get("Location") != prefix+"/?q=1" {
		t.Errorf("without a slash: %d %v", resp.StatusCode, resp.Header)
	}
}

// TestPortRouteRefuses: what is not to be had has a type, and is marked as not the guest's answer.
func TestPortRouteRefuses(t *testing.T) {
	w := newWeb(t)
	for name, c := range map[string]struct {
		port, path string
		header     []string
		code       int
		reason     string
	}{
		"not exposed":           {"7070", "/", nil, 403, "PORT_NOT_EXPOSED"},
		"no port":               {"http", "/", nil, 400, "INVALID_FIELD"},
		"a large one":           {"70000", "/", nil, 400, "INVALID_FIELD"},
		"nobody listens":        {"9090", "/", nil, 503, "PORT_CLOSED"},
		"no credentials":        {"8080", "/", []string{"Authorization", ""}, 401, "CREDENTIALS_MISSING"},
		"another tenant":        {"8080", "/", []string{"Authorization", "Bearer " + w.other}, 404, "OBJECT_NOT_FOUND"},
		"another origin's page": {"8080", "/", []string{"Authorization", "", "Origin", "https://example.com"}, 403, "NOT_ALLOWED"},
		"no answer":             {"8080", "/cut", nil, 503, "REPLY_LOST"},
		"headers too large":     {"8080", "/headers", nil, 503, "REPLY_LOST"},
	} {
		resp, body := w.ask("GET", c.port, c.path, nil, c.header...)
		var e struct{ Reason, Message string }
		if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != c.code || e.Reason != c.reason || e.Message == "" || resp.Header.Get("Dormouse-Error") != c.reason {
			t.Errorf("%s: %d %s %s, %v", name, resp.StatusCode, resp.Header.Get("Dormouse-Error"), body, err)
		}
	}
	for _, ports := range [][]uint32{{0}, {65536}, {80, 80}, make([]uint32, 65)} {
		req := box("")
		req.Spec.ExposedPorts = ports
		if _, err := dormousev1.NewSandboxServiceClient(w.conn(w.user)).CreateSandbox(context.Background(), req); err == nil {
			t.Errorf("%v are taken", ports)
		}
	}
	mine := w.uid
	w.uid = uid.New()
	if resp, _ := w.ask("GET", "8080", "/", nil); resp.StatusCode != 404 {
		t.Errorf("of a sandbox that never was: %d", resp.StatusCode)
	}
	w.uid = mine
	w.node.srv.Stop()
	if resp, body := w.ask("GET", "8080", "/", nil); resp.StatusCode != 503 || !strings.Contains(body, "NODE_AWAY") && !strings.Contains(body, "REPLY_LOST") {
		t.Errorf("the node is away: %d %s", resp.StatusCode, body)
	}
}

// TestPortRouteBrowser: with a client certificate, which a browser shows by itself, the guest's page is no page of this origin.
func TestPortRouteBrowser(t *testing.T) {
	w := newWeb(t)
	w.client.Transport.(*http.Transport).TLSClientConfig = w.pki.source(t, pki.Identity{Role: pki.RoleClient, Name: "ci", Tenant: "acme"}).Client(pki.RoleCoordinator, "")
	resp, body := w.ask("GET", "8080", "/", nil, "Authorization", "", "Origin", "https://"+w.app.Addresses("rest")[0])
	if resp.StatusCode != 200 || !strings.Contains(resp.Header.Get("Content-Security-Policy"), "sandbox") {
		t.Errorf("%d %v %s", resp.StatusCode, resp.Header, body)
	}
}

// TestPortRouteUpgrade: another protocol passes both ways, over a standby as well as over the leader, and ends with the coordinator
// that it goes through, whether it is read or not.
func TestPortRouteUpgrade(t *testing.T) {
	w := newWeb(t, func(c *app.Config) { c.Lease.TTL = 20 * time.Second })
	upgraded := func(path string) (*tls.Conn, *bufio.Reader) {
		t.Helper()
		cfg := w.trust()
		cfg.NextProtos = []string{"http/1.1"}
		conn, err := tls.Dial("tcp", w.app.Addresses("rest")[0], cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_, err = fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/8080/%s HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", w.uid, path, w.user)
		if err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != "echo" {
			t.Fatalf("%v, %v", resp, err)
		}
		_ = resp.Body.Close() // it has none: what follows is the connection
		return conn, r
	}
	say := func(conn net.Conn, r *bufio.Reader) {
		t.Helper()
		for _, word := range []string{"hello", strings.Repeat("x", 100<<10)} {
			go func() { _, _ = io.WriteString(conn, word) }() // what does not arrive is missed below
			got := make([]byte, len(word))
			if _, err := io.ReadFull(r, got); err != nil || string(got) != word {
				t.Fatalf("%.20s..., %v", got, err)
			}
		}
	}
	leader, lr := upgraded("up")
	say(leader, lr)
	_, _ = upgraded("flood") // and is not read
	first := w.app
	cfg := w.cfg
	cfg.Admin, cfg.Holder = "", "standby"
	w.app = startStandby(t, w.rig, cfg)
	standby, sr := upgraded("up")
	say(standby, sr)
	say(leader, lr)
	first.Stop() // ends what it has open
	if _, err := lr.ReadByte(); err == nil {
		t.Error("bytes from nobody")
	}
}

// TestPortRouteSilence: a server that says nothing is not waited for without end.
func TestPortRouteSilence(t *testing.T) {
	w := newWeb(t, func(c *app.Config) { c.Ports.Idle = 100 * time.Millisecond })
	if resp, body := w.ask("GET", "8080", "/silent", nil); resp.StatusCode != 504 || !strings.Contains(body, "ports.idle_timeout") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// TestPortRouteWakes: a sandbox that is paused is refused, or woken where its spec says so, by a standby as by the leader.
func TestPortRouteWakes(t *testing.T) {
	w := newWeb(t)
	ctx := context.Background()
	sandboxes := dormousev1.NewSandboxServiceClient(w.conn(w.user))
	pause := func() {
		t.Helper()
		if _, err := sandboxes.PauseSandbox(ctx, &dormousev1.PauseSandboxRequest{Uid: w.uid}); err != nil {
			t.Fatal(err)
		}
	}
	pause()
	if resp, body := w.ask("GET", "8080", "/", nil); resp.StatusCode != 409 || !strings.Contains(body, "SANDBOX_PAUSED") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if _, err := sandboxes.UpdateSandbox(ctx, &dormousev1.UpdateSandboxRequest{Uid: w.uid, WakeOnUse: true, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"wake_on_use"}}}); err != nil {
		t.Fatal(err)
	}
	if resp, body := w.ask("GET", "8080", "/", nil); resp.StatusCode != 200 {
		t.Errorf("by the leader: %d %s", resp.StatusCode, body)
	}
	pause()
	leader := w.app
	t.Cleanup(leader.Stop)
	cfg := w.cfg
	cfg.Admin, cfg.Holder = "", "standby"
	w.app = startStandby(t, w.rig, cfg)
	if resp, body := w.ask("GET", "8080", "/", nil); resp.StatusCode != 200 {
		t.Errorf("by a standby: %d %s", resp.StatusCode, body)
	}
}

// TestPortRouteSlowReader: a client that does not read stops the server inside before much has passed, and is cut after a time.
func TestPortRouteSlowReader(t *testing.T) {
	w := newWeb(t, func(c *app.Config) { c.Ports.Idle = 2 * time.Second })
	var wrote atomic.Int64
	over := make(chan struct{})
	endless := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		defer close(over)
		piece := make([]byte, 32<<10)
		for r.Context().Err() == nil {
			n, err := out.Write(piece)
			wrote.Add(int64(n))
			if err != nil {
				return
			}
		}
	}))
	defer endless.Close()
	w.node.ports[8080] = endless.Listener.Addr().String()
	conn, err := tls.Dial("tcp", w.app.Addresses("rest")[0], w.trust())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.NetConn().(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/8080/ HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\n\r\n", w.uid, w.user); err != nil {
		t.Fatal(err)
	}
	<-over // since nobody reads
	// Sockets of three connections hold a few MiB each at most; an unbounded proxy would hold what the server can write.
	if n := wrote.Load(); n > 64<<20 {
		t.Errorf("the server inside wrote %d bytes to nobody", n)
	}
}
