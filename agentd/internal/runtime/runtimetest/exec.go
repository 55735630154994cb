package runtimetest

import (
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Pipes are three pipes for a program, and the test's ends of them.
type Pipes struct {
	In, Out, Err *os.File
	theirs       [3]int
}

// NewPipes makes pipes that are closed when the test ends.
func NewPipes(t *testing.T) *Pipes {
	t.Helper()
	p := &Pipes{}
	for i, own := range []**os.File{&p.In, &p.Out, &p.Err} {
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		mine := fds[0]
		p.theirs[i] = fds[1]
		if i == 0 {
			mine, p.theirs[i] = fds[1], fds[0]
		}
		ok(t, unix.SetNonblock(mine, true))
		f := os.NewFile(uintptr(mine), "pipe")
		*own = f
		t.Cleanup(func() { _ = f.Close() })
	}
	return p
}

// Theirs are the program's ends.
func (p *Pipes) Theirs() [3]int { return p.theirs }

// Given closes the program's ends here.
func (p *Pipes) Given() {
	for _, fd := range p.theirs {
		_ = unix.Close(fd)
	}
}

// startCopy starts a program that copies.
func (s *suite) startCopy(t *testing.T, id string, code int) (runtime.Process, *Pipes) {
	t.Helper()
	pipes := NewPipes(t)
	prog := s.Copy(code)
	prog.Stdio = pipes.Theirs()
	p, err := s.d.Exec(bounded(t), id, prog)
	pipes.Given()
	ok(t, err)
	return p, pipes
}

// echo sends a word through the program.
func echo(t *testing.T, pipes *Pipes, word string) {
	t.Helper()
	_, err := pipes.In.WriteString(word)
	ok(t, err)
	ok(t, pipes.Out.SetReadDeadline(time.Now().Add(limit)))
	got := make([]byte, len(word))
	if _, err := io.ReadFull(pipes.Out, got); err != nil || string(got) != word {
		t.Fatalf("%q came back as %q: %v", word, got, err)
	}
}

func wantCode(t *testing.T, p runtime.Process, want int) {
	t.Helper()
	for range 2 {
		if code, err := p.Wait(bounded(t)); err != nil || code != want {
			t.Fatalf("exit code %d, %v; want %d", code, err, want)
		}
	}
}

func (s *suite) execCopies(t *testing.T) {
	cfg, _ := s.start(t)
	p, pipes := s.startCopy(t, cfg.ID, 5)
	other, otherPipes := s.startCopy(t, cfg.ID, 6)
	echo(t, pipes, "one")
	echo(t, otherPipes, "other")
	echo(t, pipes, "two")
	if p.Pid() <= 1 || p.Pid() == other.Pid() {
		t.Fatalf("pids %d and %d", p.Pid(), other.Pid())
	}
	ok(t, pipes.In.Close())
	if rest, err := io.ReadAll(pipes.Out); err != nil || len(rest) > 0 {
		t.Fatalf("after the end: %q, %v", rest, err)
	}
	wantCode(t, p, 5)
	ok(t, p.Kill(bounded(t), syscall.SIGKILL))
	echo(t, otherPipes, "still")
	ok(t, otherPipes.In.Close())
	wantCode(t, other, 6)
}

func (s *suite) execKilled(t *testing.T) {
	cfg, _ := s.start(t)
	p, pipes := s.startCopy(t, cfg.ID, 5)
	echo(t, pipes, "one")
	ok(t, p.Kill(bounded(t), syscall.SIGKILL))
	wantCode(t, p, 137)
	s.Count(t, cfg)
}

func (s *suite) execRefusals(t *testing.T) {
	cfg, _ := s.start(t)
	pipes := NewPipes(t)
	defer pipes.Given()
	exec := func(id string, prog runtime.Program) error {
		prog.Stdio = pipes.Theirs()
		_, err := s.d.Exec(bounded(t), id, prog)
		return err
	}
	wantReason(t, exec(NewID(t), s.Copy(0)), errs.ObjectNotFound)
	wantReason(t, exec(cfg.ID, runtime.Program{Args: []string{"/bin/absent"}}), errs.CommandNotFound)
	wantReason(t, exec(cfg.ID, runtime.Program{}), errs.InvalidField)
	ok(t, s.d.Pause(bounded(t), cfg.ID))
	wantReason(t, exec(cfg.ID, s.Copy(0)), errs.WrongPhase)
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
	s.wait(t, cfg.ID)
	wantReason(t, exec(cfg.ID, s.Copy(0)), errs.WrongPhase)
}

// execAcrossSave: the program is the same after a save, and no part of what is restored from it.
func (s *suite) execAcrossSave(t *testing.T) {
	cfg, _ := s.start(t)
	before := s.Count(t, cfg)
	p, pipes := s.startCopy(t, cfg.ID, 5)
	echo(t, pipes, "one")
	dir := s.save(t, cfg.ID)
	echo(t, pipes, "two")
	fork := s.RestoreConfig(t, NewID(t), cfg)
	s.deleteAtEnd(t, fork.ID)
	_, err := s.d.Restore(bounded(t), fork, runtime.Image{Dir: dir})
	ok(t, err)
	s.same(t, before, s.Count(t, fork), 1)
	q, forkPipes := s.startCopy(t, fork.ID, 6)
	echo(t, forkPipes, "fork")
	echo(t, pipes, "three")
	dir = s.save(t, fork.ID)
	again := s.RestoreConfig(t, NewID(t), cfg)
	s.deleteAtEnd(t, again.ID)
	_, err = s.d.Restore(bounded(t), again, runtime.Image{Dir: dir})
	ok(t, err)
	s.same(t, before, s.Count(t, again), 2)
	ok(t, pipes.In.Close())
	wantCode(t, p, 5)
	ok(t, forkPipes.In.Close())
	wantCode(t, q, 6)
}

func (s *suite) execEnds(t *testing.T) {
	cfg, _ := s.start(t)
	p, pipes := s.startCopy(t, cfg.ID, 5)
	echo(t, pipes, "one")
	ok(t, s.d.Delete(bounded(t), cfg.ID))
	if _, err := p.Wait(bounded(t)); !errs.Has(err, errs.SandboxFailed) {
		t.Fatalf("got %v, want %s", err, errs.SandboxFailed)
	}
	if rest, err := io.ReadAll(pipes.Out); err != nil || len(rest) > 0 {
		t.Fatalf("after the end: %q, %v", rest, err)
	}
}
