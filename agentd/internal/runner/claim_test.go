package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// parked gives a node with a sandbox that was restored ahead of need, and a claim of it.
func parked(t *testing.T) (*agent, ClaimRequest) {
	t.Helper()
	a, req, snap := checkpointed(t)
	must(t, a.Delete(ctx(t), req.UID))
	rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
	rr.Parked = true
	rec, err := a.Restore(ctx(t), rr)
	must(t, err)
	if !rec.Parked || rec.Claim != nil || a.w.guests[rr.UID].identity.Hook != HookAtClaim {
		t.Fatalf("%s, told %+v", text(rec), a.w.guests[rr.UID].identity)
	}
	a.stands(rr.UID)
	again, err := a.Restore(ctx(t), rr)
	must(t, err)
	if again.Observation != rec.Observation {
		t.Fatal("restored twice")
	}
	return a, ClaimRequest{UID: rr.UID, Tenant: "t", Name: "mine", Generation: 2, CommandID: "claim-1", Env: map[string]string{"A": "claimed", "D": "5"}}
}

// given checks that the sandbox is the claimer's, in the records and for its guest, and that it was told so once.
func (a *agent) given(req ClaimRequest, host string) {
	a.w.t.Helper()
	a.consistent(req.UID)
	rec, err := a.store.Sandbox(req.UID)
	must(a.w.t, err)
	in := a.w.guests[req.UID]
	if rec.Name != req.Name || rec.Generation != req.Generation || rec.Hostname != host || rec.Parked || rec.Claim == nil || !rec.Claim.Told || rec.GuestGeneration != in.generation {
		a.w.t.Fatalf("recorded %s", text(rec))
	}
	if in.identity.Hostname != host || in.hooks != 1 || len(in.mains) != 0 {
		a.w.t.Fatalf("its guest knows %+v; %d hooks, %d commands", in.identity, in.hooks, len(in.mains))
	}
	for name, value := range req.Env {
		if rec.Spec.Env[name] != value || !slices.Contains(rec.Defaults.Env, name+"="+value) {
			a.w.t.Fatalf("%s is %q, processes get %q", name, rec.Spec.Env[name], rec.Defaults.Env)
		}
	}
}

func TestAClaimGivesAnIdentityOnce(t *testing.T) {
	a, req := parked(t)
	before, err := a.store.Sandbox(req.UID)
	must(t, err)
	got, err := a.Claim(ctx(t), req)
	must(t, err)
	a.given(req, "mine")
	if got.Observation <= before.Observation || got.Phase != sandbox.Running || got.GuestGeneration != before.GuestGeneration+1 {
		t.Fatalf("%s, was %s", text(got), text(before))
	}
	again, err := a.Claim(ctx(t), req)
	must(t, err)
	if again.Observation != got.Observation {
		t.Fatal("claimed twice")
	}
	other := req
	other.CommandID = "claim-2"
	wantReason(t, second(a.Claim(ctx(t), other)), errs.WrongPhase)
	// It is an ordinary sandbox from now on, and the claim that was answered is answered again.
	must(t, second(a.Pause(ctx(t), req.UID)))
	wantReason(t, second(a.Claim(ctx(t), other)), errs.WrongPhase)
	paused, err := a.Claim(ctx(t), req)
	must(t, err)
	if paused.Phase != sandbox.Paused {
		t.Fatalf("a repeated claim resumed it: %s", text(paused))
	}
	must(t, second(a.Resume(ctx(t), req.UID)))
	b := a.reboot()
	b.given(req, "mine")
	must(t, second(b.Claim(ctx(t), req)))
	must(t, b.Delete(ctx(t), req.UID))
	b.wantGone(req.UID)
	wantReason(t, second(b.Claim(ctx(t), req)), errs.ObjectNotFound)
}

// TestAClaimOfWhatWasPaused: a sandbox that ran and was paused can be claimed too; with a host name of its own, and with none it has the end of its uid.
func TestAClaimOfWhatWasPaused(t *testing.T) {
	for asked, host := range map[string]string{"there": "there", "": ""} {
		a, made := started(t)
		must(t, second(a.Pause(ctx(t), made.UID)))
		req := ClaimRequest{UID: made.UID, Tenant: "t", Generation: 5, CommandID: "claim-1", Hostname: asked}
		if host == "" {
			host = made.UID[len(made.UID)-12:]
		}
		rec, err := a.Claim(ctx(t), req)
		must(t, err)
		a.consistent(made.UID)
		if rec.Hostname != host || rec.Name != "" || a.w.guests[made.UID].hooks != 1 || len(a.w.guests[made.UID].mains) != 1 {
			t.Fatalf("%s; %+v", text(rec), a.w.guests[made.UID])
		}
	}
}

func TestAClaimIsRefused(t *testing.T) {
	a, req := started(t)
	claim := ClaimRequest{UID: req.UID, Tenant: "t", Generation: 2, CommandID: "claim-1"}
	wantReason(t, second(a.Claim(ctx(t), claim)), errs.WrongPhase) // it runs
	must(t, second(a.Pause(ctx(t), req.UID)))
	foreign := claim
	foreign.Tenant = "other"
	wantReason(t, second(a.Claim(ctx(t), foreign)), errs.ObjectNotFound)
	large := claim
	large.Env = map[string]string{}
	for i := range sandbox.MaxEnv {
		large.Env[fmt.Sprintf("V%d", i)] = "x"
	}
	wantReason(t, second(a.Claim(ctx(t), large)), errs.LimitExceeded)
	wantReason(t, second(a.Claim(ctx(t), ClaimRequest{UID: uid.New(), Tenant: "t", CommandID: "c"})), errs.ObjectNotFound)
	a.stands(req.UID)
	gone, cancel := context.WithCancel(ctx(t))
	cancel()
	if err := second(a.Claim(context.WithValue(ctx(t), callerKey{}, gone), claim)); !errs.Has(err, errs.CallCancelled) {
		t.Fatalf("a claim that nobody waits for: %v", err)
	}
	a.stands(req.UID)
	must(t, second(a.Hibernate(ctx(t), req.UID)))
	wantReason(t, second(a.Claim(ctx(t), claim)), errs.WrongPhase)
}

// TestB15OneOfManyClaims: of many commands that claim one sandbox, one gets it.
func TestB15OneOfManyClaims(t *testing.T) {
	a, req := parked(t)
	const claims = 100
	var all sync.WaitGroup
	won := make(chan string, claims)
	for i := range claims {
		all.Go(func() {
			mine := req
			mine.CommandID, mine.Name = fmt.Sprintf("claim-%d", i), fmt.Sprintf("name-%d", i)
			_, err := a.Claim(ctx(t), mine)
			switch {
			case err == nil:
				won <- mine.Name
			case !errs.Has(err, errs.WrongPhase):
				t.Errorf("claim %d: %v", i, err)
			}
		})
	}
	all.Wait()
	close(won)
	name, ok := <-won
	if second, more := <-won; !ok || more {
		t.Fatalf("won by %q and %q", name, second)
	}
	req.Name = name
	a.given(req, name)
}

// TestAClaimThatFailsEndsTheSandbox: nobody else gets what was about to be given, and the same command is not answered with a success.
func TestAClaimThatFailsEndsTheSandbox(t *testing.T) {
	for what, fail := range map[string]func(*world){
		"resume": func(w *world) {
			w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
				if op == fake.OpResume {
					return errors.New("broken")
				}
				return nil
			})
		},
		"hello":     func(w *world) { w.setFail("guest", errs.New(errs.GuestSilent, "no")) },
		"configure": func(w *world) { w.setFail("configure", errs.New(errs.SandboxFailed, "no")) },
	} {
		t.Run(what, func(t *testing.T) {
			a, req := parked(t)
			fail(a.w)
			if err := second(a.Claim(ctx(t), req)); err == nil {
				t.Fatal("it was given")
			}
			a.w.host.SetHook(nil)
			a.w.setFail("guest", nil)
			a.w.setFail("configure", nil)
			rec, err := a.store.Sandbox(req.UID)
			must(t, err)
			if rec.Phase != sandbox.Failed || rec.Reason != sandbox.ReasonKilled {
				t.Fatalf("%s", text(rec))
			}
			wantReason(t, second(a.Claim(ctx(t), req)), errs.WrongPhase)
			req.CommandID = "claim-2"
			wantReason(t, second(a.Claim(ctx(t), req)), errs.WrongPhase)
			must(t, a.Delete(ctx(t), req.UID))
			a.wantGone(req.UID)
		})
	}
}

// TestCrashInAClaim stops agentd dead at each fault point of a claim: the next one gives the sandbox to the command that was about to get it, and its hook runs
// once.
func TestCrashInAClaim(t *testing.T) {
	for _, point := range []string{"resume.intent.after", "resume.thawed.after", "claim.told.after", "resume.record.after"} {
		t.Run(point, func(t *testing.T) {
			a, req := parked(t)
			a.w.mu.Lock()
			a.w.at = point
			a.w.mu.Unlock()
			if err := second(a.Claim(ctx(t), req)); err == nil {
				t.Fatal("the point was not passed")
			}
			b := a.reboot()
			b.given(req, "mine")
			must(t, second(b.Claim(ctx(t), req)))
			b.given(req, "mine")
			must(t, b.Delete(ctx(t), req.UID))
			b.wantGone(req.UID)
		})
	}
}

// TestCrashWhileParking: what was not recorded as standing still is undone.
func TestCrashWhileParking(t *testing.T) {
	for _, point := range []string{"restore.running.before", "restore.running.after"} {
		t.Run(point, func(t *testing.T) {
			a, req, snap := checkpointed(t)
			must(t, a.Delete(ctx(t), req.UID))
			rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
			rr.Parked = true
			a.w.mu.Lock()
			a.w.at = point
			a.w.mu.Unlock()
			if err := second(a.Restore(ctx(t), rr)); err == nil {
				t.Fatal("the point was not passed")
			}
			b := a.reboot()
			if point == "restore.running.before" {
				b.wantGone(rr.UID)
				return
			}
			b.stands(rr.UID)
			must(t, second(b.Claim(ctx(t), ClaimRequest{UID: rr.UID, Tenant: "t", CommandID: "claim-1"})))
		})
	}
	a, req, snap := checkpointed(t)
	must(t, a.Delete(ctx(t), req.UID))
	rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
	rr.Parked = true
	a.w.setFail("drain", errs.New(errs.GuestSilent, "no"))
	wantReason(t, second(a.Restore(ctx(t), rr)), errs.GuestSilent)
	a.wantGone(rr.UID)
}
