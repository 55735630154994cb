package runner

import (
	"context"
	"os"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// artefacts counts what there is of artefacts, whole or not.
func (a *agent) artefacts() int {
	a.w.t.Helper()
	seen, err := a.Snapshots.Observe()
	must(a.w.t, err)
	return len(seen.Published) + len(seen.Staging) + len(seen.Trash)
}

// sleeps checks that the sandbox is in its artefact alone, with its volumes and its image.
func (a *agent) sleeps(req StartRequest) {
	a.w.t.Helper()
	rec, err := a.store.Sandbox(req.UID)
	must(a.w.t, err)
	if rec.Phase != sandbox.Hibernated || rec.Hibernation == nil || !rec.Hibernation.Released || rec.Capture != nil {
		a.w.t.Fatalf("%s", text(rec))
	}
	if _, err := a.driver.State(ctx(a.w.t), req.UID); !errs.Has(err, errs.ObjectNotFound) {
		a.w.t.Fatalf("the runtime has it: %v", err)
	}
	if a.artefacts() != 1 || a.w.holds[req.UID] == "" || a.w.volumes[req.Spec.Volumes[0].VolumeUID] != req.UID || a.w.leases != 0 {
		a.w.t.Fatalf("%d artefacts, holds %v, volumes %v, %d leases", a.artefacts(), a.w.holds, a.w.volumes, a.w.leases)
	}
	_, err = a.Guest(req.UID)
	wantReason(a.w.t, err, errs.SandboxPaused)
}

// settled returns once the sandbox's owner has done what it left for after its answer.
func (a *agent) settled(id string) error {
	return a.do(ctx(a.w.t), id, false, func(context.Context, *owner) error { return nil })
}

// runs checks that the sandbox runs and nothing of a hibernation is left.
func (a *agent) runs(id string) {
	a.w.t.Helper()
	must(a.w.t, a.settled(id))
	a.consistent(id)
	if rec, err := a.store.Sandbox(id); err != nil || rec.Hibernation != nil || a.artefacts() != 0 || len(a.w.guests[id].mains) != 1 {
		a.w.t.Fatalf("%s, %v, %d artefacts", text(rec), err, a.artefacts())
	}
}

func TestHibernateAndWake(t *testing.T) {
	a, req := started(t)
	began, err := a.store.Sandbox(req.UID)
	must(t, err)
	for round := range 3 {
		if round == 1 {
			must(t, second(a.Pause(ctx(t), req.UID)))
		}
		slept, err := a.Hibernate(ctx(t), req.UID)
		must(t, err)
		a.sleeps(req)
		must(t, second(a.Hibernate(ctx(t), req.UID)))
		if round == 2 {
			a = a.reboot()
			a.sleeps(req)
		}
		woken, err := a.Resume(ctx(t), req.UID)
		must(t, err)
		a.runs(req.UID)
		if woken.Observation <= slept.Observation || !woken.StartTime.Equal(began.StartTime) || woken.GuestGeneration != began.GuestGeneration+uint64(round)+1 || woken.Hostname != began.Hostname {
			t.Fatalf("%s", text(woken))
		}
	}
	must(t, second(a.Hibernate(ctx(t), req.UID)))
	must(t, a.Delete(ctx(t), req.UID))
	a.wantGone(req.UID)
	if a.artefacts() != 0 {
		t.Fatal("the artefact is left")
	}
}

func TestAFailedHibernationLeavesTheSandboxAsItWas(t *testing.T) {
	full := errs.New(errs.DiskFull, "no room")
	for _, what := range []string{"quiesce", "drain", "pause", "save"} {
		for _, from := range []sandbox.Phase{sandbox.Running, sandbox.Paused} {
			if from == sandbox.Paused && what != "save" {
				continue
			}
			t.Run(what+" "+string(from), func(t *testing.T) {
				a, req := started(t)
				if from == sandbox.Paused {
					must(t, second(a.Pause(ctx(t), req.UID)))
				}
				a.w.setFail(what, full)
				a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
					if string(op) == what {
						return full
					}
					return nil
				})
				wantReason(t, second(a.Hibernate(ctx(t), req.UID)), errs.DiskFull)
				a.w.host.SetHook(nil)
				if from == sandbox.Paused {
					a.stands(req.UID)
					must(t, second(a.Resume(ctx(t), req.UID)))
				}
				a.runs(req.UID)
			})
		}
	}
}

func TestAFailedWakeLeavesTheSandboxHibernated(t *testing.T) {
	cause := errs.New(errs.OutOfMemory, "no room")
	for _, what := range []string{"network", "restore", "guest"} {
		t.Run(what, func(t *testing.T) {
			a, req := started(t)
			must(t, second(a.Hibernate(ctx(t), req.UID)))
			a.w.setFail(what, cause)
			a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
				if string(op) == what {
					return cause
				}
				return nil
			})
			wantReason(t, second(a.Resume(ctx(t), req.UID)), errs.OutOfMemory)
			a.sleeps(req)
			a.w.host.SetHook(nil)
			a.w.setFail(what, nil)
			must(t, second(a.Resume(ctx(t), req.UID)))
			a.runs(req.UID)
		})
	}
	t.Run("the artefact is gone", func(t *testing.T) {
		a, req := started(t)
		must(t, second(a.Hibernate(ctx(t), req.UID)))
		must(t, os.RemoveAll(a.Snapshots.Path(req.UID)))
		if err := second(a.Resume(ctx(t), req.UID)); err == nil {
			t.Fatal("it woke")
		}
		if rec, err := a.store.Sandbox(req.UID); err != nil || rec.Phase != sandbox.Hibernated {
			t.Fatalf("%s %v", text(rec), err)
		}
		must(t, a.Delete(ctx(t), req.UID))
		a.wantGone(req.UID)
	})
}

// TestCrashInAHibernation stops agentd dead at each fault point of a hibernation and of the wake; the next one has the sandbox either as it
// was or hibernated, and the same call leads to its end.
func TestCrashInAHibernation(t *testing.T) {
	points := []string{"hibernate.intent.after", "hibernate.frozen.after", "checkpoint.save.after", "hibernate.saved.after", "hibernate.record.after",
		"hibernate.released.after", "wake.intent.after", "wake.running.after", "wake.dropped.after"}
	for _, s := range (&owner{}).steps(&build{}) {
		points = append(points, "restore."+s.name+".before", "restore."+s.name+".after")
	}
	for _, from := range []sandbox.Phase{sandbox.Running, sandbox.Paused} {
		for _, point := range points {
			t.Run(string(from)+" "+point, func(t *testing.T) {
				a, req := started(t)
				if from == sandbox.Paused {
					must(t, second(a.Pause(ctx(t), req.UID)))
				}
				a.w.mu.Lock()
				a.w.at = point
				a.w.mu.Unlock()
				slept := second(a.Hibernate(ctx(t), req.UID))
				if slept == nil {
					err := second(a.Resume(ctx(t), req.UID))
					if point == "wake.dropped.after" { // after the answer: who asks next meets the owner that dies, or another after it
						must(t, err)
						_ = a.settled(req.UID)
						err = a.w.fault("whatever comes after a fault")
					}
					if err == nil {
						t.Fatal("the point was not passed")
					}
				}
				b := a.reboot()
				rec, err := b.store.Sandbox(req.UID)
				must(t, err)
				switch {
				case rec.Phase == sandbox.Hibernated:
					b.sleeps(req)
				case rec.Phase == sandbox.Paused && from == sandbox.Paused && slept != nil:
					b.stands(req.UID)
				default:
					b.runs(req.UID)
				}
				must(t, second(b.Hibernate(ctx(t), req.UID)))
				b.sleeps(req)
				must(t, second(b.Resume(ctx(t), req.UID)))
				b.runs(req.UID)
				must(t, b.Delete(ctx(t), req.UID))
				b.wantGone(req.UID)
			})
		}
	}
}
