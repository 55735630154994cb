package runner

import (
	"reflect"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// outbound gives a node with a running sandbox that has an outbound network.
func outbound(t *testing.T) (*agent, StartRequest) {
	t.Helper()
	a := newWorld(t).boot()
	req := startRequest()
	req.Generation = 1
	req.Spec.Network = sandbox.NetworkOutbound
	must(t, second(a.Start(ctx(t), req)))
	return a, req
}

func (w *world) policy(id string) (*sandbox.Egress, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e, ok := w.policies[id]
	return e, ok
}

// governs checks that a policy is recorded and in force.
func (a *agent) governs(id string, want *sandbox.Egress, generation int64) nodestate.Sandbox {
	a.w.t.Helper()
	rec, err := a.store.Sandbox(id)
	must(a.w.t, err)
	if got, ok := a.w.policy(id); !ok || !reflect.DeepEqual(got, want) || !reflect.DeepEqual(rec.Spec.Egress, want) || rec.Generation != generation {
		a.w.t.Fatalf("in force is %+v (%t), recorded %+v of generation %d; want %+v of %d", got, ok, rec.Spec.Egress, rec.Generation, want, generation)
	}
	return rec
}

var (
	narrow = &sandbox.Egress{Default: sandbox.EgressDeny, Allow: []sandbox.EgressRule{{CIDRs: []string{"192.0.2.0/24"}}}}
	closed = &sandbox.Egress{Default: sandbox.EgressDeny}
)

func TestSetEgress(t *testing.T) {
	a, req := outbound(t)
	a.governs(req.UID, nil, 1)
	first, err := a.SetEgress(ctx(t), req.UID, 3, narrow)
	must(t, err)
	if rec := a.governs(req.UID, narrow, 3); rec.Observation <= 1 || rec.Observation != first.Observation {
		t.Fatalf("%s", text(rec))
	}
	// One that was overtaken changes nothing, and says what holds.
	late, err := a.SetEgress(ctx(t), req.UID, 2, nil)
	must(t, err)
	if a.governs(req.UID, narrow, 3); late.Generation != 3 {
		t.Fatalf("%s", text(late))
	}
	must(t, second(a.Pause(ctx(t), req.UID)))
	must(t, second(a.SetEgress(ctx(t), req.UID, 4, nil)))
	a.governs(req.UID, nil, 4)
	a.stands(req.UID)
	must(t, second(a.Resume(ctx(t), req.UID)))

	other := startRequest()
	must(t, second(a.Start(ctx(t), other)))
	wantReason(t, second(a.SetEgress(ctx(t), other.UID, 2, nil)), errs.InvalidField)
	wantReason(t, second(a.SetEgress(ctx(t), uid.New(), 2, nil)), errs.ObjectNotFound)
}

// A hibernated sandbox has no rules; it wakes with the policy that was set meanwhile.
func TestSetEgressOfAHibernatedSandbox(t *testing.T) {
	a, req := outbound(t)
	must(t, second(a.Hibernate(ctx(t), req.UID)))
	must(t, second(a.SetEgress(ctx(t), req.UID, 2, closed)))
	if _, ok := a.w.policy(req.UID); ok {
		t.Fatal("there is a policy in force")
	}
	b := a.reboot()
	must(t, second(b.Resume(ctx(t), req.UID)))
	b.governs(req.UID, closed, 2)
	must(t, b.Delete(ctx(t), req.UID))
	b.wantGone(req.UID)
}

// A policy that could not be put in force is not said to be, and is when it is asked for again.
func TestSetEgressThatFails(t *testing.T) {
	a, req := outbound(t)
	a.w.setFail("egress", errs.New(errs.InternalError, "no"))
	wantReason(t, second(a.SetEgress(ctx(t), req.UID, 2, closed)), errs.InternalError)
	rec, err := a.store.Sandbox(req.UID)
	must(t, err)
	if rec.Generation != 1 {
		t.Fatalf("%s", text(rec))
	}
	a.w.setFail("egress", nil)
	must(t, second(a.SetEgress(ctx(t), req.UID, 2, closed)))
	a.governs(req.UID, closed, 2)
}

// agentd dies at each point of an update: the next one has the old generation or the new one, and the same update leads to its end.
func TestCrashInASetEgress(t *testing.T) {
	for _, point := range []string{"egress.intent.after", "egress.policy.after", "egress.record.after"} {
		t.Run(point, func(t *testing.T) {
			a, req := outbound(t)
			a.w.mu.Lock()
			a.w.at = point
			a.w.mu.Unlock()
			if second(a.SetEgress(ctx(t), req.UID, 2, closed)) == nil {
				t.Fatal("the point was not passed")
			}
			b := a.reboot()
			rec, err := b.store.Sandbox(req.UID)
			must(t, err)
			if !reflect.DeepEqual(rec.Spec.Egress, closed) || (rec.Generation == 2) != (point == "egress.record.after") {
				t.Fatalf("%s", text(rec))
			}
			must(t, second(b.SetEgress(ctx(t), req.UID, 2, closed)))
			b.governs(req.UID, closed, 2)
			b.consistent(req.UID)
		})
	}
}

// A restored sandbox has the policy that the request says, and without one that of the snapshot.
func TestRestoreWithANetwork(t *testing.T) {
	a, req := outbound(t)
	must(t, second(a.SetEgress(ctx(t), req.UID, 2, narrow)))
	snap, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: req.Tenant, CommandID: "c"})
	must(t, err)
	must(t, a.Delete(ctx(t), req.UID)) // its volumes are free
	for want, network := range map[*sandbox.Egress]*NetworkRequest{narrow: nil, closed: {Egress: closed}} {
		rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
		rr.Generation, rr.Network = 5, network
		must(t, second(a.Restore(ctx(t), rr)))
		a.governs(rr.UID, want, 5)
		must(t, a.Delete(ctx(t), rr.UID))
	}
}
