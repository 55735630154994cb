package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Whatever the reason, a mutation is made again only where the envelope allows it, and then as the same operation.
func TestOnlyWhatTheEnvelopeAllowsIsTriedAgain(t *testing.T) {
	s, c := local(t)
	operations := func() (ids []string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, call := range s.calls {
			ids = append(ids, strings.TrimPrefix(call, "Delete "))
		}
		s.calls = nil
		return ids
	}
	for _, reason := range errs.Reasons() {
		first := errs.New(reason, "the first answer")
		for name, answer := range map[string]*errs.Error{"": first, " as the operation's answer": first.AsAnswer(), " for good": first.WithOutcome(first.Outcome, errs.Never)} {
			s.answers["Delete"] = []error{answer}
			want := 1
			if name == "" && first.Retry != errs.Never && (first.Code != errs.ResourceExhausted || reason == errs.QueueFull) {
				want = 2
			}
			err := c.Sandbox("u").Delete(t.Context(), "")
			ids := operations()
			if len(ids) != want || (err == nil) != (want == 2) || err != nil && !errs.Has(err, reason) {
				t.Errorf("%s%s (%s, %s): %v after %d calls", reason, name, answer.Retry, answer.Outcome, err, len(ids))
			}
			if slices.Contains(ids, "") || len(slices.Compact(ids)) != 1 {
				t.Errorf("%s%s: the operation ids are %v", reason, name, ids)
			}
		}
	}
	// The caller's own operation id is kept.
	mine := uid.New()
	s.answers["Delete"] = []error{errs.New(errs.ReplyLost, "lost")}
	if err := c.Sandbox("u").Delete(t.Context(), mine); err != nil {
		t.Error(err)
	}
	if ids := operations(); !slices.Equal(ids, []string{mine, mine}) {
		t.Errorf("%v are not twice %s", ids, mine)
	}
}

// What has no operation id and is no read is sent once, also when its reply is lost.
func TestSentOnce(t *testing.T) {
	s, c := local(t)
	box := c.Sandbox("u")
	calls := map[string]func(context.Context) error{
		"Signal":        func(ctx context.Context) error { return box.Process("p").Signal(ctx, 15, false) },
		"Write":         func(ctx context.Context) error { return box.Process("p").Write(ctx, []byte("x"), false) },
		"MakeDirectory": func(ctx context.Context) error { return box.Files().MakeDirectory(ctx, "/a", false) },
		"Remove":        func(ctx context.Context) error { return box.Files().Remove(ctx, "/a", true) },
		"Move":          func(ctx context.Context) error { return box.Files().Move(ctx, "/a", "/b", false) },
	}
	for name, call := range calls {
		s.answers[name] = []error{errs.New(errs.ReplyLost, "lost")}
		if err := call(t.Context()); !errs.Has(err, errs.ReplyLost) || errs.From(err).Outcome != errs.Unknown || s.count(name) != 1 {
			t.Errorf("%s: %v after %d calls", name, err, s.count(name))
		}
	}
}

// The deadline holds for all attempts: the last answer is returned when it comes before another one.
func TestTheDeadlineEndsTryingAgain(t *testing.T) {
	s, c := local(t)
	before := firstBackoff
	firstBackoff = time.Hour
	defer func() { firstBackoff = before }()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	s.answers["Get"] = []error{errs.New(errs.NoLeader, "no leader")}
	err := c.Sandbox("u").Refresh(ctx)
	if !errs.Has(err, errs.NoLeader) && !errs.Has(err, errs.DeadlineExpired) || s.count("Get") > 1 {
		t.Errorf("%v after %d calls", err, s.count("Get"))
	}
}

func (s *server) SignalProcess(ctx context.Context, r *dormousev1.SignalProcessRequest) (*dormousev1.SignalProcessResponse, error) {
	return &dormousev1.SignalProcessResponse{}, s.call(ctx, "Signal", fmt.Sprint(r.GetSignal()))
}

func (s *server) WriteInput(ctx context.Context, r *dormousev1.WriteInputRequest) (*dormousev1.WriteInputResponse, error) {
	return &dormousev1.WriteInputResponse{}, s.call(ctx, "Write", r.GetProcessId())
}

func (s *server) MakeDirectory(ctx context.Context, r *dormousev1.MakeDirectoryRequest) (*dormousev1.MakeDirectoryResponse, error) {
	return &dormousev1.MakeDirectoryResponse{}, s.call(ctx, "MakeDirectory", r.GetPath())
}

func (s *server) RemoveFile(ctx context.Context, r *dormousev1.RemoveFileRequest) (*dormousev1.RemoveFileResponse, error) {
	return &dormousev1.RemoveFileResponse{}, s.call(ctx, "Remove", r.GetPath())
}

func (s *server) MoveFile(ctx context.Context, r *dormousev1.MoveFileRequest) (*dormousev1.MoveFileResponse, error) {
	return &dormousev1.MoveFileResponse{}, s.call(ctx, "Move", r.GetPath())
}

// An attempt that was not started does not undo one whose outcome is unknown.
func TestTheOutcomeIsOfAllAttempts(t *testing.T) {
	s, c := local(t)
	for _, last := range []errs.Reason{errs.NoLeader, errs.NameTaken} {
		s.answers["Delete"] = []error{errs.New(errs.ReplyLost, "lost"), errs.New(last, "refused"), errs.New(last, "refused"), errs.New(last, "refused")}
		err := c.Sandbox("u").Delete(t.Context(), "")
		if e := errs.From(err); e.Reason != last || e.Outcome != errs.Unknown {
			t.Errorf("%s after a lost reply: %v, %s", last, err, e.Outcome)
		}
		s.answers["Delete"] = nil
	}
}
