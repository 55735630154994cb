package operations_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

func TestB15_AMemberGoesToOneOfManyClaims(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 8, 8)
	var mu sync.Mutex
	var got []string
	var refused int
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			op, err := claim(pool, "", true)(context.Background(), e, call(uid.New()))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				got = append(got, given(op))
			case errs.Has(err, errs.PoolEmpty):
				refused++
				env := errs.From(err)
				for _, k := range []string{"ready", "filling", "size", "pool", "template"} {
					if env.Details[k] == "" {
						t.Errorf("%v does not tell %s", env.Details, k)
					}
				}
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	slices.Sort(got)
	if n := len(slices.Compact(slices.Clone(got))); n != len(got) || n < 8 {
		t.Errorf("%d claims got %d sandboxes", len(got), n)
	}
	if len(got)+refused != 100 {
		t.Errorf("%d got one, %d none", len(got), refused)
	}
	w.full(pool, 8)
	w.agree(e)
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	claims := slices.Sorted(slices.Values(w.node.claims))
	if !slices.Equal(claims, got) {
		t.Errorf("the node resumed %v, given were %v", claims, got)
	}
}

func TestB15_OneNameHasOneWinner(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 4, 4)
	var won atomic.Int32
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			_, err := claim(pool, "the-name", i%2 == 0)(context.Background(), e, call(uid.New()))
			switch {
			case err == nil:
				won.Add(1)
			case errs.Has(err, errs.NameTaken), errs.Has(err, errs.PoolEmpty):
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := won.Load(); n != 1 {
		t.Errorf("%d won", n)
	}
	w.full(pool, 4)
	w.agree(e)
	if n := len(w.node.claims); n > 1 {
		t.Errorf("the node resumed %d", n)
	}
}

func TestAClaimHasItsOwnSettings(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	s := templateSpec()
	s.Sandbox.Lifetime, s.Sandbox.IdleTimeout, s.Sandbox.WakeOnUse = time.Hour, time.Minute, true
	tpl := must(e.CreateTemplate(context.Background(), call(""), operations.CreateTemplate{Spec: s}))(t).Plan.Target
	pool := madePool(t, e, warm.PoolSpec{TemplateUID: tpl, Size: 2})
	w.full(pool, 2)
	if m := w.members(pool)[0]; m.Spec.Lifetime != 0 || m.Spec.IdleTimeout != 0 {
		t.Errorf("time goes by for a member: %+v", m.Spec)
	}
	idle, off := time.Duration(0), false
	op := must(e.ClaimSandbox(context.Background(), call(""), operations.ClaimSandbox{TemplateUID: tpl, Name: "box", Labels: map[string]string{"a": "b"}, Idle: &idle, WakeOnUse: &off}))(t)
	sb := op.Result.Sandboxes[0]
	if sb.Name != "box" || sb.Labels["a"] != "b" || sb.Spec.Lifetime != time.Hour || sb.Spec.IdleTimeout != 0 || sb.Spec.WakeOnUse || sb.ClaimedFrom != pool ||
		sb.Status.Phase != sandbox.Running || !sb.Created.Equal(op.Created) || sb.Generation != 2 {
		t.Errorf("%+v", sb)
	}
	w.eventually("the claim is counted", func() bool { return w.pool(pool).Status.Claimed == 1 })
}

// failing has the node fail to resume so many of the members that are claimed, each for good.
func (n *fakeNode) failing(count int) {
	bad := make(map[string]bool)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail = func(verb, u string) error {
		if verb != "claim" || !bad[u] && len(bad) == count {
			return nil
		}
		bad[u] = true
		return errs.New(errs.GuestSilent, "no").With("uid", u)
	}
}

// claimed are the sandboxes that the catalog has of a claim.
func (w *world) claimed(op *operations.Operation) (all []string) {
	w.t.Helper()
	page, err := w.store.List(context.Background(), catalog.Query{Kind: catalog.KindSandbox, PageSize: catalog.MaxPage})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range page.Records {
		if sb := must(records.SandboxOf(r))(w.t); sb.OperationID == op.ID {
			all = append(all, sb.UID)
		}
	}
	return all
}

func TestAClaimIsGivenTheNextMember(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 4, 4)
	w.node.failing(2)
	c := call(uid.New())
	op := must(claim(pool, "mine", true)(context.Background(), e, c))(t)
	sb := op.Result.Sandboxes[0]
	if len(op.Plan.Lost) != 2 || len(op.Plan.Copies) != 0 || sb.UID != op.Plan.Target || sb.Name != "mine" || sb.ClaimedFrom != pool || sb.Status.Phase != sandbox.Running {
		t.Fatalf("%+v: %+v", op.Plan, sb)
	}
	for _, l := range op.Plan.Lost {
		if l.SandboxUID == sb.UID || l.Why.Reason != errs.ClaimFailed || l.Why.Details["cause"] != string(errs.GuestSilent) {
			t.Errorf("%+v", l)
		}
		if _, err := w.store.Get(context.Background(), records.SandboxKey(tenant, l.SandboxUID)); !errs.Has(err, errs.ObjectNotFound) {
			t.Errorf("what was lost is still there: %v", err)
		}
	}
	again := must(claim(pool, "mine", true)(context.Background(), e, c))(t)
	if given(again) != sb.UID {
		t.Errorf("asked again it gave %s, not %s", given(again), sb.UID)
	}
	if got := w.claimed(op); !slices.Equal(got, []string{sb.UID}) {
		t.Errorf("the claim has %v", got)
	}
	w.full(pool, 4)
	w.agree(e)
}

func TestAClaimIsGivenARestoreAfterAFewMembers(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 6, 6)
	w.node.failing(100)
	op := must(claim(pool, "mine", false)(context.Background(), e, call(uid.New())))(t)
	sb := op.Result.Sandboxes[0]
	if len(op.Plan.Lost) != 3 || len(op.Plan.Copies) != 1 || sb.UID != op.Plan.Copies[0].SandboxUID || sb.Name != "mine" || sb.Status.Phase != sandbox.Running {
		t.Fatalf("%+v: %+v", op.Plan, sb)
	}
	_, err := claim(pool, "other", true)(context.Background(), e, call(uid.New()))
	env := errs.From(err)
	if env.Reason != errs.ClaimFailed || env.Details["cause"] != string(errs.GuestSilent) || env.Details["instead"] != string(errs.PoolEmpty) || env.Details["lost"] == "" || env.Details["uid"] == "" {
		t.Errorf("%v %v", env, env.Details)
	}
	if n := len(w.node.claims); n != 0 {
		t.Errorf("%d were resumed", n)
	}
	w.full(pool, 6)
	w.agree(e)
}

// While members fail, each of many claims gets one sandbox, or none, and no sandbox is given twice.
func TestB15_ManyClaimsWhileMembersFail(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 8, 8)
	w.node.failing(5)
	var mu sync.Mutex
	var ops []*operations.Operation
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			op, err := claim(pool, "", i%2 == 0)(context.Background(), e, call(uid.New()))
			switch {
			case err == nil:
				mu.Lock()
				defer mu.Unlock()
				ops = append(ops, op)
			case errs.Has(err, errs.PoolEmpty), errs.Has(err, errs.ClaimFailed):
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := make(map[string]bool)
	for _, op := range ops {
		u := given(op)
		if got := w.claimed(op); seen[u] || !slices.Equal(got, []string{u}) {
			t.Errorf("the claim was given %s and has %v", u, got)
		}
		seen[u] = true
	}
	w.full(pool, 8)
	w.agree(e)
}
