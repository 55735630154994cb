package operations_test

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func (w *world) sandbox(u string) *records.Sandbox {
	w.t.Helper()
	rec, err := w.store.Get(context.Background(), records.SandboxKey(tenant, u))
	if err != nil {
		w.t.Fatal(err)
	}
	sb, err := records.SandboxOf(rec)
	if err != nil {
		w.t.Fatal(err)
	}
	return sb
}

func TestUpdateChangesWhatIsNamed(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeSandbox(t, e)
	was := w.sandbox(u)
	labels, hour, yes := map[string]string{"team": "blue"}, time.Hour, true
	c := call(uid.New())
	req := operations.UpdateSandbox{UID: u, IfRevision: was.Revision, Labels: &labels}
	op := must(e.UpdateSandbox(ctx, c, req))(t)
	now := w.sandbox(u)
	if got := op.Result.Sandboxes[0]; got.Revision != now.Revision || now.Labels["team"] != "blue" || now.Generation != was.Generation+1 || now.Spec.WakeOnUse {
		t.Fatalf("answered %+v, recorded %+v", got, now)
	}
	again := must(e.UpdateSandbox(ctx, c, req))(t)
	if w.sandbox(u).Revision != now.Revision || again.Result.Sandboxes[0].Revision != now.Revision {
		t.Fatal("a replay changed it")
	}
	_, err := e.UpdateSandbox(ctx, call(""), req)
	wantReason(t, err, errs.StaleRevision)
	must(e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: u, Lifetime: &hour, WakeOnUse: &yes}))(t)
	if now = w.sandbox(u); now.Labels["team"] != "blue" || now.Spec.Lifetime != time.Hour || !now.Spec.WakeOnUse {
		t.Fatalf("recorded %+v", now)
	}
	short := time.Millisecond
	for want, bad := range map[errs.Reason]operations.UpdateSandbox{
		errs.InvalidField: {UID: u}, errs.BelowFloor: {UID: u, Lifetime: &short}, errs.ObjectNotFound: {UID: uid.New(), WakeOnUse: &yes},
	} {
		_, err := e.UpdateSandbox(ctx, call(""), bad)
		wantReason(t, err, want)
	}
	w.agree(e)
}

// A lifetime is counted from the sandbox's creation, whoever leads when it ends and whatever phase it is in.
func TestTheEndOfALifetime(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	u, stays := madeSandbox(t, e), madeSandbox(t, e)
	second := time.Second
	must(hibernate(u)(context.Background(), e, call("")))(t)
	e.stop()
	e = w.lead()
	defer e.stop()
	must(e.UpdateSandbox(context.Background(), call(""), operations.UpdateSandbox{UID: u, Lifetime: &second}))(t)
	w.eventually("it is deleted", func() bool {
		_, err := w.store.Get(context.Background(), records.SandboxKey(tenant, u))
		return errs.Has(err, errs.ObjectNotFound)
	})
	if w.sandbox(stays).Status.Phase != "Running" {
		t.Fatal("another was deleted")
	}
	w.agree(e)
}

// What is not used is put to rest as its spec says; what nobody told of, and what was used since, is not.
func TestAnIdleSandboxIsPutToRest(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	second := time.Second
	boxes := map[sandbox.IdleAction]string{}
	for _, on := range []sandbox.IdleAction{sandbox.IdlePause, sandbox.IdleHibernate, sandbox.IdleDelete, ""} {
		boxes[on] = madeSandbox(t, e)
		if on != "" {
			must(e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: boxes[on], Idle: &second, OnIdle: &on}))(t)
		}
	}
	silent := madeSandbox(t, e)
	must(e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: silent, Idle: &second}))(t)
	must(pause(boxes[sandbox.IdleHibernate])(ctx, e, call("")))(t) // goes on from there
	for _, u := range boxes {
		e.Used("n1", []operations.Use{{UID: u, UnusedFor: time.Minute}})
		e.Used("n2", []operations.Use{{UID: silent, UnusedFor: time.Minute}}) // not its own
	}
	w.eventually("all are at rest", func() bool {
		_, err := w.store.Get(ctx, records.SandboxKey(tenant, boxes[sandbox.IdleDelete]))
		return errs.Has(err, errs.ObjectNotFound) && w.phase(boxes[sandbox.IdlePause]) == sandbox.Paused && w.phase(boxes[sandbox.IdleHibernate]) == sandbox.Hibernated
	})
	if w.phase(boxes[""]) != sandbox.Running || w.phase(silent) != sandbox.Running {
		t.Fatal("another was put to rest")
	}
	bad := sandbox.IdleAction("dream")
	_, err := e.UpdateSandbox(ctx, call(""), operations.UpdateSandbox{UID: silent, OnIdle: &bad})
	wantReason(t, err, errs.InvalidField)
	w.agree(e)
}

func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	every := time.NewTicker(5 * time.Millisecond)
	defer every.Stop()
	for !holds() {
		select {
		case <-every.C:
		case <-ctx.Done():
			w.t.Fatalf("never: %s", what)
		}
	}
}
