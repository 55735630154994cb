package wire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
)

// RequestIDKey is the metadata key, and in its HTTP form the header, of a request's id.
const RequestIDKey = "x-request-id"

// Server is what surrounds every call that a server answers: the request's id, the mapping of
// errors, panics, one log line, metrics.
type Server struct {
	log     *slog.Logger
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	running *prometheus.GaugeVec
	methods sync.Map // full method -> struct{}: those that exist, so that a caller cannot grow the metrics
}

// NewServer makes the interceptors and registers their metrics. A nil registerer keeps them unregistered.
func NewServer(log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	s := &Server{
		log: log,
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dormouse_rpc_total", Help: "Calls answered, by method and code of the error envelope."}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dormouse_rpc_seconds", Help: "Time to answer, by method; streams until their end.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18)}, []string{"method"}),
		running: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dormouse_rpc_running", Help: "Calls being answered, by method."}, []string{"method"}),
	}
	if reg == nil {
		return s, nil
	}
	for _, c := range []prometheus.Collector{s.calls, s.seconds, s.running} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register rpc metrics: %w", err)
		}
	}
	return s, nil
}

// Options gives the server options. They come first, so that errors of interceptors that are
// chained after them (authentication) are mapped and counted too.
func (s *Server) Options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(s.Unary()),
		grpc.ChainStreamInterceptor(s.Stream()),
		grpc.ForceServerCodecV2(codec),
		grpc.ReadBufferSize(connBuffer), grpc.WriteBufferSize(connBuffer),
		grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			return errs.New(errs.NotSupported, "this server has no such method; its version may be older than the client's").With("feature", "method")
		}),
	}
}

// Unary is the interceptor of unary calls.
func (s *Server) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
		c := s.begin(ctx, info.FullMethod)
		if id := operationID(req); id != "" {
			c.ctx = obs.WithOperationID(c.ctx, id)
		}
		_ = grpc.SetHeader(c.ctx, metadata.Pairs(RequestIDKey, c.requestID)) // fails only after the headers went out
		defer func() { err = c.end(err, recover()) }()
		return next(c.ctx, req)
	}
}

// Stream is the interceptor of streaming calls.
func (s *Server) Stream() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
		c := s.begin(ss.Context(), info.FullMethod)
		_ = ss.SetHeader(metadata.Pairs(RequestIDKey, c.requestID)) // fails only after the headers went out
		w := &serverStream{ServerStream: ss, ctx: c.ctx}
		defer func() {
			c.ctx = obs.WithOperationID(c.ctx, w.operationID)
			err = c.end(err, recover())
		}()
		return next(srv, w)
	}
}

// serverStream carries the call's context and remembers the operation of the first message. Later messages
// leave it alone: they may be received by another goroutine than the handler's, even while the
// call ends.
type serverStream struct {
	grpc.ServerStream
	ctx         context.Context //nolint:containedctx // the interface of gRPC asks for it
	begun       bool
	operationID string
}

func (w *serverStream) Context() context.Context { return w.ctx }

func (w *serverStream) RecvMsg(m any) error {
	err := w.ServerStream.RecvMsg(m)
	if !w.begun {
		w.begun, w.operationID = true, operationID(m)
	}
	return err
}

// operationID finds the operation of a request: its own field, or that of a node's command.
func operationID(req any) string {
	if r, ok := req.(interface{ GetOperationId() string }); ok {
		return r.GetOperationId()
	}
	m, ok := req.(interface{ ProtoReflect() protoreflect.Message })
	if !ok {
		return ""
	}
	msg := m.ProtoReflect()
	command := msg.Descriptor().Fields().ByName("command")
	if command == nil || command.Message() == nil || command.IsList() || !msg.Has(command) {
		return ""
	}
	inner := msg.Get(command).Message()
	id := inner.Descriptor().Fields().ByName("operation_id")
	if id == nil || id.Kind() != protoreflect.StringKind {
		return ""
	}
	return inner.Get(id).String()
}

// call is one call being answered.
type call struct {
	s         *Server
	ctx       context.Context //nolint:containedctx // lives as long as the interceptor's frame
	requestID string
	method    string
	start     time.Time
}

func (s *Server) begin(ctx context.Context, method string) *call {
	id := ""
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if v := md.Get(RequestIDKey); len(v) == 1 && obs.ValidRequestID(v[0]) {
			id = v[0]
		}
	}
	if id == "" {
		id = obs.NewRequestID()
	}
	c := &call{s: s, ctx: obs.WithRequestID(ctx, id), requestID: id, method: s.methodLabel(method), start: time.Now()}
	s.running.WithLabelValues(c.method).Inc()
	return c
}

// end maps the error, and records how the call went. It is given what recover() returned.
func (c *call) end(err error, panicked any) error {
	if panicked != nil {
		err = errs.Wrap(fmt.Errorf("panic: %v\n%s", panicked, debug.Stack()), errs.InternalError,
			"internal error; the log of the server has it under the request id")
	}
	took := time.Since(c.start)
	c.s.running.WithLabelValues(c.method).Dec()
	c.s.seconds.WithLabelValues(c.method).Observe(took.Seconds())
	attrs := []slog.Attr{slog.String("method", c.method), slog.Duration("took", took)}
	if p, ok := peer.FromContext(c.ctx); ok {
		attrs = append(attrs, slog.String("peer", p.Addr.String()))
	}
	if err == nil {
		c.s.calls.WithLabelValues(c.method, "OK").Inc()
		c.s.log.LogAttrs(c.ctx, okLevel(c.method), "rpc", append(attrs, slog.String("code", "OK"))...)
		return nil
	}
	e := answered(err)
	c.s.calls.WithLabelValues(c.method, string(e.Code)).Inc()
	attrs = append(attrs, slog.String("code", string(e.Code)), slog.String("reason", string(e.Reason)),
		slog.String("outcome", string(e.Outcome)), slog.String("message", e.Message))
	if cause := e.Unwrap(); cause != nil {
		attrs = append(attrs, slog.String("cause", cause.Error()))
	}
	level := slog.LevelInfo
	if e.Code == errs.Internal || e.Code == errs.DataLoss {
		level = slog.LevelError
	}
	c.s.log.LogAttrs(c.ctx, level, "rpc", attrs...)
	return ToStatus(e, c.requestID, obs.OperationID(c.ctx)).Err()
}

// answered gives the envelope of what a handler returned: its own error, or the status of a call
// that it passed on.
func answered(err error) *errs.Error {
	e := Envelope(err)
	var st interface{ GRPCStatus() *status.Status }
	if e.Reason == errs.InternalError && errors.As(err, &st) {
		return FromStatus(st.GRPCStatus().Err())
	}
	return e
}

// okLevel keeps reading quiet: what looks is at debug, what changes is at info.
func okLevel(method string) slog.Level {
	name := method[strings.LastIndex(method, "/")+1:]
	for _, p := range []string{"Get", "List", "Wait", "Watch", "Read", "Overview", "Check"} {
		if strings.HasPrefix(name, p) {
			return slog.LevelDebug
		}
	}
	return slog.LevelInfo
}

// methodLabel gives the method, or "unknown" for one that no linked proto has.
func (s *Server) methodLabel(full string) string {
	if _, ok := s.methods.Load(full); ok {
		return full
	}
	service, method, ok := strings.Cut(strings.TrimPrefix(full, "/"), "/")
	if !ok {
		return "unknown"
	}
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return "unknown"
	}
	sd, ok := d.(protoreflect.ServiceDescriptor)
	if !ok || sd.Methods().ByName(protoreflect.Name(method)) == nil {
		return "unknown"
	}
	s.methods.Store(full, struct{}{})
	return full
}
