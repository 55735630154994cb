package auth

import (
	"context"
	"strings"

	"google.golang.org/grpc"
)

// Resolver tells who makes a call.
type Resolver func(ctx context.Context) (Identity, error)

// open lists what needs no credentials: health, which says nothing of anybody.
func open(method string) bool { return strings.HasPrefix(method, "/grpc.health.v1.Health/") }

// Unary refuses calls without credentials and puts the identity into the context.
func Unary(who Resolver) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if open(info.FullMethod) {
			return next(ctx, req)
		}
		id, err := who(ctx)
		if err != nil {
			return nil, err
		}
		return next(With(ctx, id), req)
	}
}

// Stream is Unary for streams.
func Stream(who Resolver) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if open(info.FullMethod) {
			return next(srv, ss)
		}
		id, err := who(ss.Context())
		if err != nil {
			return err
		}
		return next(srv, &stream{ss, With(ss.Context(), id)})
	}
}

type stream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // the interface of gRPC asks for it
}

func (s *stream) Context() context.Context { return s.ctx }
