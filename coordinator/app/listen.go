package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/dormouse-run/dormouse/coordinator/internal/api"
	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/forward"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/rest"
	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// maxNodeMessage bounds what a node may say at once: an inventory of thousands of sandboxes.
const maxNodeMessage = 64 << 20

// What one connection of the public API may have open at a time, and how large a call's headers may be.
const (
	maxConnStreams = 4096
	maxHeaders     = 64 << 10
)

// What a stream of the public API may hold here before it was read: with the node's side of it
// (nodeclient.StreamWindow) less than 2 MiB.
const streamWindow = 1 << 20

// listen opens all listeners, for which it has ctx, and serves them. life is that of what they do in the background.
func (a *App) listen(ctx, life context.Context, files *pki.Source, keys *auth.Authenticator) error {
	around, err := a.surround()
	if err != nil {
		return err
	}
	who := forward.Resolver(keys.Authenticate)
	bounds := auth.Admission{Admission: admission.New(a.cfg.Tenant, nil)}
	grpcs, err := bindAll(ctx, a.cfg.Listen.GRPC)
	if err != nil {
		return err
	}
	address := reachable(a.cfg.Advertise, grpcs)
	a.holder = forward.Holder(a.holder, address)
	a.forward = forward.New(forward.Config{Leases: a.store, Holder: a.holder, TLS: files.Client(pki.RoleCoordinator, ""), Patience: 2 * a.cfg.Lease.TTL})
	services := a.services()
	a.owned.Go(func() { services.Run(life) })
	for i, l := range grpcs {
		address := a.cfg.Listen.GRPC[i]
		creds := wire.TLS(files.ServerOptional(pki.RoleClient, pki.RoleOperator, pki.RoleCoordinator))
		if isUnix(address) {
			creds = insecure.NewCredentials()
		}
		a.serveGRPC("grpc", l, a.public(around, services, who, bounds, grpc.Creds(creds),
			grpc.MaxConcurrentStreams(maxConnStreams), grpc.MaxHeaderListSize(maxHeaders), grpc.StaticStreamWindowSize(streamWindow)))
	}
	if err := a.listenREST(ctx, life, around, services, keys, bounds, files.ServerOptional(pki.RoleClient, pki.RoleOperator)); err != nil {
		return err
	}
	for _, address := range a.cfg.Listen.Node {
		l, err := bind(ctx, address)
		if err != nil {
			return err
		}
		opts := append([]grpc.ServerOption{grpc.ChainStreamInterceptor(keepRaw)}, around.Options()...)
		srv := grpc.NewServer(append(opts, grpc.ChainStreamInterceptor(readRaw), grpc.Creds(wire.TLS(files.Server(pki.RoleNode))),
			grpc.MaxRecvMsgSize(maxNodeMessage), alive(), lenient())...)
		nodev1.RegisterSessionServiceServer(srv, a.registry)
		a.serveGRPC("node", l, srv)
	}
	return nil
}

// reachable gives the address that others are told: what is configured, or the first that says a host.
func reachable(configured string, bound []net.Listener) string {
	if configured != "" {
		return configured
	}
	for _, l := range bound {
		if tcp, ok := l.Addr().(*net.TCPAddr); ok && !tcp.IP.IsUnspecified() {
			return tcp.String()
		}
	}
	return ""
}

// bindAll opens all listeners, or none.
func bindAll(ctx context.Context, addresses []string) ([]net.Listener, error) {
	var all []net.Listener
	for _, address := range addresses {
		l, err := bind(ctx, address)
		if err != nil {
			for _, l := range all {
				err = errors.Join(err, l.Close())
			}
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

// The reader of a session outlives its handler by a moment: gRPC ends it only when the handler has
// returned. So it must not read through the interceptors in between, which are done by then. keepRaw,
// before them, keeps the stream itself, and readRaw, after them, reads from it.
func keepRaw(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return next(srv, &rawStream{ss, context.WithValue(ss.Context(), rawKey{}, ss)})
}

func readRaw(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	raw, ok := ss.Context().Value(rawKey{}).(grpc.ServerStream)
	if !ok {
		return next(srv, ss)
	}
	return next(srv, &sessionStream{ss, raw})
}

type rawKey struct{}

type rawStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // the interface of gRPC asks for it
}

func (s *rawStream) Context() context.Context { return s.ctx }

type sessionStream struct {
	grpc.ServerStream
	raw grpc.ServerStream
}

func (s *sessionStream) RecvMsg(m any) error { return s.raw.RecvMsg(m) }

// public makes a server of the public API.
func (a *App) public(around *wire.Server, services *api.Server, who auth.Resolver, bounds auth.Admission, opts ...grpc.ServerOption) *grpc.Server {
	opts = append(around.Options(), append(opts,
		grpc.ChainUnaryInterceptor(auth.Unary(who), bounds.Unary(), a.forward.Unary()),
		grpc.ChainStreamInterceptor(auth.Stream(who), bounds.Stream(), a.forward.Stream()),
		grpc.MaxRecvMsgSize(api.MaxMessage), grpc.StaticConnWindowSize(nodeclient.ConnWindow), alive(), lenient())...)
	srv := grpc.NewServer(opts...)
	services.Register(srv)
	healthv1.RegisterHealthServer(srv, a.grpcLife)
	return srv
}

// A peer that vanished without closing its connection is found by TCP: after vanished without an answer when
// something was sent to it, and a probe is sent once it is silent for quiet.
const (
	quiet    = 30 * time.Second
	vanished = 15 * time.Second
)

// alive turns off what gRPC has for that: it reads the wall clock, and where that is set back it takes every
// peer for dead.
func alive() grpc.ServerOption {
	return grpc.KeepaliveParams(keepalive.ServerParameters{Time: math.MaxInt64})
}

// lenient lets clients do the same.
func lenient() grpc.ServerOption {
	return grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true})
}

func (a *App) listenREST(ctx, life context.Context, around *wire.Server, services *api.Server, keys *auth.Authenticator, bounds auth.Admission, publicTLS *tls.Config) error {
	if len(a.cfg.Listen.REST) == 0 {
		return nil
	}
	bridge, err := rest.NewBridge()
	if err != nil {
		return err
	}
	a.bridge = bridge
	// What REST passes on has one window more on its way than other calls, so a smaller one here.
	inner := a.public(around, services, bridge.Resolver(keys.Authenticate), bounds, grpc.StaticStreamWindowSize(nodeclient.StreamWindow))
	o := rest.Options{PortIdle: a.cfg.Ports.Idle, Origins: a.cfg.WebSocket.Origins, Ping: a.cfg.WebSocket.Ping}
	if a.tickets != nil {
		o.Tickets = a.tickets.Check
	}
	handler, err := bridge.Handler(life, o)
	if err != nil {
		return err
	}
	a.serveGRPC("", bridge.Listener(), inner)
	for _, address := range a.cfg.Listen.REST {
		l, err := bind(ctx, address)
		if err != nil {
			return err
		}
		a.addresses["rest"] = append(a.addresses["rest"], l.Addr().String())
		srv := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
			MaxHeaderBytes: maxHeaders, ErrorLog: nil, TLSConfig: publicTLS.Clone()}
		a.https = append(a.https, srv)
		a.serving.Go(func() {
			if isUnix(address) {
				a.serveFailed("rest", srv.Serve(l))
			} else {
				a.serveFailed("rest", srv.ServeTLS(l, "", ""))
			}
		})
	}
	return nil
}

// serveGRPC serves and remembers the server. A name of "" is not shown.
func (a *App) serveGRPC(name string, l net.Listener, srv *grpc.Server) {
	if name != "" {
		a.addresses[name] = append(a.addresses[name], l.Addr().String())
	}
	a.servers = append(a.servers, srv)
	a.serving.Go(func() { a.serveFailed(name, srv.Serve(l)) })
}

// drain stops taking calls and waits for those in progress until the context ends; then it cuts them.
// REST goes first, since its calls end in a gRPC server of ours.
func (a *App) drain(ctx context.Context) {
	for _, srv := range a.https {
		if srv.Shutdown(ctx) != nil {
			_ = srv.Close() // cut what did not end in time
		}
	}
	for _, srv := range a.servers {
		graceful := make(chan struct{})
		go func() {
			srv.GracefulStop()
			close(graceful)
		}()
		select {
		case <-graceful:
		case <-ctx.Done():
			srv.Stop()
			<-graceful
		}
	}
	a.serving.Wait()
}

func isUnix(address string) bool { return strings.HasPrefix(address, "unix:") }

// handover bounds how long an address that is taken is waited for. The sockets of a process that was killed stay open
// until the last of its threads has gone, and who starts daemons may start the next one before that.
const handover = 3 * time.Second

var errTaken = errors.New("somebody serves it already")

// bind opens a listener. An address that somebody serves is an error, once it was waited for.
func bind(ctx context.Context, address string) (net.Listener, error) {
	waiting, cancel := context.WithTimeout(ctx, handover)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		l, err := bindNow(ctx, address)
		if !errors.Is(err, errTaken) && !errors.Is(err, syscall.EADDRINUSE) {
			return l, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-waiting.Done():
			timer.Stop()
			return nil, errors.Join(err, ctx.Err())
		}
	}
}

// hasty has the connections of a listener end when what was sent is not acknowledged for too long.
func hasty(_, _ string, conn syscall.RawConn) error {
	var failed error
	err := conn.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(vanished.Milliseconds()))
	})
	return errors.Join(err, failed)
}

// bindNow tries once. A unix socket is for its owner only; one that a dead process left is replaced.
func bindNow(ctx context.Context, address string) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		tcp := net.ListenConfig{Control: hasty, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: quiet, Interval: vanished / 3, Count: 3}}
		return tcp.Listen(ctx, "tcp", address)
	}
	var config net.ListenConfig
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = conn.Close() // it only was a question
		return nil, fmt.Errorf("%s: %w", path, errTaken)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist):
		// The question was not answered, as by one that is too busy: the socket may be somebody's.
		return nil, fmt.Errorf("%s: %w: %w", path, errTaken, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
