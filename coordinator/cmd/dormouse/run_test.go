package main

import (
	"bytes"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestRunAndExecPassTheCodeOn(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	for _, c := range []struct {
		args     []string
		code     int
		out, err string
	}{
		{[]string{"exec", "box", "--", "echo", "-n", "hi"}, 0, "-n hi\n", ""},
		{[]string{"exec", "box", "echo", "hi"}, 0, "hi\n", ""},
		{[]string{"exec", "-e", "A=1", "-u", "root", "-w", "/", "box", "--", "exit", "42"}, 42, "", "bye\n"},
		{[]string{"exec", "--timeout", "1s", "box", "--", "sleep", "9"}, 124, "", "dormouse: the command was ended after --timeout 1s\n"},
		{[]string{"exec", "box", "--", "lost"}, 3, "first half, second half\n", ""},
		{[]string{"logs", "box"}, 0, "first half, second half\n", ""},
		{[]string{"logs", "-f", "box", uidAt(100)}, 0, "first half, second half\n", ""},
	} {
		r := dormouse(t, c.args...)
		if r.code != c.code || r.out != c.out || r.err != c.err {
			t.Errorf("%v: %+v", c.args, r)
		}
	}
	if got := asked[*dormousev1.RunProcessRequest](t, f); got.GetSpec().GetStdin() || got.GetSandboxUid() != uidAt(1) {
		t.Errorf("asked %v", got)
	}
	r := dormouseIn(t, "some input", "exec", "-i", "box", "--", "cat")
	if r.code != 5 || r.out != "ready\nSOME INPUT" {
		t.Errorf("input: %+v", r)
	}
	f.fail["RunProcess"] = errs.New(errs.CommandNotFound, "there is no nope in the image")
	if r := dormouse(t, "exec", "box", "--", "nope"); r.code != 127 || !strings.Contains(r.err, "there is no nope") {
		t.Errorf("not found: %+v", r)
	}
	f.fail["RunProcess"] = errs.New(errs.CommandNotRunnable, "not executable")
	if r := dormouse(t, "exec", "box", "--", "/etc/passwd"); r.code != 126 {
		t.Errorf("not runnable: %+v", r)
	}
	delete(f.fail, "RunProcess")
	if r := dormouse(t, "exec", "-d", "box", "--", "sleep"); r.code != 0 || len(r.out) != 37 {
		t.Errorf("detached: %+v", r)
	}
	if r := dormouse(t, "kill", "-s", "KILL", "--tree", "box"); r.code != 0 {
		t.Errorf("kill: %+v", r)
	}
	if got := asked[*dormousev1.SignalProcessRequest](t, f); got.GetSignal() != 9 || !got.GetTree() || got.GetProcessId() != uidAt(100) {
		t.Errorf("kill asked %v", got)
	}
}

func TestRun(t *testing.T) {
	f := serve(t)
	r := dormouse(t, "run", "--rm", "reg.example/a:1", "--", "exit", "5")
	if r.code != 5 || r.out != "" || r.err != "bye\n" || len(f.sandboxes) != 0 {
		t.Errorf("--rm: %+v, %d left", r, len(f.sandboxes))
	}
	if got := asked[*dormousev1.CreateSandboxRequest](t, f); len(got.GetSpec().GetCommand()) != 0 || got.GetSpec().GetRunImageCommand() {
		t.Errorf("asked %v", got)
	}
	r = dormouse(t, "run", "reg.example/a:1", "--", "echo", "hi")
	if r.code != 0 || r.out != "hi\n" || r.err != "sandbox "+uidAt(2)+"\n" || len(f.sandboxes) != 1 {
		t.Errorf("kept: %+v", r)
	}
	r = dormouse(t, "run", "--rm", "reg.example/a:1")
	if r.code != 3 || r.out != "first half, second half\n" || !asked[*dormousev1.CreateSandboxRequest](t, f).GetSpec().GetRunImageCommand() {
		t.Errorf("the image's command: %+v", r)
	}
	f.fail["RunProcess"] = errs.New(errs.CommandNotFound, "no such")
	if r := dormouse(t, "run", "--rm", "reg.example/a:1", "--", "nope"); r.code != 127 || len(f.sandboxes) != 1 {
		t.Errorf("--rm after a failure: %+v, %d left", r, len(f.sandboxes))
	}
}

// The interrupt goes to the process inside, whose exit code is passed on.
func TestInterruptIsForwarded(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	if r := dormouse(t, "exec", "box", "--", "interrupted"); r.code != 130 {
		t.Errorf("got %+v", r)
	}
	if got := asked[*dormousev1.SignalProcessRequest](t, f); got.GetSignal() != 2 || !got.GetTree() {
		t.Errorf("asked %v", got)
	}
}

// brokenPipeWriter is a standard output whose reader went away.
type brokenPipeWriter struct{}

func (brokenPipeWriter) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.EPIPE}
}

func TestReaderThatWentAwayEndsTheProcess(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	var errOut bytes.Buffer
	app := newApp(streams{in: strings.NewReader(""), out: brokenPipeWriter{}, err: &errOut})
	if code := command.Run(t.Context(), app, []string{"dormouse", "exec", "box", "--", "echo", "y"}); code != 141 || errOut.Len() != 0 {
		t.Errorf("exit code %d, %s", code, errOut.String())
	}
	if got := asked[*dormousev1.SignalProcessRequest](t, f); got.GetSignal() != 13 || !got.GetTree() {
		t.Errorf("asked %v", got)
	}
}
