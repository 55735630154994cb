// Package forward lets a coordinator that does not lead answer what only the leader can: it passes the call
// on to the leader, in the caller's name.
//
// Whether a call needs the leader is not decided here by its name: it is tried here first, and passed on
// when the answer is NO_LEADER. Such an answer comes before anything was done, or with an operation that the next leader
// goes on with, so a call that carries an operation id may be made again. A mutation that came without one is given one here.
//
// While nobody leads, calls wait for a bounded time: a change of the leader is a pause for who mutates, not
// an error. A call is passed on once at most, so that two that take each other for the leader send nothing in circles.
//
// The caller was authenticated here, and the leader believes it from another coordinator's certificate only.
package forward

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/dial"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// callerKey is the metadata in which a coordinator says who calls.
const callerKey = "dormouse-caller"

// Holder names a coordinator in the lease: its name, unique for a start of the process, and where other
// coordinators reach its public API; empty where they do not.
func Holder(name, address string) string {
	if address == "" {
		return name
	}
	return name + "@" + address
}

// addressOf gives the address in a holder.
func addressOf(holder string) string {
	if i := strings.LastIndexByte(holder, '@'); i >= 0 {
		return holder[i+1:]
	}
	return ""
}

// Resolver believes what another coordinator says of a caller; others are asked who they are.
func Resolver(other auth.Resolver) auth.Resolver {
	return func(ctx context.Context) (auth.Identity, error) {
		peer, ok := pki.PeerIdentity(ctx)
		if !ok || peer.Role != pki.RoleCoordinator {
			return other(ctx)
		}
		var id auth.Identity
		said := metadata.ValueFromIncomingContext(ctx, callerKey)
		if len(said) == 1 {
			if body, err := base64.RawURLEncoding.DecodeString(said[0]); err == nil && json.Unmarshal(body, &id) == nil && id.Tenant != "" {
				return id, nil
			}
		}
		return auth.Identity{}, errs.New(errs.NotAllowed, "a coordinator calls here in a caller's name only")
	}
}

// Leases tells who leads.
type Leases interface {
	Leader(ctx context.Context) (catalog.Lease, error)
}

// Config of a Forwarder.
type Config struct {
	Leases Leases
	// Holder is the own name in the lease.
	Holder string
	// TLS accepts coordinators only, and shows the own certificate.
	TLS *tls.Config
	// Patience is how long a call waits for somebody to lead.
	Patience time.Duration
}

// Forwarder passes calls on. Close it.
type Forwarder struct {
	cfg Config

	mu      sync.Mutex
	closed  bool
	address string
	cc      *grpc.ClientConn
}

// New makes a forwarder.
func New(cfg Config) *Forwarder { return &Forwarder{cfg: cfg} }

// Close ends the connection to the leader.
func (f *Forwarder) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if f.cc != nil {
		_ = f.cc.Close() // its only error is that it was closed already
	}
}

// again is the pause between two looks at who leads.
const again = 100 * time.Millisecond

// Unary passes calls on; it stands behind the authentication.
func (f *Forwarder) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		return f.Do(ctx, info.FullMethod, req, func() (any, error) { return next(ctx, req) })
	}
}

// Do makes a unary call of the public API: here, or at the leader where the answer here is NO_LEADER. The context has who calls. A request
// that can have an operation id has one afterwards.
func (f *Forwarder) Do(ctx context.Context, fullMethod string, req any, here func() (any, error)) (any, error) {
	identify(fullMethod, req)
	return f.try(ctx, here, func(cc *grpc.ClientConn, ctx context.Context) (any, error) {
		resp, err := responseOf(fullMethod)
		if err != nil {
			return nil, err
		}
		return resp, cc.Invoke(ctx, fullMethod, req, resp)
	}, func() bool { return repeatable(req) })
}

// identify chooses the operation id of a mutation that came without one.
func identify(fullMethod string, req any) {
	m, ok := req.(proto.Message)
	if !ok || repeatable(req) || fullMethod == dormousev1.OperationService_GetOperation_FullMethodName { // which asks for one
		return
	}
	r := m.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName("operation_id"), protoreflect.ValueOfString(uid.New()))
}

// Stream passes on streams of which only the server's side streams, and which have not begun.
func (f *Forwarder) Stream() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if info.IsClientStream {
			return next(srv, ss)
		}
		w := &opening{ServerStream: ss}
		_, err := f.try(ss.Context(), func() (any, error) {
			w.replay = w.request != nil
			return nil, next(srv, w)
		}, func(cc *grpc.ClientConn, ctx context.Context) (any, error) {
			return nil, w.pass(ctx, cc, info.FullMethod)
		}, func() bool { return w.request != nil && !w.begun })
		return err
	}
}

// try answers here, or by the leader, or waits for one.
func (f *Forwarder) try(ctx context.Context, here func() (any, error), there func(*grpc.ClientConn, context.Context) (any, error), may func() bool) (any, error) {
	end := time.NewTimer(f.cfg.Patience)
	defer end.Stop()
	unknown := false // the outcome of an earlier attempt
	for {
		resp, err := here()
		if !errs.Has(err, errs.NoLeader) || passedOn(ctx) || !may() {
			return resp, errs.OfAll(err, unknown)
		}
		unknown = unknown || !errs.NotStartedFor(err)
		if cc, callCtx, nobody := f.leader(ctx); nobody == nil {
			resp, err = there(cc, callCtx)
			if !errs.Has(err, errs.NoLeader) && !errs.Has(err, errs.ReplyLost) || !may() {
				return resp, errs.OfAll(err, unknown)
			}
			unknown = unknown || !errs.NotStartedFor(err)
		}
		pause := time.NewTimer(again)
		select {
		case <-pause.C:
			continue
		case <-end.C:
		case <-ctx.Done():
		}
		pause.Stop()
		return nil, errs.OfAll(err, unknown)
	}
}

// passedOn tells whether the call came from another coordinator.
func passedOn(ctx context.Context) bool {
	return len(metadata.ValueFromIncomingContext(ctx, callerKey)) > 0
}

// repeatable tells whether a request may be made again: it says which operation it is, or is none.
func repeatable(req any) bool {
	r, ok := req.(interface{ GetOperationId() string })
	return !ok || r.GetOperationId() != ""
}

func responseOf(fullMethod string) (proto.Message, error) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(fullMethod, "/"), "/", ".")))
	if err != nil {
		return nil, err
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, errs.New(errs.NotSupported, "%s is no method", fullMethod).With("feature", "method")
	}
	t, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		return nil, err
	}
	return t.New().Interface(), nil
}

// leader gives a connection to who leads, and the context of a call in the caller's name.
func (f *Forwarder) leader(ctx context.Context) (*grpc.ClientConn, context.Context, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, nil, err
	}
	asking, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	lease, err := f.cfg.Leases.Leader(asking)
	if err != nil {
		return nil, nil, err
	}
	address := addressOf(lease.Holder)
	if lease.Left <= 0 || address == "" || lease.Holder == f.cfg.Holder {
		return nil, nil, errs.New(errs.NoLeader, "nobody leads that can be asked")
	}
	body, err := json.Marshal(id)
	if err != nil {
		return nil, nil, err
	}
	said := []string{callerKey, base64.RawURLEncoding.EncodeToString(body)}
	for _, match := range metadata.ValueFromIncomingContext(ctx, wire.IfMatchKey) {
		said = append(said, wire.IfMatchKey, match) // a part of the request that came as a header
	}
	cc, err := f.dial(address)
	return cc, metadata.AppendToOutgoingContext(ctx, said...), err
}

func (f *Forwarder) dial(address string) (*grpc.ClientConn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, errs.New(errs.ShuttingDown, "the coordinator is stopping")
	}
	if f.cc != nil && f.address == address {
		return f.cc, nil
	}
	cc, err := grpc.NewClient(dial.Target(address), append(wire.DialOptions(), grpc.WithTransportCredentials(wire.TLS(f.cfg.TLS)),
		grpc.WithDisableRetry(), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: again, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}, MinConnectTimeout: 2 * time.Second}),
		dial.Option())...)
	if err != nil {
		return nil, err
	}
	if f.cc != nil {
		_ = f.cc.Close() // its only error is that it was closed already; who led there has nothing more to say
	}
	f.cc, f.address = cc, address
	return cc, nil
}

// maxMessage bounds an answer: a page of large records.
const maxMessage = 64 << 20

// opening is a stream with one request, which it remembers, and whether anything was answered.
type opening struct {
	grpc.ServerStream
	request proto.Message
	replay  bool
	begun   bool
}

func (w *opening) RecvMsg(m any) error {
	if w.replay {
		if into, ok := m.(proto.Message); ok {
			w.replay = false
			proto.Reset(into)
			proto.Merge(into, w.request)
			return nil
		}
	}
	err := w.ServerStream.RecvMsg(m)
	if msg, ok := m.(proto.Message); ok && err == nil && w.request == nil {
		w.request = msg
	}
	return err
}

func (w *opening) SendMsg(m any) error {
	w.begun = true
	return w.ServerStream.SendMsg(m)
}

// pass sends the request to the leader and its answers down.
func (w *opening) pass(ctx context.Context, cc *grpc.ClientConn, fullMethod string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	up, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, fullMethod)
	if err != nil {
		return err
	}
	if err := up.SendMsg(w.request); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := up.CloseSend(); err != nil {
		return err
	}
	for {
		msg := new(emptypb.Empty) // its bytes are kept as they are
		err := up.RecvMsg(msg)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := w.SendMsg(msg); err != nil {
			return err
		}
	}
}
