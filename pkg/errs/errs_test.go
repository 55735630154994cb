package errs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// The architecture's table: what each code promises. Rows that say otherwise are listed below it.
var promises = map[Code]struct {
	retry   Retry
	outcome Outcome
}{
	InvalidArgument: {Never, NotStarted}, Unauthenticated: {Never, NotStarted}, PermissionDenied: {Never, NotStarted},
	NotFound: {Never, Terminal}, Conflict: {Never, NotStarted}, ResourceExhausted: {AfterBackoff, NotStarted},
	Unavailable: {AfterBackoff, NotStarted}, DeadlineExceeded: {SameOperation, Unknown}, Cancelled: {SameOperation, Unknown},
	OutcomeUnknown: {SameOperation, Unknown}, DataLoss: {Never, Terminal}, Unsupported: {Never, NotStarted},
	Internal: {SameOperation, Unknown},
}

func TestEveryReasonKeepsItsCodesPromise(t *testing.T) {
	used := make(map[Code]bool)
	for _, r := range Reasons() {
		e := New(r, "x")
		used[e.Code] = true
		want, ok := promises[e.Code]
		if !ok {
			t.Errorf("%s has the code %q, which is not of the closed set", r, e.Code)
			continue
		}
		if r == SandboxFailed || r == SetupFailed || r == InvariantBroken { // that it failed is known, and the same operation again would fail too
			want.retry, want.outcome = Never, Terminal
		}
		if e.Retry != want.retry || e.Outcome != want.outcome {
			t.Errorf("%s: %s/%s, want %s/%s", r, e.Retry, e.Outcome, want.retry, want.outcome)
		}
		if e.Reason != r || !Known(r) || strings.ToUpper(string(r)) != string(r) {
			t.Errorf("%s became %s", r, e.Reason)
		}
	}
	for c := range promises {
		if !used[c] {
			t.Errorf("no reason has the code %s", c)
		}
	}
}

func TestForeignReasonBecomesInternal(t *testing.T) {
	if e := New("MADE_UP", "x"); e.Reason != InternalError || e.Code != Internal || Known("MADE_UP") {
		t.Errorf("got %+v", e)
	}
}

func TestErrorsAreImmutable(t *testing.T) {
	e := New(AlreadyAttached, "held by %s", "a").With("holder", "a")
	_ = e.With("holder", "b")
	_ = e.WithOutcome(Committed, SameOperation)
	_ = e.WithRequest("r", "o")
	if e.Details["holder"] != "a" || e.Outcome != NotStarted || e.RequestID != "" || e.OperationID != "" {
		t.Errorf("changed: %+v", e)
	}
	f := e.WithRequest("r", "o").WithRequest("", "")
	if f.RequestID != "r" || f.OperationID != "o" {
		t.Errorf("empty ids took the place of %+v", f)
	}
	if g := e.WithOutcome(Committed, SameOperation); g.Outcome != Committed || g.Retry != SameOperation || g.Reason != AlreadyAttached {
		t.Errorf("got %+v", g)
	}
}

func TestMatching(t *testing.T) {
	cause := errors.New("disk on fire")
	err := fmt.Errorf("while writing: %w", Wrap(cause, DiskFull, "no room; free some"))
	if !Has(err, DiskFull) || Has(err, NodeAway) || Has(nil, DiskFull) || !errors.Is(err, cause) || !errors.Is(err, New(DiskFull, "")) {
		t.Error("the chain does not match")
	}
	if ReasonOf(err) != DiskFull || ReasonOf(nil) != "" || ReasonOf(cause) != InternalError {
		t.Error("the reason is lost")
	}
	if !NotStartedFor(err) || NotStartedFor(cause) || NotStartedFor(nil) {
		t.Error("what is certain is lost")
	}
	if s := From(err).Error(); s != "RESOURCE_EXHAUSTED/DISK_FULL: no room; free some" {
		t.Errorf("text: %s", s)
	}
}

// A host's disk without room is that, wherever it was met; a reason that says more stays.
func TestHostDisk(t *testing.T) {
	full := &os.PathError{Op: "write", Path: "/x", Err: syscall.ENOSPC}
	if e := Wrap(full, InternalError, "write the record: %v", full); e.Reason != DiskFull || e.Code != ResourceExhausted ||
		!strings.HasPrefix(e.Message, "write the record: ") || !strings.Contains(e.Message, "free some room") || !errors.Is(e, syscall.ENOSPC) {
		t.Errorf("a full disk is %v", e)
	}
	if e := Wrap(full, SandboxFailed, "x"); e.Reason != SandboxFailed || e.Message != "x" {
		t.Errorf("a reason that was given became %v", e)
	}
	if e := Wrap(&os.PathError{Op: "open", Path: "/x", Err: syscall.EROFS}, InternalError, "x"); e.Reason != InternalError || !strings.Contains(e.Message, "mount it writable") {
		t.Errorf("a read-only disk is %v", e)
	}
}

func TestFromForeignErrors(t *testing.T) {
	secret := errors.New("password=hunter2")
	e := From(secret)
	if e.Reason != InternalError || strings.Contains(e.Error(), "hunter2") || !errors.Is(e, secret) {
		t.Errorf("got %v", e)
	}
	for err, want := range map[error]Reason{context.DeadlineExceeded: DeadlineExpired, context.Canceled: CallCancelled} {
		e := From(fmt.Errorf("x: %w", err))
		if e.Reason != want || e.Outcome != Unknown || !errors.Is(e, err) {
			t.Errorf("%v: %+v", err, e)
		}
	}
	if From(nil) != nil {
		t.Error("nil became an error")
	}
}

func TestOfAll(t *testing.T) {
	if OfAll(nil, true) != nil {
		t.Error("no error became one")
	}
	refused := New(NoLeader, "nobody")
	if e := From(OfAll(refused, false)); e.Outcome != NotStarted || e.Retry != AfterBackoff {
		t.Errorf("the only attempt: %s, %s", e.Outcome, e.Retry)
	}
	if e := From(OfAll(refused, true)); e.Outcome != Unknown || e.Retry != SameOperation || e.Reason != NoLeader {
		t.Errorf("after one of unknown outcome: %s, %s, %s", e.Reason, e.Outcome, e.Retry)
	}
	if e := From(OfAll(New(NameTaken, "taken"), true)); e.Outcome != Unknown || e.Retry != Never {
		t.Errorf("a conflict after one of unknown outcome: %s, %s", e.Outcome, e.Retry)
	}
	if e := From(OfAll(New(ObjectNotFound, "gone"), true)); e.Outcome != Terminal {
		t.Errorf("what is gone for good: %s", e.Outcome)
	}
}
