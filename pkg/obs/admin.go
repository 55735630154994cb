package obs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
)

// NewRegistry makes a metrics registry with those of the process and of Go.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// checkTime bounds one health check: a check that hangs is unhealthy.
const checkTime = 3 * time.Second

// Health is what a process says about itself. Ready means "send me work"; alive means "do not kill
// me", so nothing that is merely away (a store, a peer) belongs to the latter.
type Health struct {
	mu    sync.Mutex
	ready map[string]func(context.Context) error
	alive map[string]func(context.Context) error
}

// NewHealth makes an empty one, which is ready and alive.
func NewHealth() *Health {
	return &Health{ready: make(map[string]func(context.Context) error), alive: make(map[string]func(context.Context) error)}
}

// Ready adds a condition of being ready. The error's text is shown; it must hold no secret.
func (h *Health) Ready(name string, check func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready[name] = check
}

// Alive adds a condition of being alive.
func (h *Health) Alive(name string, check func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.alive[name] = check
}

// CheckReady gives the failures of the conditions of being ready, by name; empty when ready.
func (h *Health) CheckReady(ctx context.Context) map[string]string { return h.run(ctx, h.ready) }

// CheckAlive gives the failures of the conditions of being alive.
func (h *Health) CheckAlive(ctx context.Context) map[string]string { return h.run(ctx, h.alive) }

func (h *Health) run(ctx context.Context, set map[string]func(context.Context) error) map[string]string {
	h.mu.Lock()
	checks := make(map[string]func(context.Context) error, len(set))
	for n, c := range set {
		checks[n] = c
	}
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	failures := make(map[string]string)
	var mu sync.Mutex
	var all sync.WaitGroup
	for n, c := range checks {
		all.Go(func() {
			if err := c(ctx); err != nil {
				mu.Lock()
				failures[n] = err.Error()
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return failures
}

// AdminHandler serves /metrics, /debug/pprof/, /healthz (alive), /readyz (ready) and, for what a
// daemon wants to show of itself, the extra handlers by path.
func AdminHandler(g prometheus.Gatherer, h *Health, extra map[string]http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{}))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) { writeHealth(w, h.CheckAlive(r.Context())) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) { writeHealth(w, h.CheckReady(r.Context())) })
	for path, handler := range extra {
		mux.Handle(path, handler)
	}
	return mux
}

func writeHealth(w http.ResponseWriter, failures map[string]string) {
	w.Header().Set("Content-Type", "application/json")
	state := "ok"
	if len(failures) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		state = "failing"
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"status": state, "failures": failures}) // the caller went away
}

// ListenRootOnly opens a unix socket that only the owner of the process can connect to. A socket
// that a dead process left is replaced; one that somebody serves is an error. The folder must not
// be writable by others; it is made, for the owner only, if it is missing.
func ListenRootOnly(path string) (net.Listener, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	if fi.Mode().Perm()&0o022 != 0 && fi.Mode()&os.ModeSticky == 0 {
		return nil, fmt.Errorf("socket %s: others may write to its folder; chmod go-w %s", path, dir)
	}
	if err := removeDeadSocket(path); err != nil {
		return nil, err
	}
	// Made under a name that nobody knows, restricted, then renamed: there is no instant at which
	// another user can connect.
	staging, err := os.MkdirTemp(dir, ".socket-*")
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	defer os.RemoveAll(staging)
	tmp := filepath.Join(staging, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(tmp, 0o600), os.Rename(tmp, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), l.Close())
	}
	return &rootOnly{UnixListener: l, path: path}, nil
}

func removeDeadSocket(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if fi.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("socket %s: there is a file that is no socket; move it away", path)
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		return errors.Join(fmt.Errorf("socket %s: another process serves it; stop that one first", path), c.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	return os.Remove(path)
}

// rootOnly refuses peers of another user, whatever the file's mode says, and removes its file when
// it is closed.
type rootOnly struct {
	*net.UnixListener
	path string
	once sync.Once
}

func (l *rootOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if peerAllowed(c) {
			return c, nil
		}
		_ = c.Close() // refused
	}
}

func (l *rootOnly) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

func (l *rootOnly) Close() error {
	var err error
	l.once.Do(func() { err = errors.Join(os.Remove(l.path), l.UnixListener.Close()) })
	return err
}

// peerAllowed tells whether the peer runs as root or as this process' user.
func peerAllowed(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	if raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return false
	}
	return cred.Uid == 0 || int(cred.Uid) == os.Geteuid()
}

// ServeAdmin serves the handler on the socket until the context ends, then closes the socket and
// waits for what is being answered, for a bounded time.
func ServeAdmin(ctx context.Context, path string, handler http.Handler) error {
	l, err := ListenRootOnly(path)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err = <-done:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if srv.Shutdown(stop) != nil {
		err = srv.Close() // a profile may run for long: cut it
	}
	if e := <-done; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	return err
}
