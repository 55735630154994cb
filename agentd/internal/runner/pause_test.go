package runner

import (
	"context"
	"errors"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// started gives a node with a running sandbox.
func started(t *testing.T) (*agent, StartRequest) {
	t.Helper()
	a := newWorld(t).boot()
	req := startRequest()
	must(t, second(a.Start(ctx(t), req)))
	return a, req
}

// stands checks that the sandbox stands still, in the records, in the runtime and for who asks.
func (a *agent) stands(id string) {
	a.w.t.Helper()
	rec, err := a.store.Sandbox(id)
	must(a.w.t, err)
	st, err := a.driver.State(ctx(a.w.t), id)
	must(a.w.t, err)
	if rec.Phase != sandbox.Paused || rec.Capture != nil || st.Phase != runtime.Paused || !a.w.guests[id].quiet {
		a.w.t.Fatalf("recorded %s, the runtime says %s, quiet %t", text(rec), st.Phase, a.w.guests[id].quiet)
	}
	_, err = a.Guest(id)
	wantReason(a.w.t, err, errs.SandboxPaused)
}

func TestPauseAndResume(t *testing.T) {
	a, req := started(t)
	before, err := a.Guest(req.UID)
	must(t, err)
	for range 3 {
		paused, err := a.Pause(ctx(t), req.UID)
		must(t, err)
		a.stands(req.UID)
		again, err := a.Pause(ctx(t), req.UID)
		must(t, err)
		if again.Observation != paused.Observation {
			t.Fatal("paused twice")
		}
		running, err := a.Resume(ctx(t), req.UID)
		must(t, err)
		if running.Phase != sandbox.Running || running.Observation <= paused.Observation {
			t.Fatalf("%s", text(running))
		}
		a.consistent(req.UID)
		must(t, second(a.Resume(ctx(t), req.UID)))
	}
	if now, err := a.Guest(req.UID); err != nil || now != before {
		t.Fatalf("another channel: %v", err)
	}
	for _, err := range []error{second(a.Pause(ctx(t), uid.New())), second(a.Resume(ctx(t), uid.New()))} {
		wantReason(t, err, errs.ObjectNotFound)
	}
}

func TestAPausedSandboxStaysPausedOverARestart(t *testing.T) {
	a, req := started(t)
	must(t, second(a.Pause(ctx(t), req.UID)))
	b := a.reboot()
	b.stands(req.UID)
	must(t, second(b.Pause(ctx(t), req.UID)))
	must(t, second(b.Resume(ctx(t), req.UID)))
	b.consistent(req.UID)
	if len(b.w.guests[req.UID].mains) != 1 {
		t.Fatal("started again")
	}
	// The end of its command is still seen.
	in := b.w.guests[req.UID]
	close(in.exit)
	eventually(t, "its end is seen", func() bool { rec, err := b.store.Sandbox(req.UID); return err == nil && rec.Phase == sandbox.Stopped })
}

func TestAFailedPauseNeverCostsTheSandbox(t *testing.T) {
	cause := errs.New(errs.GuestSilent, "no")
	for _, what := range []string{"quiesce", "drain", "pause"} {
		t.Run(what, func(t *testing.T) {
			a, req := started(t)
			a.w.setFail(what, cause)
			a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
				if string(op) == what {
					return cause
				}
				return nil
			})
			wantReason(t, second(a.Pause(ctx(t), req.UID)), errs.GuestSilent)
			a.consistent(req.UID)
		})
	}
}

func TestAPausedSandboxThatCannotBeResumedIsEnded(t *testing.T) {
	a, req := started(t)
	must(t, second(a.Pause(ctx(t), req.UID)))
	a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpResume {
			return errors.New("broken")
		}
		return nil
	})
	if err := second(a.Resume(ctx(t), req.UID)); err == nil {
		t.Fatal("it succeeded")
	}
	if rec, err := a.store.Sandbox(req.UID); err != nil || rec.Phase != sandbox.Failed {
		t.Fatalf("%s %v", text(rec), err)
	}
	a.w.host.SetHook(nil)
	must(t, a.Delete(ctx(t), req.UID))
	a.wantGone(req.UID)
}

func TestTheEndOfAPausedSandbox(t *testing.T) {
	a, req := started(t)
	must(t, second(a.Pause(ctx(t), req.UID)))
	a.w.host.Exit(req.UID, runtime.Exit{Known: true, OOM: true})
	eventually(t, "its end is seen", func() bool {
		rec, err := a.store.Sandbox(req.UID)
		return err == nil && rec.Phase == sandbox.Failed && rec.Reason == sandbox.ReasonOOMKilled
	})
}

func TestAPausedSandboxIsCapturedAndStaysPaused(t *testing.T) {
	a, req := started(t)
	must(t, second(a.Pause(ctx(t), req.UID)))
	a.stands(req.UID)
	snap, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "c"})
	must(t, err)
	a.stands(req.UID)
	must(t, a.Freeze(ctx(t), req.UID, func(context.Context) error { a.halted(req.UID); return nil }))
	a.stands(req.UID)
	b := a.reboot()
	must(t, second(b.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "c2"})))
	b.stands(req.UID)
	must(t, b.Delete(ctx(t), req.UID))
	must(t, second(b.Restore(ctx(t), restoreRequest(snap, req.Spec.Volumes[0].VolumeUID))))
}

// halted is stands while a capture is recorded.
func (a *agent) halted(id string) {
	a.w.t.Helper()
	if st, err := a.driver.State(ctx(a.w.t), id); err != nil || st.Phase != runtime.Paused {
		a.w.t.Fatalf("the runtime says %s, %v", st.Phase, err)
	}
}

// TestCrashInAPause stops agentd dead at each fault point of a pause and a resume, and of a capture in between; the next one leaves the
// sandbox running, or standing still, as the last call that was begun or reported wanted it.
func TestCrashInAPause(t *testing.T) {
	want := map[string]sandbox.Phase{
		"pause.intent.after": sandbox.Paused, "pause.frozen.after": sandbox.Paused, "pause.record.after": sandbox.Paused,
		"checkpoint.intent.after": sandbox.Paused, "checkpoint.freezing.after": sandbox.Paused, "checkpoint.save.after": sandbox.Paused,
		"checkpoint.record.before": sandbox.Paused, "checkpoint.record.after": sandbox.Paused,
		"resume.intent.after": sandbox.Running, "resume.thawed.after": sandbox.Running, "resume.record.after": sandbox.Running,
	}
	for point, phase := range want {
		t.Run(point, func(t *testing.T) {
			a, req := started(t)
			a.w.mu.Lock()
			a.w.at = point
			a.w.mu.Unlock()
			err := second(a.Pause(ctx(t), req.UID))
			if err == nil {
				err = second(a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "c"}))
			}
			if err == nil {
				err = second(a.Resume(ctx(t), req.UID))
			}
			if err == nil {
				t.Fatal("the point was not passed")
			}
			b := a.reboot()
			if phase == sandbox.Paused {
				b.stands(req.UID)
				must(t, second(b.Resume(ctx(t), req.UID)))
			}
			b.consistent(req.UID)
			must(t, b.Delete(ctx(t), req.UID))
			b.wantGone(req.UID)
		})
	}
}
