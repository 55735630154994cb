package activity

import (
	"context"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
)

// Unary notes calls into sandboxes: those of the data plane.
func (t *Tracker) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if _, ok := dataplane.VerbOf(info.FullMethod); ok {
		if uid := dataplane.SandboxUID(req); uid != "" {
			defer t.Use(uid)()
		}
	}
	return next(ctx, req)
}

// Stream notes streams into sandboxes, from their first message to their end.
func (t *Tracker) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if _, ok := dataplane.VerbOf(info.FullMethod); !ok {
		return next(srv, ss)
	}
	s := &stream{ServerStream: ss, t: t}
	defer func() {
		if s.done != nil {
			s.done()
		}
	}()
	return next(srv, s)
}

// stream is told who it is of by its first message.
type stream struct {
	grpc.ServerStream
	t    *Tracker
	done func()
}

// RecvMsg is called by one goroutine, and before the handler returns.
func (s *stream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if err == nil && s.done == nil {
		if uid := dataplane.SandboxUID(m); uid != "" {
			s.done = s.t.Use(uid)
		}
	}
	return err
}
