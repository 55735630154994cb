package guest

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestRunOutputAndExit(t *testing.T) {
	c := newSandbox(t).open(t)
	out, errOut, e := run(t, c, subject("p1", "echo", "hello", "there"))
	if out != "hello there\n" || errOut != "err\n" || e.Code != 0 {
		t.Fatalf("got %q %q %+v", out, errOut, e)
	}
	if _, _, e := run(t, c, subject("p2", "exit", "42")); e.Code != 42 || e.Signal != 0 {
		t.Fatalf("exit: %+v", e)
	}
	// The same id and body is the same process; with another body a conflict.
	p, err := c.Start(ctx(t), subject("p2", "exit", "42"))
	if err != nil || p.Exit == nil || p.Exit.Code != 42 {
		t.Fatalf("start again: %+v %v", p, err)
	}
	if _, err := c.Start(ctx(t), subject("p2", "exit", "43")); !errs.Has(err, errs.OperationBodyMismatch) {
		t.Fatalf("other body: %v", err)
	}
	if err := c.Ping(ctx(t)); err != nil {
		t.Fatal(err)
	}
}

// TestSignalsOfAProcess: none of what init does with signals is handed on.
func TestSignalsOfAProcess(t *testing.T) {
	c := newSandbox(t).open(t)
	out, _, e := run(t, c, subject("status", "read", "/proc/self/status"))
	// Without the two that belong to C libraries: what was started by posix_spawn, as make does, has them ignored, and so has all
	// that descends from it, sandboxes too.
	const libraries = 1<<(32-1) | 1<<(33-1)
	for _, set := range []string{"SigBlk", "SigIgn"} {
		_, rest, found := strings.Cut(out, set+":\t")
		line, _, _ := strings.Cut(rest, "\n")
		mask, err := strconv.ParseUint(line, 16, 64)
		if e.Code != 0 || !found || err != nil || mask&^libraries != 0 {
			t.Errorf("exit %+v, %s is not empty in %s", e, set, out)
		}
	}
}

// TestB17ExitCodeOfAProcessThatEndsAtOnce is exact 100 times of 100.
func TestB17ExitCodeOfAProcessThatEndsAtOnce(t *testing.T) {
	c := newSandbox(t).open(t)
	b17(t, c)
}

func b17(t *testing.T, c *Conn) {
	t.Helper()
	for i := range 100 {
		id := fmt.Sprintf("at-once-%d", i)
		if _, err := c.Start(ctx(t), subject(id, "exit", fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
		if e, err := c.Wait(ctx(t), id); err != nil || e.Code != i || e.Signal != 0 {
			t.Fatalf("process %d: %+v %v", i, e, err)
		}
	}
}

func TestStartRefusals(t *testing.T) {
	c := newSandbox(t).open(t)
	for name, tc := range map[string]struct {
		r    StartRequest
		want errs.Reason
		key  string
	}{
		"not in PATH":       {StartRequest{ID: "x", Args: []string{"absent"}}, errs.CommandNotFound, "command"},
		"no such file":      {StartRequest{ID: "x", Args: []string{"/bin/absent"}}, errs.CommandNotFound, "command"},
		"empty":             {StartRequest{ID: "x", Args: []string{""}}, errs.CommandNotFound, "command"},
		"not executable":    {StartRequest{ID: "x", Args: []string{"plain"}}, errs.CommandNotRunnable, "command"},
		"a folder":          {StartRequest{ID: "x", Args: []string{"/etc"}}, errs.CommandNotRunnable, "command"},
		"lost interpreter":  {StartRequest{ID: "x", Args: []string{"script"}}, errs.CommandNotRunnable, "command"},
		"not a program":     {StartRequest{ID: "x", Args: []string{"garbage"}}, errs.CommandNotRunnable, "command"},
		"unknown user":      {StartRequest{ID: "x", Args: []string{"subject"}, User: "nobody-here"}, errs.UserNotFound, "user"},
		"unknown group":     {StartRequest{ID: "x", Args: []string{"subject"}, User: "worker:none"}, errs.UserNotFound, "user"},
		"no directory":      {StartRequest{ID: "x", Args: []string{"subject"}, Dir: "/absent"}, errs.InvalidField, "field"},
		"relative":          {StartRequest{ID: "x", Args: []string{"subject"}, Dir: "tmp"}, errs.InvalidField, "field"},
		"no command":        {StartRequest{ID: "x"}, errs.InvalidField, "field"},
		"no id":             {StartRequest{Args: []string{"subject"}}, errs.InvalidField, "field"},
		"zero byte":         {StartRequest{ID: "x", Args: []string{"subject", "a\x00b"}}, errs.InvalidField, "field"},
		"one long argument": {StartRequest{ID: "x", Args: []string{"subject", strings.Repeat("x", 200<<10)}}, errs.LimitExceeded, "field"},
		"over the channel":  {StartRequest{ID: "x", Args: []string{"subject", strings.Repeat("x", 300<<10)}}, errs.LimitExceeded, "field"},
	} {
		_, err := c.Start(ctx(t), tc.r)
		if !errs.Has(err, tc.want) || errs.From(err).Details[tc.key] == "" && name != "empty" {
			t.Errorf("%s: got %v, want %s with detail %s", name, err, tc.want, tc.key)
		}
	}
	if list, err := c.List(ctx(t)); err != nil || len(list) != 0 {
		t.Fatalf("refused starts left %v, %v", list, err)
	}
	if _, err := c.Wait(ctx(t), "x"); !errs.Has(err, errs.ProcessNotFound) {
		t.Fatalf("wait: %v", err)
	}
}

func TestUserDirectoryEnvironment(t *testing.T) {
	c := newSandbox(t).open(t)
	for user, want := range map[string]string{
		"": "0 0 [] /tmp true", "worker": "1000 1001 [2000] /tmp true", "1000": "1000 1001 [2000] /tmp true",
		"4242": "4242 0 [] /tmp true", "4242:77": "4242 77 [] /tmp true", "worker:extra": "1000 2000 [] /tmp true",
	} {
		r := subject("who-"+user, "whoami")
		r.User, r.Dir = user, "/tmp"
		out, _, _ := run(t, c, r)
		if !strings.HasPrefix(out, want+" ") {
			t.Errorf("user %q: got %q, want %q", user, out, want)
		}
		var bounding uint64
		fields := strings.Fields(out)
		if _, err := fmt.Sscanf(fields[len(fields)-1], "%x", &bounding); err != nil || bounding&(1<<21) != 0 || bounding == 0 {
			t.Errorf("user %q: a child's bounding set is %x: CAP_SYS_ADMIN must be out of reach", user, bounding)
		}
	}
	r := subject("env", "env")
	r.User, r.Env = "worker", []string{"A=1", "B=two words"}
	if out, _, _ := run(t, c, r); out != "DORMOUSE_PROCESS_ID=env\nA=1\nB=two words\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nHOME=/home/worker\n" {
		t.Errorf("environment: %q", out)
	}
}

func TestSignalAndTimeout(t *testing.T) {
	c := newSandbox(t).open(t)
	if _, err := c.Start(ctx(t), subject("s", "signal")); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, c, "s", "ready\n")
	if n, err := c.Signal(ctx(t), "s", syscall.SIGUSR1, false); err != nil || n != 1 {
		t.Fatalf("signal: %d %v", n, err)
	}
	if e, err := c.Wait(ctx(t), "s"); err != nil || e.Code != 0 {
		t.Fatalf("wait: %+v %v", e, err)
	}
	awaitOutput(t, c, "s", "ready\ngot user defined signal 1\n")
	if n, err := c.Signal(ctx(t), "s", syscall.SIGKILL, false); err != nil || n != 0 {
		t.Fatalf("signal to an ended process: %d %v", n, err)
	}

	// The whole tree goes, also a child with a session of its own.
	if _, err := c.Start(ctx(t), subject("t", "tree")); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, c, "t", "ready\n")
	if n, err := c.Signal(ctx(t), "t", syscall.SIGKILL, true); err != nil || n != 3 {
		t.Fatalf("tree: %d %v", n, err)
	}
	if e, err := c.Wait(ctx(t), "t"); err != nil || e.Signal != syscall.SIGKILL || e.Code != 137 {
		t.Fatalf("wait: %+v %v", e, err)
	}
	awaitEOF(t, c, "t")

	r := subject("late", "tree")
	r.Timeout = 200 * time.Millisecond
	if _, err := c.Start(ctx(t), r); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Wait(ctx(t), "late"); err != nil || !e.TimedOut || e.Signal != syscall.SIGKILL {
		t.Fatalf("timeout: %+v %v", e, err)
	}
	awaitEOF(t, c, "late")
	// A kill of init from inside does nothing.
	if out, _, _ := run(t, c, subject("k", "killinit")); out != "<nil>\n" && out != "errno 0\n" {
		t.Logf("kill 1: %q", out)
	}
	if err := c.Ping(ctx(t)); err != nil {
		t.Fatal(err)
	}
}

// awaitOutput reads stdout until it is what is wanted.
func awaitOutput(t *testing.T, c *Conn, id, want string) {
	t.Helper()
	s, err := c.Output(ctx(t), OutputRequest{Process: id, Output: Stdout, Follow: UntilEOF})
	must(t, err)
	defer s.Close()
	var got string
	for got != want {
		chunk, err := s.Next(ctx(t))
		if err != nil {
			t.Fatalf("output %q, then %v; want %q", got, err, want)
		}
		got += string(chunk.Data)
	}
}

// awaitEOF follows stdout until every holder of the pipe is gone.
func awaitEOF(t *testing.T, c *Conn, id string) {
	t.Helper()
	s, err := c.Output(ctx(t), OutputRequest{Process: id, Output: Stdout, From: FromEnd, Follow: UntilEOF})
	must(t, err)
	defer s.Close()
	for {
		if _, err := s.Next(ctx(t)); err != nil {
			if _, eof := s.End(); !eof {
				t.Fatalf("no end of file: %v", err)
			}
			return
		}
	}
}
