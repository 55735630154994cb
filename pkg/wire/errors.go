// Package wire is the only mapping between the domain and what goes over the wire: errors to gRPC
// statuses and REST bodies, and the objects of pkg/sandbox, pkg/snapshot and pkg/volume to protos.
//
// An error leaves a server as a gRPC status whose detail is the envelope dormouse.v1.Error, or as
// a REST body that is the envelope. It comes back as the *errs.Error it was. What arrives without
// an envelope comes from the transport, and its outcome is unknown: the request may have arrived.
package wire

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/phase"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Bounds of an envelope, so that it always fits into a status' trailer.
const (
	maxMessage = 4 << 10
	maxDetail  = 2 << 10
	maxDetails = 64
)

// aborted and exists are the reasons of CONFLICT that are not FailedPrecondition.
var (
	aborted = map[errs.Reason]bool{errs.StaleRevision: true, errs.AttemptVoid: true}
	exists  = map[errs.Reason]bool{errs.NameTaken: true, errs.OperationBodyMismatch: true}
)

// GRPCCode gives the gRPC code of an error.
func GRPCCode(e *errs.Error) codes.Code {
	switch e.Code {
	case errs.InvalidArgument:
		return codes.InvalidArgument
	case errs.Unauthenticated:
		return codes.Unauthenticated
	case errs.PermissionDenied:
		return codes.PermissionDenied
	case errs.NotFound:
		return codes.NotFound
	case errs.Conflict:
		switch {
		case aborted[e.Reason]:
			return codes.Aborted
		case exists[e.Reason]:
			return codes.AlreadyExists
		}
		return codes.FailedPrecondition
	case errs.ResourceExhausted:
		return codes.ResourceExhausted
	case errs.Unavailable, errs.OutcomeUnknown:
		return codes.Unavailable
	case errs.DeadlineExceeded:
		return codes.DeadlineExceeded
	case errs.Cancelled:
		return codes.Canceled
	case errs.DataLoss:
		return codes.DataLoss
	case errs.Unsupported:
		return codes.Unimplemented
	}
	return codes.Internal
}

// HTTPCode gives the HTTP status of an error.
func HTTPCode(e *errs.Error) int {
	switch e.Code {
	case errs.InvalidArgument:
		return http.StatusBadRequest
	case errs.Unauthenticated:
		return http.StatusUnauthorized
	case errs.PermissionDenied:
		return http.StatusForbidden
	case errs.NotFound:
		return http.StatusNotFound
	case errs.Conflict:
		return http.StatusConflict
	case errs.ResourceExhausted:
		return http.StatusTooManyRequests
	case errs.Unavailable, errs.OutcomeUnknown:
		return http.StatusServiceUnavailable
	case errs.DeadlineExceeded:
		return http.StatusGatewayTimeout
	case errs.Cancelled:
		return 499
	case errs.Unsupported:
		return http.StatusNotImplemented
	}
	return http.StatusInternalServerError
}

// Envelope gives the envelope of any error. Beyond errs.From it knows the domain's own errors: a
// validation problem, and a transition that no table has.
func Envelope(err error) *errs.Error {
	if err == nil {
		return nil
	}
	var (
		e *errs.Error
		p *sandbox.Problem
		m *phase.TransitionError
	)
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &p):
		return problem(p)
	case errors.As(err, &m):
		return errs.Wrap(err, errs.WrongPhase, "%s; look at its phase and try what it allows", m).With("phase", m.From)
	}
	return errs.From(err)
}

// FromProblem gives the error of a validation problem, and a nil error for none.
func FromProblem(p *sandbox.Problem) error {
	if p == nil {
		return nil
	}
	return problem(p)
}

func problem(p *sandbox.Problem) *errs.Error {
	e := errs.Wrap(p, errs.Reason(p.Reason), "%s", p.Message)
	for k, v := range p.Details {
		e = e.With(k, v)
	}
	if p.Field != "" {
		e = e.With("field", p.Field)
	}
	return e
}

// ErrorToProto gives the envelope as a message: bounded, and valid UTF-8 whatever the error held.
func ErrorToProto(e *errs.Error) *dormousev1.Error {
	if e == nil {
		return nil
	}
	out := &dormousev1.Error{
		Code: string(e.Code), Reason: string(e.Reason), Message: clip(e.Message, maxMessage),
		Retry: string(e.Retry), Outcome: string(e.Outcome),
		RequestId: clip(e.RequestID, maxDetail), OperationId: clip(e.OperationID, maxDetail),
	}
	for k, v := range e.Details {
		if len(out.Details) == maxDetails {
			break
		}
		if out.Details == nil {
			out.Details = make(map[string]string, len(e.Details))
		}
		out.Details[clip(k, maxDetail)] = clip(v, maxDetail)
	}
	return out
}

// ErrorFromProto gives the error of an envelope. A reason that this build does not know is kept: a
// newer server may have more of them, and its code still says what to do.
func ErrorFromProto(p *dormousev1.Error) *errs.Error {
	if p == nil {
		return nil
	}
	return &errs.Error{
		Code: errs.Code(p.GetCode()), Reason: errs.Reason(p.GetReason()), Message: p.GetMessage(),
		Retry: errs.Retry(p.GetRetry()), Outcome: errs.Outcome(p.GetOutcome()),
		RequestID: p.GetRequestId(), OperationID: p.GetOperationId(), Details: p.GetDetails(),
	}
}

// ToStatus gives the status that a server answers with. The ids fill in what the error does not
// carry itself.
func ToStatus(err error, requestID, operationID string) *status.Status {
	if err == nil {
		return status.New(codes.OK, "")
	}
	e := Envelope(err)
	if e.RequestID != "" {
		requestID = ""
	}
	if e.OperationID != "" {
		operationID = ""
	}
	detail := ErrorToProto(e.WithRequest(requestID, operationID))
	st, attachErr := status.New(GRPCCode(e), detail.GetMessage()).WithDetails(detail)
	if attachErr != nil {
		return status.New(codes.Internal, "the error could not be encoded")
	}
	return st
}

// FromStatus gives the envelope of what a call returned. Without one in it the error is the
// transport's: whether the request arrived is unknown, even where the connection was refused,
// because the channel below may have tried before.
func FromStatus(err error) *errs.Error {
	if err == nil {
		return nil
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errs.From(err)
	}
	st, ok := status.FromError(err)
	if !ok {
		return errs.From(err)
	}
	for _, d := range st.Details() {
		if p, ok := d.(*dormousev1.Error); ok && p.GetReason() != "" {
			return ErrorFromProto(p)
		}
	}
	switch st.Code() {
	case codes.OK:
		return nil
	case codes.DeadlineExceeded:
		return errs.From(context.DeadlineExceeded)
	case codes.Canceled:
		return errs.From(context.Canceled)
	}
	if _, sizes, ok := strings.Cut(st.Message(), "message larger than max ("); ok && st.Code() == codes.ResourceExhausted {
		// gRPC's own refusal of a request, before anything of ours has seen it, or of an answer.
		got, limit, _ := strings.Cut(strings.TrimSuffix(sizes, ")"), " vs. ")
		return errs.Wrap(err, errs.LimitExceeded, "a message of %s bytes is too large, the limit is %s; send large data in pieces", clip(got, 20), clip(limit, 20)).
			With("field", "message").With("limit", clip(limit, 20)).With("got", clip(got, 20)).WithOutcome(errs.Unknown, errs.Never)
	}
	return errs.Wrap(err, errs.ReplyLost, "%s; if a call was on its way, ask again with the same operation id to learn its outcome", noAnswer(st.Message())).
		With("grpc_code", st.Code().String())
}

// noAnswer says why there is no answer, from what the transport says. The texts are gRPC's: one that
// is not known is passed on as it is.
func noAnswer(said string) string {
	for _, known := range []struct{ mark, text string }{
		{"Error while dialing: ", "the server cannot be reached (%s)"},
		{"authentication handshake failed: ", "the server was not trusted, or did not trust the caller (%s); check the address and the CA"},
	} {
		if _, why, ok := strings.Cut(said, known.mark); ok {
			return fmt.Sprintf(known.text, clip(strings.TrimSuffix(why, `"`), maxDetail))
		}
	}
	if strings.Contains(said, "unexpected HTTP status code received from server") {
		return "what answers there does not speak gRPC; check the address and the port"
	}
	return fmt.Sprintf("no answer from the server (%s)", clip(said, maxDetail))
}

// clip bounds a text and makes it valid UTF-8.
func clip(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}
