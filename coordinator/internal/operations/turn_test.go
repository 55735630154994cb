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

func (w *world) phase(u string) sandbox.Phase {
	w.t.Helper()
	page, err := w.store.Get(context.Background(), records.SandboxKey(tenant, u))
	if err != nil {
		w.t.Fatal(err)
	}
	return sandbox.Phase(page.Phase)
}

// Pausing and resuming are repeatable; what is recorded is what the node did last, whatever was asked and in whatever order the answers are
// recorded.
func TestATurnRecordsWhatTheNodeDidLast(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeSandbox(t, e)
	for range 3 {
		op := must(pause(u)(ctx, e, call("")))(t)
		if got := op.Result.Sandboxes[0].Status.Phase; got != sandbox.Paused || w.phase(u) != got {
			t.Fatalf("answered %s, recorded %s", got, w.phase(u))
		}
		must(pause(u)(ctx, e, call("")))(t)
	}
	first := call(uid.New())
	must(resume(u)(ctx, e, first))(t)
	must(pause(u)(ctx, e, call("")))(t)
	must(resume(u)(ctx, e, first))(t) // a replay changes nothing
	if got := w.phase(u); got != sandbox.Paused {
		t.Fatalf("recorded %s", got)
	}
	must(resume(u)(ctx, e, call("")))(t)
	w.agree(e)

	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: u}))(t)
	_, err := pause(u)(ctx, e, call(""))
	wantReason(t, err, errs.ObjectNotFound)
	w.agree(e)
}

// An older observation of the node changes nothing, also when it is an operation's own.
func TestATurnThatIsOvertaken(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeSandbox(t, e)
	w.node.mu.Lock()
	newer := operations.Observation{UID: u, Tenant: tenant, Phase: sandbox.Running, Number: w.node.number + 100, Session: w.node.epoch}
	w.node.mu.Unlock()
	if err := e.Observe(ctx, "n1", newer); err != nil {
		t.Fatal(err)
	}
	op := must(pause(u)(ctx, e, call("")))(t)
	if got := op.Result.Sandboxes[0].Status.Phase; got != sandbox.Running || w.phase(u) != sandbox.Running {
		t.Fatalf("answered %s, recorded %s", got, w.phase(u))
	}
}

// What is hibernated takes no room, keeps its volumes, and needs room again to come back: without it, it stays hibernated. A cordon
// does not keep it away, and it can be deleted as it is.
func TestAHibernatedSandboxTakesNoRoom(t *testing.T) {
	w := newWorld(t)
	w.nodes.all[0].Allocatable.MemoryBytes = 600 << 20 // of requests of 32 MiB and limits of 512
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	vol := madeVolume(t, e, "data")
	u := madeSandbox(t, e, vol)
	must(hibernate(u)(ctx, e, call("")))(t)
	w.agree(e)
	_, err := e.DeleteVolume(ctx, call(""), operations.Delete{UID: vol})
	wantReason(t, err, errs.AlreadyAttached)

	w.nodes.all[0].Allocatable.CPUMillis = 100 // room for one
	other := madeSandbox(t, e)
	_, err = resume(u)(ctx, e, call(""))
	wantReason(t, err, errs.NoNodeFits)
	if got := w.phase(u); got != sandbox.Hibernated {
		t.Fatalf("recorded %s", got)
	}
	w.agree(e)
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: other}))(t)
	w.nodes.Cordon("n1", true)
	must(resume(u)(ctx, e, call("")))(t)
	w.agree(e)
	must(hibernate(u)(ctx, e, call("")))(t)
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: u}))(t)
	w.agree(e)
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: vol}))(t)
}
