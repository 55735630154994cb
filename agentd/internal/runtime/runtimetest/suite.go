// Package runtimetest is the conformance suite of runtime.Driver. It runs on the fake and on every real
// driver, so that what is tested on the fake holds for the real thing.
package runtimetest

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Guest is what the program inside says of itself: the same Pid and Nonce is the same process.
type Guest struct {
	Pid     int
	Nonce   string
	Counter int
}

// Harness is a driver's side of the suite. Everything it makes is removed by the test's clean-up.
type Harness struct {
	// Open gives another driver on the same machine state, as a restarted agent would. The suite closes it.
	Open func(t *testing.T) runtime.Driver
	// Config prepares a new sandbox; RestoreConfig one that is restored from a save of the other.
	Config        func(t *testing.T, id string) runtime.Config
	RestoreConfig func(t *testing.T, id string, from runtime.Config) runtime.Config
	// Count makes the program inside add one to its counter and tell. It fails the test when no answer comes.
	Count func(t *testing.T, cfg runtime.Config) Guest
	// Exit makes the program end with the code.
	Exit func(t *testing.T, cfg runtime.Config, code int)
	// Copy is a program that copies its standard input to its output and exits with the code at its end.
	Copy func(code int) runtime.Program
	// Leftovers names everything that is left of any sandbox: processes, mounts, groups, files.
	Leftovers func(t *testing.T) []string
}

// limit is how long any one call may take before the test fails rather than hang.
const limit = 60 * time.Second

type suite struct {
	Harness
	d runtime.Driver
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	tests := []struct {
		name string
		fn   func(*suite, *testing.T)
	}{
		{"StartWaitExitCode", (*suite).exitCode},
		{"WaitAttachedLate", (*suite).waitLate},
		{"KillEndsIt", (*suite).kill},
		{"KillWhilePaused", (*suite).killPaused},
		{"PauseResumeIdempotent", (*suite).pauseResume},
		{"SaveLeavesSourceRunning", (*suite).saveRestore},
		{"SaveRefusals", (*suite).saveRefusals},
		{"DeleteIdempotent", (*suite).delete},
		{"DeleteEndsWait", (*suite).deleteEndsWait},
		{"IDNeverTwice", (*suite).idTwice},
		{"UnknownID", (*suite).unknown},
		{"RecoverByHandle", (*suite).recover},
		{"RecoverAfterEnd", (*suite).recoverEnded},
		{"CloseEndsNoSandbox", (*suite).close},
		{"DamagedImage", (*suite).damagedImage},
		{"CancelledStartLeavesNothing", (*suite).cancelledStart},
		{"ListAndStats", (*suite).listStats},
		{"ExecCopies", (*suite).execCopies},
		{"ExecIsKilled", (*suite).execKilled},
		{"ExecRefusals", (*suite).execRefusals},
		{"ExecGoesOnAcrossSave", (*suite).execAcrossSave},
		{"ExecEndsWithTheSandbox", (*suite).execEnds},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			s := &suite{Harness: h, d: h.Open(t)}
			t.Cleanup(func() {
				if err := s.d.Close(); err != nil {
					t.Error(err)
				}
				if left := h.Leftovers(t); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			})
			c.fn(s, t)
		})
	}
}

// NewID makes an id as the coordinator does.
func NewID(t testing.TB) string {
	t.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	return id.String()
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// start starts a sandbox and deletes it at the end, by whatever driver then is the suite's.
func (s *suite) start(t *testing.T) (runtime.Config, runtime.Handle) {
	t.Helper()
	cfg := s.Config(t, NewID(t))
	s.deleteAtEnd(t, cfg.ID)
	h, err := s.d.Start(bounded(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return cfg, h
}

func (s *suite) deleteAtEnd(t *testing.T, id string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
		defer cancel()
		if err := s.d.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	})
}

func (s *suite) wait(t *testing.T, id string) runtime.Exit {
	t.Helper()
	exit, err := s.d.Wait(bounded(t), id)
	if err != nil {
		t.Fatal(err)
	}
	return exit
}

func (s *suite) phase(t *testing.T, id string, want runtime.Phase) {
	t.Helper()
	st, err := s.d.State(bounded(t), id)
	if err != nil {
		t.Fatal(err)
	}
	if st.Phase != want {
		t.Fatalf("phase %q, want %q", st.Phase, want)
	}
	if (st.Pid == 0) != (want == runtime.Stopped) {
		t.Fatalf("phase %q with pid %d", st.Phase, st.Pid)
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if !errs.Has(err, want) {
		t.Fatalf("got %v, want %s", err, want)
	}
}

func (s *suite) exitCode(t *testing.T) {
	cfg, _ := s.start(t)
	s.phase(t, cfg.ID, runtime.Running)
	s.Count(t, cfg)
	s.Exit(t, cfg, 42)
	if exit := s.wait(t, cfg.ID); !exit.Known || exit.Code != 42 || exit.Signal != 0 || exit.OOM {
		t.Fatalf("exit %+v, want code 42", exit)
	}
	s.phase(t, cfg.ID, runtime.Stopped)
	wantReason(t, s.d.Pause(bounded(t), cfg.ID), errs.WrongPhase)
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
}

func (s *suite) waitLate(t *testing.T) {
	cfg, _ := s.start(t)
	s.Exit(t, cfg, 7)
	s.wait(t, cfg.ID)
	for range 3 {
		if exit := s.wait(t, cfg.ID); !exit.Known || exit.Code != 7 {
			t.Fatalf("exit %+v, want code 7", exit)
		}
	}
}

func (s *suite) kill(t *testing.T) {
	cfg, _ := s.start(t)
	s.Count(t, cfg)
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
	if exit := s.wait(t, cfg.ID); !exit.Known || exit.Signal != syscall.SIGKILL || exit.Code != 137 {
		t.Fatalf("exit %+v, want SIGKILL", exit)
	}
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGTERM))
}

func (s *suite) killPaused(t *testing.T) {
	cfg, _ := s.start(t)
	ok(t, s.d.Pause(bounded(t), cfg.ID))
	ok(t, s.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
	if exit := s.wait(t, cfg.ID); !exit.Known || exit.Signal != syscall.SIGKILL {
		t.Fatalf("exit %+v, want SIGKILL", exit)
	}
}

func (s *suite) pauseResume(t *testing.T) {
	cfg, _ := s.start(t)
	before := s.Count(t, cfg)
	for range 2 {
		ok(t, s.d.Pause(bounded(t), cfg.ID))
		s.phase(t, cfg.ID, runtime.Paused)
	}
	for range 2 {
		ok(t, s.d.Resume(bounded(t), cfg.ID))
		s.phase(t, cfg.ID, runtime.Running)
	}
	s.same(t, before, s.Count(t, cfg), 1)
}

// same fails unless the later answer is of the same process, so many counts on.
func (s *suite) same(t *testing.T, before, after Guest, counts int) {
	t.Helper()
	want := Guest{Pid: before.Pid, Nonce: before.Nonce, Counter: before.Counter + counts}
	if after != want {
		t.Fatalf("the guest is %+v, want %+v", after, want)
	}
}

// save pauses, saves and resumes.
func (s *suite) save(t *testing.T, id string) string {
	t.Helper()
	dir := t.TempDir()
	ok(t, s.d.Pause(bounded(t), id))
	ok(t, s.d.Save(bounded(t), id, runtime.SaveOptions{Dir: dir}))
	s.phase(t, id, runtime.Paused)
	ok(t, s.d.Resume(bounded(t), id))
	return dir
}

func (s *suite) saveRestore(t *testing.T) {
	cfg, _ := s.start(t)
	s.Count(t, cfg)
	before := s.Count(t, cfg)
	dir := s.save(t, cfg.ID)
	s.same(t, before, s.Count(t, cfg), 1)
	s.same(t, before, s.Count(t, cfg), 2)
	fork := s.RestoreConfig(t, NewID(t), cfg)
	s.deleteAtEnd(t, fork.ID)
	_, err := s.d.Restore(bounded(t), fork, runtime.Image{Dir: dir})
	ok(t, err)
	s.phase(t, fork.ID, runtime.Running)
	s.same(t, before, s.Count(t, fork), 1)
	s.same(t, before, s.Count(t, cfg), 3)
	ok(t, s.d.Delete(bounded(t), cfg.ID))
	s.same(t, before, s.Count(t, fork), 2)
	// A restored sandbox can be saved again.
	dir = s.save(t, fork.ID)
	again := s.RestoreConfig(t, NewID(t), cfg)
	s.deleteAtEnd(t, again.ID)
	_, err = s.d.Restore(bounded(t), again, runtime.Image{Dir: dir})
	ok(t, err)
	s.same(t, before, s.Count(t, again), 3)
	s.Exit(t, again, 3)
	if exit := s.wait(t, again.ID); exit.Code != 3 {
		t.Fatalf("exit %+v, want code 3", exit)
	}
}

func (s *suite) saveRefusals(t *testing.T) {
	cfg, _ := s.start(t)
	before := s.Count(t, cfg)
	wantReason(t, s.d.Save(bounded(t), cfg.ID, runtime.SaveOptions{Dir: t.TempDir()}), errs.WrongPhase)
	ok(t, s.d.Pause(bounded(t), cfg.ID))
	full := t.TempDir()
	ok(t, os.WriteFile(full+"/x", nil, 0o600))
	wantReason(t, s.d.Save(bounded(t), cfg.ID, runtime.SaveOptions{Dir: full}), errs.InvalidField)
	s.phase(t, cfg.ID, runtime.Paused)
	ok(t, s.d.Resume(bounded(t), cfg.ID))
	s.same(t, before, s.Count(t, cfg), 1)
}

func (s *suite) delete(t *testing.T) {
	cfg, _ := s.start(t)
	for range 3 {
		ok(t, s.d.Delete(bounded(t), cfg.ID))
	}
	_, err := s.d.State(bounded(t), cfg.ID)
	wantReason(t, err, errs.ObjectNotFound)
	if left := s.Leftovers(t); len(left) > 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func (s *suite) deleteEndsWait(t *testing.T) {
	cfg, _ := s.start(t)
	ctx := bounded(t)
	type result struct {
		exit runtime.Exit
		err  error
	}
	got := make(chan result, 1)
	waiting := make(chan struct{})
	go func() {
		close(waiting)
		exit, err := s.d.Wait(ctx, cfg.ID)
		got <- result{exit, err}
	}()
	<-waiting
	ok(t, s.d.Delete(ctx, cfg.ID))
	r := <-got
	// The wait may have begun only after the deletion.
	if r.err != nil {
		wantReason(t, r.err, errs.ObjectNotFound)
	} else if !r.exit.Known || r.exit.Signal != syscall.SIGKILL {
		t.Fatalf("exit %+v, want SIGKILL", r.exit)
	}
}

func (s *suite) idTwice(t *testing.T) {
	cfg, _ := s.start(t)
	before := s.Count(t, cfg)
	_, err := s.d.Start(bounded(t), cfg)
	if errs.From(err).Code != errs.Conflict {
		t.Fatalf("got %v, want a CONFLICT", err)
	}
	s.same(t, before, s.Count(t, cfg), 1)
}

func (s *suite) unknown(t *testing.T) {
	ctx, id := bounded(t), NewID(t)
	_, err := s.d.State(ctx, id)
	wantReason(t, err, errs.ObjectNotFound)
	_, err = s.d.Stats(ctx, id)
	wantReason(t, err, errs.ObjectNotFound)
	_, err = s.d.Wait(ctx, id)
	wantReason(t, err, errs.ObjectNotFound)
	wantReason(t, s.d.Pause(ctx, id), errs.ObjectNotFound)
	wantReason(t, s.d.Resume(ctx, id), errs.ObjectNotFound)
	wantReason(t, s.d.Save(ctx, id, runtime.SaveOptions{Dir: t.TempDir()}), errs.ObjectNotFound)
	ok(t, s.d.Kill(ctx, id, syscall.SIGKILL))
	ok(t, s.d.Delete(ctx, id))
	for _, bad := range []string{"", "short", "../../../../../../../../../../../etc"} {
		wantReason(t, s.d.Delete(ctx, bad), errs.InvalidField)
	}
	_, err = s.d.Recover(ctx, runtime.Handle(`{"driver":"another","version":9}`))
	wantReason(t, err, errs.IncompatibleRuntime)
}

// reopen closes the suite's driver and opens another.
func (s *suite) reopen(t *testing.T) {
	t.Helper()
	ok(t, s.d.Close())
	s.d = s.Open(t)
}

func (s *suite) recover(t *testing.T) {
	cfg, h := s.start(t)
	before := s.Count(t, cfg)
	s.reopen(t)
	_, err := s.d.Wait(bounded(t), cfg.ID)
	wantReason(t, err, errs.ObjectNotFound)
	for range 2 {
		st, err := s.d.Recover(bounded(t), h)
		ok(t, err)
		if st.ID != cfg.ID || st.Phase != runtime.Running {
			t.Fatalf("recovered %+v", st)
		}
	}
	s.same(t, before, s.Count(t, cfg), 1)
	s.save(t, cfg.ID)
	s.same(t, before, s.Count(t, cfg), 2)
	s.Exit(t, cfg, 5)
	if exit := s.wait(t, cfg.ID); !exit.Known || exit.Code != 5 {
		t.Fatalf("exit %+v, want code 5", exit)
	}
}

func (s *suite) recoverEnded(t *testing.T) {
	cfg, h := s.start(t)
	s.Exit(t, cfg, 9)
	s.wait(t, cfg.ID)
	s.reopen(t)
	st, err := s.d.Recover(bounded(t), h)
	ok(t, err)
	if st.Phase != runtime.Stopped {
		t.Fatalf("recovered %+v, want stopped", st)
	}
	if exit := s.wait(t, cfg.ID); !exit.Known || exit.Code != 9 {
		t.Fatalf("exit %+v, want the code 9 that the first driver saw", exit)
	}
	ok(t, s.d.Delete(bounded(t), cfg.ID))
	_, err = s.d.Recover(bounded(t), h)
	wantReason(t, err, errs.ObjectNotFound)
}

func (s *suite) close(t *testing.T) {
	cfg, h := s.start(t)
	before := s.Count(t, cfg)
	got := make(chan error, 1)
	ctx := bounded(t)
	go func(d runtime.Driver) {
		_, err := d.Wait(ctx, cfg.ID)
		got <- err
	}(s.d)
	s.reopen(t)
	wantReason(t, <-got, errs.ShuttingDown)
	s.same(t, before, s.Count(t, cfg), 1)
	_, err := s.d.Recover(ctx, h)
	ok(t, err)
}

func (s *suite) damagedImage(t *testing.T) {
	cfg, _ := s.start(t)
	dir := s.save(t, cfg.ID)
	entries, err := os.ReadDir(dir)
	ok(t, err)
	ok(t, os.Remove(dir+"/"+entries[0].Name()))
	fork := s.RestoreConfig(t, NewID(t), cfg)
	_, err = s.d.Restore(bounded(t), fork, runtime.Image{Dir: dir})
	wantReason(t, err, errs.ArtefactDamaged)
	_, err = s.d.State(bounded(t), fork.ID)
	wantReason(t, err, errs.ObjectNotFound)
}

func (s *suite) cancelledStart(t *testing.T) {
	cfg := s.Config(t, NewID(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.d.Start(ctx, cfg); err == nil {
		t.Fatal("a cancelled start succeeded")
	}
	_, err := s.d.State(bounded(t), cfg.ID)
	wantReason(t, err, errs.ObjectNotFound)
}

func (s *suite) listStats(t *testing.T) {
	a, _ := s.start(t)
	b, _ := s.start(t)
	s.Count(t, a)
	list, err := s.d.List(bounded(t))
	ok(t, err)
	if len(list) != 2 || list[0].ID != min(a.ID, b.ID) || list[1].ID != max(a.ID, b.ID) {
		t.Fatalf("list %+v, want %s and %s", list, a.ID, b.ID)
	}
	for _, st := range list {
		if st.Phase != runtime.Running || st.Pid == 0 || st.StartedAt.IsZero() || st.BundleDigest != a.Bundle.Digest {
			t.Fatalf("status %+v", st)
		}
	}
	stats, err := s.d.Stats(bounded(t), a.ID)
	ok(t, err)
	if stats.MemoryBytes == 0 || stats.CPU == 0 || stats.Pids == 0 || stats.OOMKills != 0 {
		t.Fatalf("stats %+v", stats)
	}
}
