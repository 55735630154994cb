package auth

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
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

// recheck is how often the credentials of an open stream are looked at again.
const recheck = 2 * time.Second

// Stream is Unary for streams. A stream lives no longer than its credentials: when they are revoked, it
// ends with the error of a call that was begun then.
func Stream(who Resolver) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if open(info.FullMethod) {
			return next(srv, ss)
		}
		id, err := who(ss.Context())
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancelCause(With(ss.Context(), id))
		var watching sync.WaitGroup
		watching.Go(func() { watch(ctx, cancel, func() error { return still(ss.Context(), who, id) }) })
		err = next(srv, &stream{ss, ctx})
		revoked := context.Cause(ctx)
		cancel(nil)
		watching.Wait()
		if err != nil && revoked != nil && ss.Context().Err() == nil {
			return revoked
		}
		return err
	}
}

// watch cancels with the error of the check, once it fails.
func watch(ctx context.Context, cancel context.CancelCauseFunc, check func() error) {
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := check(); err != nil {
				cancel(err)
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// still tells whether the caller is who it was.
func still(ctx context.Context, who Resolver, was Identity) error {
	id, err := who(ctx)
	if err == nil && (id.Tenant != was.Tenant || !slices.Equal(id.Roles, was.Roles)) {
		err = errs.New(errs.CredentialsInvalid, "the credentials are no longer those that the stream was opened with")
	}
	return err
}

type stream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // the interface of gRPC asks for it
}

func (s *stream) Context() context.Context { return s.ctx }
