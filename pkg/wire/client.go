package wire

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/obs"
)

// connBuffer is how much a connection reads or writes at a time: a file's bytes take a quarter of the system
// calls that they would with gRPC's own size.
const connBuffer = 128 << 10

// What is sent and not read yet of a stream, and on a connection. The connection's is refilled as bytes arrive, so
// that a stream that nobody reads stops only itself. They are fixed: gRPC's own estimate begins too low for a file and
// may grow to 16 MiB for each stream.
const (
	streamWindow = 256 << 10
	connWindow   = 4 << 20
)

// DialOptions gives the interceptors of a client: its errors are *errs.Error, and the request's id
// in the context goes with the call.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(UnaryClient),
		grpc.WithChainStreamInterceptor(StreamClient),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec)),
		grpc.WithReadBufferSize(connBuffer), grpc.WithWriteBufferSize(connBuffer),
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
	}
}

// UnaryClient is the interceptor of unary calls.
func UnaryClient(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return clientError(invoke(outgoing(ctx), method, req, reply, cc, opts...))
}

// StreamClient is the interceptor of streams.
func StreamClient(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := open(outgoing(ctx), desc, cc, method, opts...)
	if err != nil {
		return nil, clientError(err)
	}
	return &clientStream{s}, nil
}

func outgoing(ctx context.Context) context.Context {
	id := obs.RequestID(ctx)
	if id == "" {
		return ctx
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md.Get(RequestIDKey)) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, RequestIDKey, id)
}

// clientError maps an error; a nil *errs.Error must not become a non-nil error.
func clientError(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if e := FromStatus(err); e != nil {
		return e
	}
	return nil
}

type clientStream struct{ grpc.ClientStream }

func (s *clientStream) SendMsg(m any) error { return clientError(s.ClientStream.SendMsg(m)) }

func (s *clientStream) RecvMsg(m any) error { return clientError(s.ClientStream.RecvMsg(m)) }

func (s *clientStream) CloseSend() error { return clientError(s.ClientStream.CloseSend()) }

func (s *clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, clientError(err)
}
