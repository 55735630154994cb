// Package errs is the one place that decides what an error means to a caller: its code,
// its reason, whether to retry and what became of the request. Package wire is the only one
// that maps these to gRPC statuses and REST bodies.
//
// An error is made from a Reason; the reason's row in the table fixes the code and the usual
// retry and outcome. A caller that knows more (a deadline that certainly struck before anything
// was sent) says so with WithOutcome.
//
// Messages say what to do next. They never carry a credential, a secret environment value or the
// content of a guest's memory.
package errs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"syscall"
)

// Code is the coarse class of an error. The set is closed.
type Code string

// The codes, as in the error envelope of the architecture page.
const (
	InvalidArgument   Code = "INVALID_ARGUMENT"
	Unauthenticated   Code = "UNAUTHENTICATED"
	PermissionDenied  Code = "PERMISSION_DENIED"
	NotFound          Code = "NOT_FOUND"
	Conflict          Code = "CONFLICT"
	ResourceExhausted Code = "RESOURCE_EXHAUSTED"
	Unavailable       Code = "UNAVAILABLE"
	DeadlineExceeded  Code = "DEADLINE_EXCEEDED"
	Cancelled         Code = "CANCELLED"
	OutcomeUnknown    Code = "OUTCOME_UNKNOWN"
	DataLoss          Code = "DATA_LOSS"
	Unsupported       Code = "UNSUPPORTED"
	Internal          Code = "INTERNAL"
)

// Retry says what a caller may do with the same request.
type Retry string

// Never: the same request will fail again. SameOperation: send it again with the same operation
// id. AfterBackoff: nothing was done; wait, then send it again, with a new operation id if the
// operation was accepted and failed: what an operation came to is its answer for good.
const (
	Never         Retry = "never"
	SameOperation Retry = "same_operation"
	AfterBackoff  Retry = "after_backoff"
)

// Outcome says what became of the request.
type Outcome string

// NotStarted: nothing was changed. Committed: the change is durable, although the call failed.
// Unknown: the operation id tells. Terminal: the object is gone or the data is lost.
const (
	NotStarted Outcome = "not_started"
	Committed  Outcome = "committed"
	Unknown    Outcome = "unknown"
	Terminal   Outcome = "terminal"
)

// Error is the envelope. It is immutable: the With methods return a copy.
type Error struct {
	Code        Code
	Reason      Reason
	Message     string
	Retry       Retry
	Outcome     Outcome
	RequestID   string
	OperationID string
	// Details are short facts for programs: the holder of a lock, a limit and what was asked,
	// both versions of an incompatible runtime. Keys are snake_case. Never secrets.
	Details map[string]string

	cause error
}

// New makes an error of the reason with a message for people.
// A reason outside the closed set is a programming error and becomes INTERNAL.
func New(reason Reason, format string, args ...any) *Error {
	row, ok := table[reason]
	if !ok {
		row, reason = table[InternalError], InternalError
	}
	return &Error{Code: row.code, Reason: reason, Message: fmt.Sprintf(format, args...), Retry: row.retry, Outcome: row.outcome}
}

// Wrap is New with a cause that errors.Is and errors.As can reach. The cause's text is not
// added to the message: say in the message what of it is safe to say.
//
// What failed because a disk of the host has no room is DISK_FULL wherever it was met, and not
// INTERNAL_ERROR: there is a way out, and somebody has to take it. A read-only disk has one too.
func Wrap(cause error, reason Reason, format string, args ...any) *Error {
	wayOut := ""
	if reason == InternalError {
		switch {
		case errors.Is(cause, syscall.ENOSPC), errors.Is(cause, syscall.EDQUOT):
			reason, wayOut = DiskFull, "; the disk is full: free some room, then try again"
		case errors.Is(cause, syscall.EROFS):
			wayOut = "; the disk is read-only: look at the kernel's log for why, repair it and mount it writable"
		}
	}
	e := New(reason, format, args...)
	e.Message += wayOut
	e.cause = cause
	return e
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s/%s: %s", e.Code, e.Reason, e.Message)
}

// Unwrap gives the cause, if there is one.
func (e *Error) Unwrap() error { return e.cause }

// Is matches another *Error by reason, so that errors.Is(err, errs.New(errs.StaleUID, "")) and
// the shorter errs.Has(err, errs.StaleUID) agree.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Reason == e.Reason
}

func (e *Error) clone() *Error {
	c := *e
	c.Details = maps.Clone(e.Details)
	return &c
}

// With returns a copy with one more detail.
func (e *Error) With(key, value string) *Error {
	c := e.clone()
	if c.Details == nil {
		c.Details = make(map[string]string, 1)
	}
	c.Details[key] = value
	return c
}

// WithOutcome returns a copy with an outcome and retry that the caller knows better than the table.
func (e *Error) WithOutcome(outcome Outcome, retry Retry) *Error {
	c := e.clone()
	c.Outcome, c.Retry = outcome, retry
	return c
}

// operationState is the detail of an error that is what an operation came to.
const operationState, operationFailed = "operation_state", "Failed"

// AsAnswer says that the error is what the operation came to: its id gives the same for good, and another attempt
// needs another id.
func (e *Error) AsAnswer() *Error { return e.With(operationState, operationFailed) }

// IsAnswer tells whether the same operation id can only give this error again, whatever Retry says of another one.
func (e *Error) IsAnswer() bool { return e.Details[operationState] == operationFailed }

// WithRequest returns a copy that carries the ids of the request; empty ones leave what is there.
func (e *Error) WithRequest(requestID, operationID string) *Error {
	c := e.clone()
	if requestID != "" {
		c.RequestID = requestID
	}
	if operationID != "" {
		c.OperationID = operationID
	}
	return c
}

// From gives the envelope of any error: the *Error in its chain; a context's error as
// DEADLINE_EXCEEDED or CANCELLED with outcome unknown; anything else as INTERNAL, whose text
// stays in the cause (for the log) and out of the message. From(nil) is nil.
func From(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return Wrap(err, DeadlineExpired, "the deadline passed before the work was done; ask again with the same operation id to learn its outcome")
	case errors.Is(err, context.Canceled):
		return Wrap(err, CallCancelled, "the call was cancelled; ask again with the same operation id to learn its outcome")
	}
	return Wrap(err, InternalError, "internal error; the log of the server has it under the request id")
}

// Has tells whether the chain holds an error of the reason.
func Has(err error, reason Reason) bool {
	var e *Error
	return errors.As(err, &e) && e.Reason == reason
}

// ReasonOf gives the reason in the chain, or "" for nil and INTERNAL_ERROR for a foreign error.
func ReasonOf(err error) Reason {
	if err == nil {
		return ""
	}
	return From(err).Reason
}

// NotStartedFor tells whether the chain's error is certain that nothing was changed.
func NotStartedFor(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Outcome == NotStarted
}

// OfAll gives the error of a call that was made again: where the outcome of an earlier attempt is unknown, that the last one was
// not started says nothing of all together.
func OfAll(last error, unknown bool) error {
	var e *Error
	if !unknown || !errors.As(last, &e) || e.Outcome != NotStarted {
		return last
	}
	retry := e.Retry
	if retry == AfterBackoff {
		retry = SameOperation
	}
	return e.WithOutcome(Unknown, retry)
}
