package operations_test

import (
	"context"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// TestWhatANodeRefusesGoesElsewhere: a node has the last word on its memory; another one takes the sandbox, and if none does the
// operation fails with the numbers.
func TestWhatANodeRefusesGoesElsewhere(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	op := must(createBeside(e, "n0")(context.Background(), e, call("")))(t)
	sb := op.Result.Sandboxes[0]
	if sb.Status.Node != "n1" || sb.Status.Phase != sandbox.Running || len(e.PlacedUIDs("n0")) != 0 {
		t.Fatalf("%+v, n0 has %v", sb.Status, e.PlacedUIDs("n0"))
	}
	rec := must(w.store.Get(context.Background(), records.SandboxKey(tenant, sb.UID)))(t)
	read := must(records.SandboxOf(rec))(t)
	said := false
	for _, c := range read.Status.Conditions {
		said = said || c.Type == "Scheduled" && c.Reason == "PlacedAgain" && strings.Contains(c.Message, "n0 refused it: 64Mi")
	}
	if !said {
		t.Errorf("%+v", read.Status.Conditions)
	}
	w.node.full["n1"] = true
	env := wantEnvelope(t, second(create("late")(context.Background(), e, call(""))), errs.OutOfMemory)
	if env.Code != errs.ResourceExhausted || env.Details["asked"] != "64" || env.Details["left"] != "1" {
		t.Errorf("%v", env.Details)
	}
	w.agree(e)

	// It is on no node, and still in the journal of the one where it was last: a catalog that comes back older is told by that.
	page := must(w.store.List(context.Background(), catalog.Query{Tenant: tenant, Kind: catalog.KindSandbox, Phases: []string{string(sandbox.Failed)}, PageSize: 10}))(t)
	if len(page.Records) != 1 || page.Records[0].Node == "" {
		t.Fatalf("%+v", page.Records)
	}
	if failed := must(records.SandboxOf(page.Records[0]))(t); failed.Status.Node != "" || len(failed.Attachments) > 0 {
		t.Errorf("%+v", failed)
	}
	for _, sb := range must(e.Placements(context.Background(), page.Records[0].Node))(t) {
		if sb.Status.Phase == sandbox.Failed {
			t.Errorf("%s is looked for on its node", sb.UID)
		}
	}
}
