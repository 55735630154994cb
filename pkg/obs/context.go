// Package obs is how both daemons are seen from outside: structured logs that carry the ids of the
// request, its operation and what it acts on; metrics; profiles; health; all but the logs on an
// admin socket that only root can open.
//
// It decides nothing and never sees a secret: who logs passes ids and counts.
package obs

import (
	"context"
	"log/slog"
	"regexp"
	"slices"

	"github.com/dormouse-run/dormouse/pkg/uid"
)

type requestKey struct{}
type operationKey struct{}
type attrsKey struct{}

// NewRequestID makes an id for a request that came without one.
func NewRequestID() string { return uid.New() }

var requestForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{7,63}$`)

// ValidRequestID tells whether an id given by a caller may go into logs and answers:
// 8 to 64 letters, digits, '.', '_' and '-'.
func ValidRequestID(id string) bool { return requestForm.MatchString(id) }

// WithRequestID puts the request's id into the context.
func WithRequestID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, requestKey{}, id)
}

// RequestID gives the request's id, or "".
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestKey{}).(string)
	return id
}

// WithOperationID puts the operation's id into the context.
func WithOperationID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, operationKey{}, id)
}

// OperationID gives the operation's id, or "".
func OperationID(ctx context.Context) string {
	id, _ := ctx.Value(operationKey{}).(string)
	return id
}

// With adds attributes (sandbox, node, epoch) to every log line of the context.
func With(ctx context.Context, attrs ...slog.Attr) context.Context {
	return context.WithValue(ctx, attrsKey{}, append(slices.Clone(attrsOf(ctx)), attrs...))
}

func attrsOf(ctx context.Context) []slog.Attr {
	attrs, _ := ctx.Value(attrsKey{}).([]slog.Attr)
	return attrs
}
