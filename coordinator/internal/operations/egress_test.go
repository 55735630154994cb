package operations_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func outboundSpec() sandbox.Spec {
	s := spec()
	s.Network = sandbox.NetworkOutbound
	return s
}

func madeOutbound(t *testing.T, e *term) string {
	t.Helper()
	op := must(e.CreateSandbox(context.Background(), call(""), operations.CreateSandbox{Spec: outboundSpec()}))(t)
	return op.Plan.Copies[0].SandboxUID
}

var denied = &operations.EgressUpdate{Policy: &sandbox.Egress{Default: sandbox.EgressDeny}}

func setEgress(u string) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.UpdateSandbox(ctx, c, operations.UpdateSandbox{UID: u, Egress: denied})
	}
}

// inForce checks that the node has the policy and the generation that the record has, and that the record says so.
func (w *world) inForce(u string) *records.Sandbox {
	w.t.Helper()
	sb := w.sandbox(u)
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	has := w.node.policies[u]
	if sb.Status.ObservedGeneration != sb.Generation || w.node.generations[u] < sb.NodeGeneration || (has == nil) != (sb.Spec.Egress == nil) || has != nil && has.Default != sb.Spec.Egress.Default {
		w.t.Fatalf("recorded %+v, %+v; the node has generation %d and %+v", sb.Spec.Egress, sb.Status, w.node.generations[u], has)
	}
	return sb
}

func TestUpdateOfTheEgress(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u, inside := madeOutbound(t, e), madeSandbox(t, e)
	c, hour := call(uid.New()), time.Hour
	op := must(setEgress(u)(ctx, e, c))(t)
	sb := w.inForce(u)
	if sb.Generation != 2 || op.Result.Sandboxes[0].Revision != sb.Revision || op.Result.Sandboxes[0].Status.ObservedGeneration != 2 {
		t.Fatalf("answered %+v, recorded %+v", op.Result.Sandboxes[0], sb)
	}
	must(setEgress(u)(ctx, e, c))(t)
	if again := w.sandbox(u); again.Revision != sb.Revision {
		t.Fatal("a replay changed it")
	}
	// What does not concern the node is observed as soon as it is recorded.
	must(e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: u, Lifetime: &hour}))(t)
	if sb = w.inForce(u); sb.Generation != 3 || sb.NodeGeneration != 2 {
		t.Fatalf("recorded %+v", sb)
	}
	// Paused and hibernated, and with something else in the same request; no policy is one too.
	must(pause(u)(ctx, e, call("")))(t)
	must(e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: u, Egress: &operations.EgressUpdate{}, Labels: &map[string]string{"a": "b"}}))(t)
	if sb = w.inForce(u); sb.Spec.Egress != nil || sb.Labels["a"] != "b" || sb.Status.Phase != sandbox.Paused {
		t.Fatalf("recorded %+v", sb)
	}
	must(hibernate(u)(ctx, e, call("")))(t)
	must(setEgress(u)(ctx, e, call("")))(t)
	w.inForce(u)
	for want, bad := range map[errs.Reason]operations.UpdateSandbox{
		errs.InvalidField:   {UID: inside, Egress: denied},
		errs.LimitExceeded:  {UID: u, Egress: &operations.EgressUpdate{Policy: &sandbox.Egress{Allow: make([]sandbox.EgressRule, sandbox.MaxEgressRules+1)}}},
		errs.ObjectNotFound: {UID: uid.New(), Egress: denied},
	} {
		_, err := e.UpdateSandbox(ctx, call(""), bad)
		wantReason(t, err, want)
	}
	if sb := w.sandbox(inside); sb.Generation != 1 {
		t.Fatal("a refused request changed it")
	}
	w.agree(e)
}

// Many updates at once: the record and the node end with the same policy.
func TestUpdatesOfTheEgressAtOnce(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	u := madeOutbound(t, e)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			policy := &sandbox.Egress{Default: []sandbox.EgressAction{sandbox.EgressAllow, sandbox.EgressDeny}[i%2]}
			if _, err := e.UpdateSandbox(context.Background(), call(""), operations.UpdateSandbox{UID: u, Egress: &operations.EgressUpdate{Policy: policy}}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if sb := w.inForce(u); sb.Generation != 9 {
		t.Fatalf("generation %d", sb.Generation)
	}
	w.agree(e)
}

// A sandbox that is just being started gets the policy once it runs; one that ends meanwhile needs none.
func TestUpdateOfTheEgressDuringAStart(t *testing.T) {
	for _, fails := range []bool{false, true} {
		w := newWorld(t)
		e := w.lead()
		w.node.hold = make(chan struct{})
		if fails {
			w.node.fail = refuse("start", errs.ImageNotFound)
		}
		started := make(chan error, 1)
		go func() {
			_, err := e.CreateSandbox(context.Background(), call(""), operations.CreateSandbox{Name: "box", Spec: outboundSpec()})
			started <- err
		}()
		var u string
		w.eventually("it is being started", func() bool {
			for _, on := range e.PlacedUIDs("n1") {
				u = on
			}
			return u != "" && w.recorded(u)
		})
		updated := make(chan error, 1)
		go func() {
			_, err := setEgress(u)(context.Background(), e, call(""))
			updated <- err
		}()
		w.eventually("the policy is recorded", func() bool { return w.sandbox(u).Spec.Egress != nil })
		close(w.node.hold)
		startErr, updateErr := <-started, <-updated
		if fails {
			wantReason(t, startErr, errs.ImageNotFound)
			if updateErr != nil { // it was found failed, or gone
				wantReason(t, updateErr, errs.WrongPhase)
			}
		} else if startErr != nil || updateErr != nil {
			t.Fatal(startErr, updateErr)
		} else {
			w.inForce(u)
		}
		w.agree(e)
		e.stop()
	}
}

// A sandbox with an outbound network goes where there is one, a hibernated one is not woken where there is none any more.
func TestOutboundNeedsANodeThatHasIt(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeOutbound(t, e)
	must(hibernate(u)(ctx, e, call("")))(t)
	w.nodes.all[0].NoOutbound = true
	for _, err := range []error{
		second(e.CreateSandbox(ctx, call(""), operations.CreateSandbox{Spec: outboundSpec()})),
		second(resume(u)(ctx, e, call(""))),
	} {
		wantReason(t, err, errs.NoNodeFits)
		if why := errs.From(err).Details["node.n1"]; why != "it has no outbound network" {
			t.Errorf("n1 does not fit because %q", why)
		}
	}
	if w.phase(u) != sandbox.Hibernated {
		t.Errorf("it is %s", w.phase(u))
	}
	madeSandbox(t, e) // without one
	w.nodes.all[0].NoOutbound = false
	must(resume(u)(ctx, e, call("")))(t)
	w.agree(e)
}

func second[T any](_ T, err error) error { return err }

// recorded tells whether there is a record.
func (w *world) recorded(u string) bool {
	_, err := w.store.Get(context.Background(), records.SandboxKey(tenant, u))
	return err == nil
}
