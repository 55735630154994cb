package rest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/status"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/portconn"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// HTTP servers inside are reached at
//
//	/v1/sandboxes/{uid}/ports/{port}/...
//
// where the sandbox's spec exposes the port. A request is the caller's: the sandbox is looked up and the port is dialled with GetSandbox and
// ForwardPort over the bridge, in its name, so that authentication, limits, waking and the way to the node are those of any other call, on every replica.
//
// What passes is bounded by a chunk and a window each way; nothing is collected. What the guest answers is another's content under this API's
// origin, so it may set nothing for the origin as a whole, and a browser that shows a client certificate by itself is told
// to run it as an origin of its own.
const (
	portRoot = "/v1/sandboxes/"
	// errorHeader marks the answers that are this route's and not the guest's.
	errorHeader = "Dormouse-Error"
	// guestAuthorization is what the guest gets as Authorization; that of the request is for the API.
	guestAuthorization = "X-Guest-Authorization"
	prefixHeader       = "X-Forwarded-Prefix"
	// maxPortHeaders bounds what the guest answers before its body.
	maxPortHeaders = 64 << 10
	// keepIdle is how long a connection to a port waits for the next request of the same caller.
	keepIdle    = 5 * time.Second
	keepForPort = 4
)

// ownHeaders of an answer would be for all that is served here.
var ownHeaders = []string{errorHeader, wire.RequestIDKey, "Alt-Svc", "Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security", "Public-Key-Pins", "Origin-Agent-Cluster"}

// target is where a request goes.
type target struct {
	uid    string
	port   int
	path   string // escaped, as the client wrote it
	prefix string // what the client wrote before it
	open   bool   // the prefix has no slash at its end
	// ambient credentials are shown by the browser by itself.
	ambient bool
}

// portTarget reads a path of the route. It looks at the path as it came, since a path inside may have
// what a multiplexer would take for unclean.
func portTarget(escaped string) (target, bool) {
	rest, ok := strings.CutPrefix(escaped, portRoot)
	uid, rest, more := strings.Cut(rest, "/")
	rest, ports := strings.CutPrefix(rest, "ports/")
	if !ok || !more || !ports || uid == "" {
		return target{}, false
	}
	text, path, slash := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		port = 0 // is no port, and said so
	}
	return target{uid: uid, port: int(port), path: "/" + path, prefix: portRoot + uid + "/ports/" + text, open: !slash}, true
}

type targetKey struct{}

// portRoute serves the ports of sandboxes.
type portRoute struct {
	bridge    *Bridge
	ports     dormousev1.PortServiceClient
	sandboxes dormousev1.SandboxServiceClient
	idle      time.Duration
	transport *http.Transport
	proxy     *httputil.ReverseProxy
}

func newPortRoute(b *Bridge, idle time.Duration) *portRoute {
	p := &portRoute{bridge: b, ports: dormousev1.NewPortServiceClient(b.conn), sandboxes: dormousev1.NewSandboxServiceClient(b.conn), idle: idle}
	p.transport = &http.Transport{
		DialContext: p.dial, DisableCompression: true, MaxResponseHeaderBytes: maxPortHeaders,
		MaxIdleConns: 256, MaxIdleConnsPerHost: keepForPort, IdleConnTimeout: keepIdle,
	}
	p.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, Transport: p.transport, FlushInterval: -1, ModifyResponse: answer, ErrorHandler: failed,
		ErrorLog: log.New(io.Discard, "", 0), // what it says is what ErrorHandler is told, or that a client went away
	}
	return p
}

// serve answers a request for a port.
func (p *portRoute) serve(w http.ResponseWriter, r *http.Request, to target) {
	p.bridge.routes.Add(1)
	defer p.bridge.routes.Done()
	r = began(w, r)
	if err := p.admit(r, to); err != nil {
		refuse(w, r, err)
		return
	}
	if to.open && r.Header.Get("Upgrade") == "" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		to := url.URL{Path: to.prefix + "/", RawQuery: r.URL.RawQuery} // relative links need the slash
		http.Redirect(w, r, to.String(), http.StatusPermanentRedirect)
		return
	}
	to.ambient = r.Header.Get("Authorization") == ""
	out := patient(w, p.idle, &p.bridge.taken)
	defer out.done()
	p.proxy.ServeHTTP(out, r.WithContext(context.WithValue(outgoing(r), targetKey{}, to)))
}

// admit tells whether the caller's sandbox exposes the port.
func (p *portRoute) admit(r *http.Request, to target) error {
	if to.port == 0 {
		return errs.New(errs.InvalidField, "port: use 1 to 65535").With("field", "port")
	}
	if err := sameOrigin(r); err != nil {
		return err
	}
	resp, err := p.sandboxes.GetSandbox(outgoing(r), &dormousev1.GetSandboxRequest{Uid: to.uid})
	if err != nil {
		return err
	}
	if !slices.Contains(resp.GetSandbox().GetSpec().GetExposedPorts(), uint32(to.port)) {
		return errs.New(errs.PortNotExposed, "sandbox %s does not expose port %d: name it in exposed_ports when the sandbox is made, or use ForwardPort", to.uid, to.port).
			With("uid", to.uid).With("port", strconv.Itoa(to.port))
	}
	return nil
}

// sameOrigin refuses what a page of another origin sends with credentials that the browser adds by itself, a client certificate. A header
// Authorization is added by nobody but who knows the key.
func sameOrigin(r *http.Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" || r.Header.Get("Authorization") != "" {
		return nil
	}
	if u, err := url.Parse(origin); err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host) {
		return nil
	}
	return errs.New(errs.NotAllowed, "a page of another origin may not use a client certificate here")
}

// rewrite makes the guest's request of the client's. Hop-by-hop headers, and what the client says of proxies before, are taken
// away by the proxy.
func rewrite(r *httputil.ProxyRequest) {
	to, _ := r.In.Context().Value(targetKey{}).(target)
	r.SetXForwarded()
	h := r.Out.Header
	h.Set(prefixHeader, to.prefix)
	h.Set(wire.RequestIDKey, r.In.Header.Get(wire.RequestIDKey))
	h.Del("Authorization")
	if v := h.Values(guestAuthorization); len(v) > 0 {
		h["Authorization"] = v
		h.Del(guestAuthorization)
	}
	out := r.Out.URL
	// A connection is used again for the same caller, sandbox and port alone: the transport tells them by the host.
	out.Scheme, out.Host = "http", connectionOf(r.In, to)
	out.RawPath = to.path
	if path, err := url.PathUnescape(to.path); err == nil {
		out.Path = path
	}
	out.RawQuery = r.In.URL.RawQuery
	r.Out.Host = "localhost:" + strconv.Itoa(to.port)
}

// connectionOf names the connections of a caller to a port.
func connectionOf(r *http.Request, to target) string {
	h := sha256.New()
	for _, v := range r.Header.Values("Authorization") {
		_, _ = io.WriteString(h, v+"\n") // a hash takes all
	}
	if id, err := auth.From(r.Context()); err == nil {
		_, _ = io.WriteString(h, id.Tenant+"\n"+id.Subject) // a hash takes all
	}
	return hex.EncodeToString(h.Sum(nil)) + "." + to.uid + "." + strconv.Itoa(to.port)
}

// dial connects to the port of the request's target.
func (p *portRoute) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	to, ok := ctx.Value(targetKey{}).(target)
	if !ok {
		return nil, errs.New(errs.InternalError, "the request has no target")
	}
	conn, err := portconn.Open(ctx, p.ports, to.uid, to.port)
	if err != nil {
		return nil, err
	}
	c := &idleConn{Conn: conn, idle: p.idle}
	c.timer = time.AfterFunc(p.idle, func() {
		c.expired.Store(true)
		_ = conn.Close() // ends what waits on it, which says why
	})
	return c, nil
}

// idleConn ends when no byte has passed for too long, in either direction.
type idleConn struct {
	*portconn.Conn
	idle    time.Duration
	timer   *time.Timer
	expired atomic.Bool
}

func (c *idleConn) moved(n int, err error) (int, error) {
	switch {
	case n > 0:
		if c.timer.Stop() {
			c.timer.Reset(c.idle)
		}
	case err != nil && c.expired.Load():
		err = errs.New(errs.DeadlineExpired, "nothing was sent or received for %s (ports.idle_timeout)", c.idle)
	}
	return n, err
}

func (c *idleConn) Read(b []byte) (int, error)  { return c.moved(c.Conn.Read(b)) }
func (c *idleConn) Write(b []byte) (int, error) { return c.moved(c.Conn.Write(b)) }

func (c *idleConn) Close() error {
	c.timer.Stop()
	return c.Conn.Close()
}

// answer takes from the guest's answer what is not the guest's to say.
func answer(resp *http.Response) error {
	to, _ := resp.Request.Context().Value(targetKey{}).(target)
	h := resp.Header
	for _, name := range ownHeaders {
		h.Del(name)
	}
	if v := h.Get("Location"); v != "" {
		h.Set("Location", relocate(v, resp.Request, to))
	}
	if cookies := resp.Cookies(); len(cookies) > 0 {
		h.Del("Set-Cookie")
		for _, c := range cookies {
			c.Domain = ""
			c.Path = to.prefix + "/" + strings.TrimPrefix(c.Path, "/")
			if text := c.String(); text != "" {
				h.Add("Set-Cookie", text)
			}
		}
	}
	if to.ambient {
		h.Add("Content-Security-Policy", "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads")
	}
	return nil
}

// relocate puts a redirection to another path of the guest's below the prefix.
func relocate(location string, r *http.Request, to target) string {
	u, err := url.Parse(location)
	if err != nil || u.Host != "" && u.Host != r.Host && u.Host != r.Header.Get("X-Forwarded-Host") || !strings.HasPrefix(u.Path, "/") {
		return location
	}
	below := url.URL{RawQuery: u.RawQuery, Fragment: u.Fragment, RawFragment: u.RawFragment}
	return to.prefix + u.EscapedPath() + below.String()
}

// failed answers a request that the guest did not answer.
func failed(w http.ResponseWriter, r *http.Request, err error) {
	var typed *errs.Error
	var answered interface{ GRPCStatus() *status.Status }
	switch {
	case r.Context().Err() != nil:
		err = errs.From(r.Context().Err()) // nobody reads it
	case errors.As(err, &typed):
		err = typed
	case errors.As(err, &answered):
		err = wire.FromStatus(err)
	default:
		err = errs.Wrap(err, errs.ReplyLost, "the server inside did not answer as HTTP/1.1 does; it may have done what it was asked")
	}
	refuse(w, r, err)
}

// refuse answers in the route's own name.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	typed := wire.Answered(r.Context(), err)
	w.Header().Set(errorHeader, string(typed.Reason))
	wire.WriteRESTError(w, r, typed)
}
