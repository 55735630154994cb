package auth

import (
	"context"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/admission"
)

// Admission refuses calls over the limits of their tenant; it stands behind the authentication.
type Admission struct{ *admission.Admission }

// Unary admits calls.
func (a Admission) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		id, err := From(ctx)
		if err != nil {
			return next(ctx, req) // open to all, or refused by the handler
		}
		leave, err := a.Enter(id.Tenant, false)
		if err != nil {
			return nil, err
		}
		defer leave()
		return next(ctx, req)
	}
}

// Stream is Unary for streams.
func (a Admission) Stream() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		id, err := From(ss.Context())
		if err != nil {
			return next(srv, ss) // open to all, or refused by the handler
		}
		leave, err := a.Enter(id.Tenant, true)
		if err != nil {
			return err
		}
		defer leave()
		return next(srv, ss)
	}
}
