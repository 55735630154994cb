package guest

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// registered tells how many calls and streams wait for the guest.
func (c *Conn) registered() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.receivers)
}

func drain(t *testing.T, run *Running) (out, errOut string, e Exit) {
	t.Helper()
	var got collector
	for {
		which, chunk, err := run.Next(ctx(t))
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		must(t, got.sink(which, chunk))
	}
	e, err := run.Wait(ctx(t))
	must(t, err)
	return got.out.String(), got.err.String(), e
}

// TestStartFollowed: a process with all that it writes and its end, by one request; and again under the same id.
func TestStartFollowed(t *testing.T) {
	c := newSandbox(t).open(t)
	for range 2 {
		run, err := c.StartFollowed(ctx(t), subject("p", "echo", "hello"))
		must(t, err)
		out, errOut, e := drain(t, run)
		if run.Process.ID != "p" || run.Process.PID <= 1 || out != "hello\n" || errOut != "err\n" || e.Code != 0 {
			t.Fatalf("%+v wrote %q and %q: %+v", run.Process, out, errOut, e)
		}
		run.Close()
		run.Close()
	}
	if n := c.registered(); n != 0 {
		t.Fatalf("%d streams are left", n)
	}
}

// TestStartFollowedRefused: nothing is started, and nothing stays behind, nor is anything said that nobody takes.
func TestStartFollowedRefused(t *testing.T) {
	c := newSandbox(t).open(t)
	for want, r := range map[errs.Reason]StartRequest{
		errs.CommandNotFound: {ID: "a", Args: []string{"absent"}}, errs.UserNotFound: {ID: "b", Args: []string{"subject"}, User: "nobody-here"},
		errs.LimitExceeded: {ID: "c", Args: []string{"subject", strings.Repeat("x", 300<<10)}}, errs.InvalidField: {ID: "d"},
	} {
		if run, err := c.StartFollowed(ctx(t), r); run != nil || !errs.Has(err, want) {
			t.Errorf("%v, want %s", err, want)
		}
		if n := c.registered(); n != 0 {
			t.Errorf("%s: %d streams are left", want, n)
		}
	}
	if all, err := c.List(ctx(t)); err != nil || len(all) != 0 {
		t.Errorf("started: %+v %v", all, err)
	}
}

// TestStartFollowedOfAnother: a process that has the id already is left alone, and is not waited for.
func TestStartFollowedOfAnother(t *testing.T) {
	c := newSandbox(t).open(t)
	first, err := c.StartFollowed(ctx(t), stdin(subject("p", "cat")))
	must(t, err)
	defer first.Close()
	if _, err := c.StartFollowed(ctx(t), subject("p", "echo", "other")); !errs.Has(err, errs.OperationBodyMismatch) {
		t.Fatalf("another body: %v", err)
	}
	// A reader that goes before the end changes nothing either.
	gone, cancel := context.WithCancel(ctx(t))
	second, err := c.StartFollowed(gone, stdin(subject("p", "cat")))
	must(t, err)
	cancel()
	if _, _, err := second.Next(gone); !errs.Has(err, errs.CallCancelled) {
		t.Fatalf("a call that was cancelled: %v", err)
	}
	if _, err := second.Wait(gone); !errs.Has(err, errs.CallCancelled) {
		t.Fatalf("a wait that was cancelled: %v", err)
	}
	second.Close()
	_, err = c.WriteStdin(ctx(t), "p", []byte("still here\n"))
	must(t, err)
	must(t, c.CloseStdin(ctx(t), "p"))
	if out, _, e := drain(t, first); out != "still here\n" || e.Code != 0 {
		t.Fatalf("it wrote %q: %+v", out, e)
	}
}

func stdin(r StartRequest) StartRequest {
	r.Stdin = true
	return r
}
