package integration

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// The exit code of a process that ends at once is right, 100 times of 100, whichever way it is asked for.
func TestB17ExitCodes(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	codes := make([]int32, 100)
	for i := range codes {
		codes[i] = int32((i * 7) % 256)
	}
	exits := func(code int32) *dormousev1.ProcessSpec {
		return &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", fmt.Sprintf("echo %d; exit %d", code, code)}}
	}
	t.Run("run", func(t *testing.T) {
		w := w.sub(t)
		w.ok(each(codes, func(code int32) error {
			var out bytes.Buffer
			_, exit, err := s.Run(w.ctx, exits(code), nil, &client.Output{Stdout: &out}, nil)
			if err != nil {
				return err
			}
			if exit.GetCode() != code || out.String() != fmt.Sprintln(code) {
				return fmt.Errorf("exit %d with output %q; want %d", exit.GetCode(), out.String(), code)
			}
			return nil
		}))
	})
	t.Run("start and wait", func(t *testing.T) {
		w := w.sub(t)
		w.ok(each(codes, func(code int32) error {
			p, err := s.Start(w.ctx, exits(code), "")
			if err != nil {
				return err
			}
			exit, err := p.Wait(w.ctx)
			if err != nil {
				return err
			}
			if exit.GetCode() != code || exit.GetSignal() != 0 {
				return fmt.Errorf("exit %v; want %d", exit, code)
			}
			return nil
		}))
	})
	t.Run("signal", func(t *testing.T) {
		w := w.sub(t)
		_, exit, err := s.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "kill -9 $$"}}, nil, &client.Output{}, nil)
		w.ok(err)
		if exit.GetCode() != 137 || exit.GetSignal() != 9 {
			t.Errorf("exit %v, want 137 by signal 9", exit)
		}
	})
	t.Run("main command", func(t *testing.T) {
		w := w.sub(t)
		w.ok(each([]int32{0, 1, 7, 255}, func(code int32) error {
			s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec("sh", "-c", fmt.Sprintf("exit %d", code))})
			if err != nil {
				return err
			}
			if err := s.Await(w.ctx, func(s *dormousev1.Sandbox) bool {
				return s.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED
			}); err != nil {
				return err
			}
			if st := s.Last.GetStatus(); st.ExitCode == nil || st.GetExitCode() != code {
				return fmt.Errorf("status %v; want exit code %d", st, code)
			}
			return nil
		}))
	})
}

// A sandbox whose start was acknowledged outlives an agentd that is killed at once.
func TestB18KilledAfterStart(t *testing.T) {
	w := enter(t)
	spec := w.spec("sh", "-c", "echo begun >> /tmp/begun; exec sleep 100000")
	spec.NodeSelector = map[string]string{"zone": "z1"}
	for range 3 {
		s := w.create(spec)
		w.restartAgentd(1)
		w.ok(s.Refresh(w.ctx))
		if ph := s.Last.GetStatus().GetPhase(); ph != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
			t.Errorf("the sandbox is %s", ph)
		}
		w.until("the command has begun, once", s, "cat /tmp/begun", "begun")
		w.ok(s.Delete(w.ctx, ""))
	}
}

// The same for a process: it goes on, and its output is read on from where the reader was.
func TestB18ProcessOutlivesAgentd(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.NodeSelector = map[string]string{"zone": "z1"}
	s := w.create(spec)
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; usleep 20000; done"}}, "")
	w.ok(err)
	w.restartAgentd(1)
	w.ok(p.Refresh(w.ctx))
	pid := p.Last.GetPid()

	// A reader that is there when agentd is killed sees every line once, in order.
	lines := &counter{want: 1, seen: make(chan int, 4096)}
	reading, stop := context.WithCancel(w.ctx)
	read := make(chan error, 1)
	go func() {
		_, err := p.Follow(reading, &client.Output{Stdout: lines}, true)
		read <- err
	}()
	first := <-lines.seen
	w.restartAgentd(1)
	for n := first; n < first+100; { // well past what was written before agentd was there again
		select {
		case n = <-lines.seen:
		case err := <-read:
			t.Fatalf("the reader ended at line %d: %v", n, err)
		case <-w.ctx.Done():
			t.Fatal("no more output")
		}
	}
	stop()
	if err := <-read; err == nil {
		t.Error("the reader ended although the process runs")
	}
	if lines.wrong != "" {
		t.Error(lines.wrong)
	}
	w.ok(p.Refresh(w.ctx))
	if p.Last.GetExit() != nil || p.Last.GetPid() != pid {
		t.Errorf("the process was pid %d and is now %v", pid, p.Last)
	}
	w.ok(p.Signal(w.ctx, 9, true))
	exit, err := p.Wait(w.ctx)
	w.ok(err)
	if exit.GetSignal() != 9 {
		t.Errorf("exit %v", exit)
	}
}

// counter takes the numbers 1, 2, 3 ... in lines, and remembers the first that is out of order.
type counter struct {
	part  string
	want  int
	wrong string
	seen  chan int
}

func (c *counter) Write(b []byte) (int, error) {
	c.part += string(b)
	for {
		line, rest, ok := strings.Cut(c.part, "\n")
		if !ok {
			return len(b), nil
		}
		c.part = rest
		if n, err := strconv.Atoi(line); c.wrong == "" && (err != nil || n != c.want) {
			c.wrong = fmt.Sprintf("line %q came where %d was to come", line, c.want)
		}
		select {
		case c.seen <- c.want:
		default: // whoever counts has seen enough
		}
		c.want++
	}
}
