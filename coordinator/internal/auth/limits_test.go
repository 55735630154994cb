package auth

import (
	"context"
	"testing"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Calls and streams are counted apart, and only while they go on.
func TestAdmission(t *testing.T) {
	a := Admission{admission.New(admission.Limits{Calls: 1, Streams: 1}, nil)}
	ctx := With(context.Background(), Identity{Tenant: "acme"})
	unary := func(inside func() error) error {
		_, err := a.Unary()(ctx, nil, nil, func(context.Context, any) (any, error) { return nil, inside() })
		return err
	}
	stream := func(inside func() error) error {
		return a.Stream()(nil, fakeStream{ctx: ctx}, nil, func(any, grpc.ServerStream) error { return inside() })
	}
	nothing := func() error { return nil }
	for range 2 {
		err := unary(func() error {
			return stream(func() error {
				if err := unary(nothing); !errs.Has(err, errs.TooMany) {
					t.Errorf("a second call: %v", err)
				}
				if err := stream(nothing); !errs.Has(err, errs.TooMany) {
					t.Errorf("a second stream: %v", err)
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

type fakeStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // the interface of gRPC asks for it
}

func (s fakeStream) Context() context.Context { return s.ctx }
