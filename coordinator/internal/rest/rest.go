// Package rest serves the public API over HTTP and JSON, generated from the same protos.
//
// Requests become gRPC calls over an in-memory connection to a server of this process, which
// authenticates and answers them as any other. An API key passes through as it is. A client's certificate ends
// here, at the TLS connection, so its identity is handed on in metadata that carries a token which only this
// process knows; the gateway passes no other header on, so that a client cannot forge it.
package rest

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/docs/openapi"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const peerKey = "dormouse-rest-peer"

// Bridge is the in-memory way from the HTTP handler to a gRPC server. Close it after the server.
type Bridge struct {
	token    string
	listener *pipeListener
	conn     *grpc.ClientConn
	routes   sync.WaitGroup // requests for ports, those that became other protocols too
	taken    hijacked
	idle     func() // ends the connections to ports that wait for a request
}

// Options of a handler.
type Options struct {
	// PortIdle is how long a connection to a port may be silent.
	PortIdle time.Duration
	// Origins of pages that may open WebSockets, beside the API's own; a WebSocket is pinged every Ping.
	Origins []string
	Ping    time.Duration
	// Tickets says what a ticket of any node says; nil: none are taken.
	Tickets func(text string) (ticket.Claims, error)
}

// NewBridge makes a bridge. Serve a gRPC server on its Listener.
func NewBridge() (*Bridge, error) {
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, err
	}
	b := &Bridge{token: base64.RawURLEncoding.EncodeToString(secret), listener: newPipeListener()}
	var err error
	b.conn, err = grpc.NewClient("passthrough:///rest",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(nodeclient.StreamWindow), grpc.WithStaticConnWindowSize(nodeclient.ConnWindow),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return b.listener.dial(ctx) }),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoke(b.mark(ctx), method, req, reply, cc, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(b.mark(ctx), desc, cc, method, opts...)
		}))
	return b, err
}

// Listener is where the gRPC server takes the bridge's connections.
func (b *Bridge) Listener() net.Listener { return b.listener }

// Close ends the client's side, and with it what still runs through a port.
func (b *Bridge) Close() error {
	err := b.conn.Close()
	if b.idle != nil {
		b.idle()
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		b.routes.Wait()
	}()
	parting := time.NewTimer(time.Second) // in which clients are told why
	select {
	case <-gone:
	case <-parting.C:
	}
	parting.Stop()
	b.taken.close()
	<-gone
	return err
}

// mark adds the identity of a certificate, if the handler found one.
func (b *Bridge) mark(ctx context.Context) context.Context {
	id, err := auth.From(ctx)
	if err != nil {
		return ctx
	}
	body, err := json.Marshal(id)
	if err != nil {
		return ctx // strings cannot fail to encode; without the mark the call is refused
	}
	return metadata.AppendToOutgoingContext(ctx, peerKey, b.token+"."+base64.RawURLEncoding.EncodeToString(body))
}

// Resolver tells who makes a call over the bridge: the identity that it was marked with, or what
// the other resolver says.
func (b *Bridge) Resolver(other auth.Resolver) auth.Resolver {
	return func(ctx context.Context) (auth.Identity, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		marks := md.Get(peerKey)
		if len(marks) == 0 || len(md.Get("authorization")) > 0 {
			return other(ctx)
		}
		n := len(b.token)
		var id auth.Identity
		if len(marks) == 1 && len(marks[0]) > n+1 && subtle.ConstantTimeCompare([]byte(marks[0][:n]), []byte(b.token)) == 1 {
			if body, err := base64.RawURLEncoding.DecodeString(marks[0][n+1:]); err == nil && json.Unmarshal(body, &id) == nil {
				return id, nil
			}
		}
		return id, errs.New(errs.CredentialsInvalid, "the credentials are not valid")
	}
}

// Handler serves /v1 and /openapi.json. There is one.
func (b *Bridge) Handler(ctx context.Context, o Options) (http.Handler, error) {
	gateway := wire.NewGateway()
	for _, register := range []func(context.Context, *runtime.ServeMux, *grpc.ClientConn) error{
		dormousev1.RegisterSandboxServiceHandler, dormousev1.RegisterSnapshotServiceHandler, dormousev1.RegisterVolumeServiceHandler,
		dormousev1.RegisterNodeServiceHandler, dormousev1.RegisterImageServiceHandler, dormousev1.RegisterOperationServiceHandler,
		dormousev1.RegisterEventServiceHandler, dormousev1.RegisterProcessServiceHandler, dormousev1.RegisterFileServiceHandler,
		dormousev1.RegisterTicketServiceHandler, dormousev1.RegisterCatalogServiceHandler,
		dormousev1.RegisterTemplateServiceHandler, dormousev1.RegisterPoolServiceHandler,
	} {
		if err := register(ctx, gateway, b.conn); err != nil {
			return nil, err
		}
	}
	api := wire.RESTHandler(gateway)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(openapi.Spec) // the caller went away
	})
	mux.Handle("GET "+contentPath, identified(b.contentHandler(b.readContent, "path", "offset", "version", "user")))
	mux.Handle("PUT "+contentPath, identified(b.contentHandler(b.writeContent, "path", "mode", "owner", "parents", "digest", "user")))
	mux.Handle("/", identified(api))
	mux.Handle("GET "+socketPath, identified(http.HandlerFunc(newSocketRoute(b, o).serve)))
	route := newPortRoute(b, o.PortIdle)
	b.idle = route.transport.CloseIdleConnections
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if to, ok := portTarget(r.URL.EscapedPath()); ok {
			identified(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { route.serve(w, r, to) })).ServeHTTP(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	}), nil
}

// identified gives a request the identity of its certificate, if it has one.
func identified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := pki.StateIdentity(r.TLS); ok {
			id, err := auth.Certificate(peer)
			if err != nil {
				wire.WriteRESTError(w, r, err)
				return
			}
			r = r.WithContext(auth.With(r.Context(), id))
		}
		next.ServeHTTP(w, r)
	})
}

// pipeListener accepts in-memory connections.
type pipeListener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *pipeListener) dial(ctx context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "rest" }

func (l *pipeListener) Addr() net.Addr { return pipeAddr{} }
