package obs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLogLinesCarryTheContext(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, LogConfig{Level: "debug", Format: "json"})
	if err != nil {
		t.Fatal(err)
	}
	ctx := With(WithOperationID(WithRequestID(t.Context(), "req"), "op"), slog.String("sandbox", "sb"))
	log.With("node", "n1").DebugContext(With(ctx, slog.Uint64("epoch", 7)), "hello")
	for _, want := range []string{`"request_id":"req"`, `"operation_id":"op"`, `"sandbox":"sb"`, `"epoch":7`, `"node":"n1"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in %s", want, out.String())
		}
	}
	for _, bad := range []LogConfig{{Level: "loud"}, {Format: "xml"}} {
		if _, err := NewLogger(io.Discard, bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

func admin(t *testing.T, path string, h *Health) (*http.Client, func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ready := make(chan struct{})
	extra := map[string]http.Handler{"GET /extra": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "more") })}
	go func() {
		close(ready)
		done <- ServeAdmin(ctx, path, AdminHandler(NewRegistry(), h, extra))
	}()
	<-ready
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		for {
			conn, err := d.DialContext(ctx, "unix", path)
			if err == nil || ctx.Err() != nil {
				return conn, err
			}
		}
	}}}
	return c, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the admin server ended with %v", err)
		}
	}
}

func TestAdminSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "admin.sock")
	h := NewHealth()
	c, stop := admin(t, path, h)
	get := func(p string) (int, string) {
		resp, err := c.Get("http://admin" + p)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "go_goroutines") {
		t.Errorf("metrics: %d", code)
	}
	for _, p := range []string{"/healthz", "/readyz", "/debug/pprof/", "/debug/pprof/goroutine?debug=1", "/extra"} {
		if code, body := get(p); code != 200 {
			t.Errorf("%s: %d %s", p, code, body)
		}
	}
	h.Ready("store", func(context.Context) error { return errors.New("the store is away") })
	if code, body := get("/readyz"); code != 503 || !strings.Contains(body, "the store is away") {
		t.Errorf("not ready: %d %s", code, body)
	}
	if code, _ := get("/healthz"); code != 200 {
		t.Errorf("not ready is not dead: %d", code)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v %v", fi.Mode(), err)
	}
	if _, err := ListenRootOnly(path); err == nil || !strings.Contains(err.Error(), "another process serves it") {
		t.Errorf("a served socket was taken over: %v", err)
	}
	stop()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket was left: %v", err)
	}
}

func TestDeadSocketIsReplacedAndOthersAreNot(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	again, err := ListenRootOnly(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenRootOnly(path); err == nil {
		t.Error("a file was replaced")
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil { //nolint:gosec // the case that is refused
		t.Fatal(err)
	}
	if _, err := ListenRootOnly(filepath.Join(open, "s")); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("a folder that others write to: %v", err)
	}
}
