package operations_test

import (
	"context"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// A node reports a start when it begins, and again when it has answered. Neither is news.
func TestReportsOfAStartAreNoCommits(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	o := operations.Observation{Tenant: tenant, Phase: sandbox.Starting, ImageDigest: "sha256:1", ObservedGeneration: 1, Number: 1, Session: w.node.epoch}
	w.node.number = 1
	w.node.fail = func(_, u string) error { // the node is at it
		o.UID = u
		before := must(w.store.Seq(ctx))(t)
		if err := e.Observe(ctx, "n1", o); err != nil {
			t.Error(err)
		}
		if after := must(w.store.Seq(ctx))(t); after != before {
			t.Errorf("the report that it begins made %d commits", after-before)
		}
		wantReason(t, e.Observe(ctx, "n2", o), errs.WrongPhase) // it is on n1
		return nil
	}
	must(create("")(ctx, e, call(uid.New())))(t)
	u := o.UID
	sb := must(records.SandboxOf(must(w.store.Get(ctx, records.SandboxKey(tenant, u)))(t)))(t)
	if sb.Status.Phase != sandbox.Running || sb.Status.Observation == 0 {
		t.Fatalf("%+v", sb.Status)
	}
	before := must(w.store.Seq(ctx))(t)
	o.Phase, o.Number = sandbox.Running, sb.Status.Observation
	if err := e.Observe(ctx, "n1", o); err != nil {
		t.Fatal(err)
	}
	if after := must(w.store.Seq(ctx))(t); after != before {
		t.Fatalf("the report of what the answer said made %d commits", after-before)
	}
	// What has a higher number is.
	o.Phase, o.Number = sandbox.Stopped, o.Number+1
	if err := e.Observe(ctx, "n1", o); err != nil {
		t.Fatal(err)
	}
	if after := must(w.store.Seq(ctx))(t); after != before+1 {
		t.Fatalf("what the record does not have made %d commits", after-before)
	}
}
