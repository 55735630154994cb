package runner

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func TestStartAndDelete(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	rec, err := a.Start(ctx(t), req)
	must(t, err)
	if rec.Phase != sandbox.Running || rec.Intent != nodestate.IntentKeep || len(rec.Handle) == 0 || rec.Hostname != "box-1" || !rec.HasMain {
		t.Fatalf("%s", text(rec))
	}
	in := a.w.guests[req.UID]
	if len(in.mains) != 1 || !slices.Equal(in.mains[0].Argv, []string{"/entry", "arg"}) || in.mains[0].User != "bob" || in.mains[0].Dir != "/w" ||
		!slices.Equal(in.mains[0].Env, []string{"A=1", "B=3", "C=4", "PATH=" + defaultPath}) {
		t.Fatalf("main %+v", in.mains)
	}
	if in.identity.SecretEnv["TOKEN"] != "hunter2-secret" || in.identity.Hostname != "box-1" {
		t.Fatalf("identity %+v", in.identity)
	}
	if info, err := os.Stat(a.Dir(req.UID)); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("folder %v %v", info, err)
	}
	if a.w.leases != 0 {
		t.Fatal("the namespace is still pinned")
	}
	// The same command again is the same sandbox; another is refused.
	again, err := a.Start(ctx(t), req)
	must(t, err)
	if again.Observation != rec.Observation || len(in.mains) != 1 {
		t.Fatalf("started twice: %s", text(again))
	}
	_, err = a.Start(ctx(t), startRequest(func(r *StartRequest) { r.UID, r.CommandID = req.UID, "start-2" }))
	wantReason(t, err, errs.WrongPhase)
	_, err = a.Start(ctx(t), startRequest(func(r *StartRequest) { r.Spec.Volumes = req.Spec.Volumes }))
	wantReason(t, err, errs.AlreadyAttached)

	must(t, a.Delete(ctx(t), req.UID))
	a.wantGone(req.UID)
	must(t, a.Delete(ctx(t), req.UID))
	must(t, a.Delete(ctx(t), uid.New()))
}

func TestSecretsAreNowhereOnDisk(t *testing.T) {
	a := newWorld(t).boot()
	_, err := a.Start(ctx(t), startRequest())
	must(t, err)
	must(t, filepath.WalkDir(a.w.root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if bytes.Contains(data, []byte("hunter2-secret")) {
			t.Errorf("the secret is in %s", path)
		}
		return err
	}))
}

func TestAFailedStepLeavesNothing(t *testing.T) {
	cause := errs.New(errs.DiskFull, "no room")
	for _, what := range []string{"image", "network", "runtime", "guest", "main"} {
		t.Run(what, func(t *testing.T) {
			a := newWorld(t).boot()
			a.w.setFail(what, cause)
			if what == "runtime" {
				a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
					if op == fake.OpStart {
						return cause
					}
					return nil
				})
			}
			req := startRequest()
			_, err := a.Start(ctx(t), req)
			wantReason(t, err, errs.DiskFull)
			if step := errs.From(err).Details["step"]; step != what {
				t.Fatalf("step %q in %v", step, err)
			}
			a.wantGone(req.UID)
			// Another attempt is observed under numbers that the failed one did not use.
			before, err := a.store.LastObservation()
			must(t, err)
			a.w.setFail(what, nil)
			a.w.host.SetHook(nil)
			rec, err := a.Start(ctx(t), req)
			must(t, err)
			if before == 0 || rec.Observation <= before {
				t.Errorf("after %d observations of a start that failed comes %d", before, rec.Observation)
			}
		})
	}
}

func TestATeardownThatFailsIsTriedAgain(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpDelete {
			return errs.New(errs.InternalError, "stuck")
		}
		return nil
	})
	wantReason(t, a.Delete(ctx(t), req.UID), errs.InternalError)
	rec, err := a.store.Sandbox(req.UID)
	must(t, err)
	if rec.Intent != nodestate.IntentDelete {
		t.Fatalf("%s", text(rec))
	}
	// What a runtime may still use is not taken from it.
	for _, kept := range []string{"image hold", "volume " + req.Spec.Volumes[0].VolumeUID, "folder"} {
		if !slices.Contains(a.w.leftOf(req.UID), kept) {
			t.Errorf("%s was taken from a sandbox that may run", kept)
		}
	}
	a.w.host.SetHook(nil)
	eventually(t, "the owner deletes it by itself", func() bool { return len(a.w.leftOf(req.UID)) == 0 })
	eventually(t, "the record goes", func() bool { _, err := a.store.Sandbox(req.UID); return errs.Has(err, errs.ObjectNotFound) })
}

func TestTheEndOfTheCommandIsTheEndOfTheSandbox(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	in := a.w.guests[req.UID]
	in.end = MainExit{Code: 3}
	close(in.exit)
	eventually(t, "it is Stopped", func() bool { rec, err := a.store.Sandbox(req.UID); return err == nil && rec.Phase == sandbox.Stopped })
	rec, err := a.store.Sandbox(req.UID)
	must(t, err)
	if *rec.ExitCode != 3 || rec.Reason != sandbox.ReasonError {
		t.Fatalf("%s", text(rec))
	}
	eventually(t, "the runtime is ended", func() bool {
		st, err := a.driver.State(ctx(t), req.UID)
		return err == nil && st.Phase == runtime.Stopped
	})
	final, err := a.Final(req.UID)
	must(t, err)
	if string(final.Stdout.Data) != "bye" || final.Stdout.Offset != 3 {
		t.Fatalf("%+v", final)
	}
	_, err = a.Guest(req.UID)
	wantReason(t, err, errs.WrongPhase)
	// It stays so over a restart, and its record is not changed by the runtime's end.
	b := a.reboot()
	if again, err := b.store.Sandbox(req.UID); err != nil || again.Observation != rec.Observation || again.Phase != sandbox.Stopped {
		t.Fatalf("%s %v", text(again), err)
	}
	must(t, b.Delete(ctx(t), req.UID))
	b.wantGone(req.UID)
}

func TestTheEndOfTheSentry(t *testing.T) {
	for want, exit := range map[string]runtime.Exit{
		sandbox.ReasonOOMKilled: {Known: true, Signal: syscall.SIGKILL, OOM: true},
		sandbox.ReasonKilled:    {Known: true, Signal: syscall.SIGKILL},
		sandbox.ReasonLost:      {},
	} {
		t.Run(want, func(t *testing.T) {
			a := newWorld(t).boot()
			req := startRequest()
			_, err := a.Start(ctx(t), req)
			must(t, err)
			a.w.host.Exit(req.UID, exit)
			eventually(t, "it is Failed", func() bool { rec, err := a.store.Sandbox(req.UID); return err == nil && rec.Phase == sandbox.Failed })
			if rec, err := a.store.Sandbox(req.UID); err != nil || rec.Reason != want {
				t.Fatalf("%s %v", text(rec), err)
			}
			must(t, a.Delete(ctx(t), req.UID))
			a.wantGone(req.UID)
		})
	}
}

func TestDeleteEndsWhatIsGoingOn(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	entered := make(chan struct{})
	a.w.host.SetHook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpStart {
			close(entered)
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	started := make(chan error, 1)
	go func() { started <- second(a.Start(ctx(t), req)) }()
	<-entered
	must(t, a.Delete(ctx(t), req.UID))
	wantReason(t, <-started, errs.WrongPhase)
	a.wantGone(req.UID)
}

// A guest that is asked when the deletion comes is not what was wrong.
func TestDeleteIsTheReasonOfAnEndedCapture(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	must(t, second(a.Start(ctx(t), req)))
	a.w.silent = make(chan struct{})
	captured := make(chan error, 1)
	go func() {
		captured <- second(a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: req.Tenant, CommandID: "c"}))
	}()
	<-a.w.silent
	must(t, a.Delete(ctx(t), req.UID))
	wantReason(t, <-captured, errs.WrongPhase)
	a.wantGone(req.UID)
}

func TestCloseEndsNoSandbox(t *testing.T) {
	w := newWorld(t)
	a := w.boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	a.end()
	if _, ok := w.host.Count(req.UID); !ok {
		t.Fatal("the sandbox ended with agentd")
	}
	wantReason(t, a.Delete(ctx(t), req.UID), errs.ShuttingDown)
}

func TestABrokenChannelIsOpenedAgain(t *testing.T) {
	a := newWorld(t).boot()
	req := startRequest()
	must(t, second(a.Start(ctx(t), req)))
	was, err := a.Guest(req.UID)
	must(t, err)
	must(t, was.Close())
	eventually(t, "a new channel", func() bool { now, err := a.Guest(req.UID); return err == nil && now != was })
	// The watch on the command goes on over the new one.
	in := a.w.guests[req.UID]
	in.end = MainExit{Code: 0}
	close(in.exit)
	eventually(t, "its end is seen", func() bool { rec, err := a.store.Sandbox(req.UID); return err == nil && rec.Phase == sandbox.Stopped })
}

func TestOnlyAFewAreStartedAtATime(t *testing.T) {
	a := newWorld(t).boot() // Width is one
	entered, release := make(chan struct{}, 2), make(chan struct{})
	a.w.host.SetHook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpStart {
			entered <- struct{}{}
			<-release
		}
		return nil
	})
	first := make(chan error, 1)
	go func() { first <- second(a.Start(ctx(t), startRequest())) }()
	<-entered
	waiting := startRequest()
	call, cancel := context.WithDeadline(ctx(t), time.Now())
	defer cancel()
	if err := second(a.Start(call, waiting)); err == nil || len(entered) != 0 {
		t.Fatalf("a second was started beside the first: %v", err)
	}
	close(release)
	must(t, <-first)
	eventually(t, "the one that had no time is gone", func() bool { _, err := a.store.Sandbox(waiting.UID); return errs.Has(err, errs.ObjectNotFound) })
}

// The wait for a turn is a step of its own, and no part of the work: in the record and in the metrics.
func TestL02TheWaitForATurnIsToldApart(t *testing.T) {
	a := newWorld(t).boot() // Width is one
	var mu sync.Mutex
	now, looks := time.Unix(1000, 0), -1
	asked := make(chan struct{})
	a.Now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		now = now.Add(time.Millisecond)
		if looks >= 0 {
			if looks++; looks == 2 { // the step began, and then its wait
				close(asked)
			}
		}
		return now
	}
	took := map[string]time.Duration{}
	a.Measure = func(verb, step string, d time.Duration, _ error) {
		mu.Lock()
		defer mu.Unlock()
		took[verb+" "+step] = d
		if step == "spec" { // the one before
			looks = 0
		}
	}
	leave, err := a.turns.take(ctx(t), false) // somebody else's turn
	must(t, err)
	started, req := make(chan nodestate.Sandbox, 1), startRequest()
	go func() {
		rec, err := a.Start(ctx(t), req)
		if err != nil {
			t.Error(err)
		}
		started <- rec
	}()
	<-asked
	mu.Lock()
	now = now.Add(time.Hour)
	mu.Unlock()
	leave()
	rec := <-started
	snap, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "save-1"})
	must(t, err)
	mu.Lock()
	defer mu.Unlock()
	if rec.StartQueued < time.Hour || rec.StartService <= 0 || rec.StartService >= time.Hour {
		t.Errorf("waited %s, worked %s", rec.StartQueued, rec.StartService)
	}
	if took["start queue"] != rec.StartQueued || took["start runtime"] <= 0 || took["start runtime"] >= time.Hour {
		t.Errorf("measured: %v", took)
	}
	if took["checkpoint queue"] != snap.Status.Queued || took["checkpoint capture"] != snap.Status.Service || snap.Status.Service <= 0 {
		t.Errorf("a capture that took %s: %v", snap.Status.Service, took)
	}
}

func TestStepsAreNamedOnce(t *testing.T) {
	o := &owner{}
	var names []string
	for _, s := range o.steps(&build{}) {
		if slices.Contains(names, s.name) || strings.Contains(s.name, ".") {
			t.Fatalf("step %q", s.name)
		}
		names = append(names, s.name)
	}
}
