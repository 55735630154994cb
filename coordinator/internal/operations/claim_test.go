package operations_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
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
