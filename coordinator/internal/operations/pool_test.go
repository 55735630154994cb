package operations_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// Claims, failures and deletions go on while the pool is filled; whenever anything is committed there are no more members than the budget allows.
func TestPoolNeverPassesItsBudget(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	tpl := madeTemplate(t, e)
	const most = 6
	pool := madePool(t, e, warm.PoolSpec{TemplateUID: tpl, Size: 5, MaxMembers: 20, MaxMemoryBytes: most * sandbox.DefaultMemoryRequestBytes})
	var seen atomic.Int64
	w.mu.Lock()
	w.jitter = func() {
		h, err := w.store.Referrers(context.Background(), records.PoolKey(tenant, pool), "", 1)
		if err == nil && h.Count > most {
			t.Errorf("%d members", h.Count)
		}
		seen.Add(1)
	}
	w.mu.Unlock()
	var tries atomic.Int64
	w.node.mu.Lock()
	w.node.fail = func(verb, _ string) error {
		if n := tries.Add(1); (verb == "claim") && n%3 == 0 {
			return errs.New(errs.GuestSilent, "no")
		}
		return nil
	}
	w.node.mu.Unlock()
	w.full(pool, 5)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				op, err := claim(pool, "", true)(context.Background(), e, call(uid.New()))
				if err == nil {
					_, err = e.DeleteSandbox(context.Background(), call(""), operations.Delete{UID: given(op)})
				}
				if err != nil && !errs.Has(err, errs.PoolEmpty) && !errs.Has(err, errs.ClaimFailed) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	w.full(pool, 5)
	w.agree(e)
	if seen.Load() < 100 {
		t.Errorf("looked %d times only", seen.Load())
	}
}

func TestPoolOfATemplateKeepsIt(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	pool := filledPool(t, e, 1, 1)
	tpl := w.pool(pool).Spec.TemplateUID
	_, err := e.DeleteTemplate(context.Background(), call(""), operations.Delete{UID: tpl})
	wantReason(t, err, errs.StillReferenced)
	must(e.DeletePool(context.Background(), call(""), operations.Delete{UID: pool}))(t)
	must(e.DeleteTemplate(context.Background(), call(""), operations.Delete{UID: tpl}))(t)
	w.agree(e)
	if len(w.node.sandboxes)+len(w.node.snapshots) != 0 {
		t.Errorf("left are %v %v", w.node.sandboxes, w.node.snapshots)
	}
}

func TestMembersAreNobodysToUse(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	u := w.members(filledPool(t, e, 1, 1))[0].UID
	ctx := context.Background()
	for name, do := range map[string]run{
		"pause": pause(u), "hibernate": hibernate(u), "resume": resume(u),
		"delete": func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
			return e.DeleteSandbox(ctx, c, operations.Delete{UID: u})
		},
		"checkpoint": func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
			return e.CheckpointSandbox(ctx, c, operations.CheckpointSandbox{UID: u})
		},
		"fork": func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
			return e.ForkSandbox(ctx, c, operations.ForkSandbox{SandboxUID: u})
		},
		"update": func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
			return e.UpdateSandbox(ctx, c, operations.UpdateSandbox{UID: u, Labels: &map[string]string{"a": "b"}})
		},
	} {
		_, err := do(ctx, e, call(""))
		if !errs.Has(err, errs.ObjectNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPoolsLeaveRoomAndMakeRoom(t *testing.T) {
	w := newWorld(t)
	w.patience = time.Minute
	w.nodes.change(func(n *placement.Node) {
		n.Allocatable = placement.Resources{CPUMillis: 1000, MemoryBytes: 1 << 40, DiskBytes: 1 << 40} // ten sandboxes, nine of them a pool's
	})
	e := w.lead()
	defer e.stop()
	tpl := madeTemplate(t, e)
	pool := madePool(t, e, warm.PoolSpec{TemplateUID: tpl, Size: 12})
	reason := func() string {
		for _, c := range w.pool(pool).Status.Conditions {
			if c.Type == "Filled" {
				return c.Reason
			}
		}
		return ""
	}
	w.eventually("the pool takes what the node can spare", func() bool { return w.ready(pool) == 9 && reason() == "NoCapacity" })
	// One fits beside them; for the second one the pool gives way.
	first := madeSandbox(t, e)
	second := madeSandbox(t, e)
	for _, u := range []string{first, second} {
		if sb := must(w.store.Get(context.Background(), records.SandboxKey(tenant, u)))(t); sb.Phase != string(sandbox.Running) {
			t.Errorf("%s is %s", u, sb.Phase)
		}
	}
	w.eventually("the pool has less", func() bool { return w.ready(pool) < 9 })
}

func TestPoolDrains(t *testing.T) {
	for name, c := range map[string]struct{ begin, end func(*placement.Node) }{
		"a cordon":               {func(n *placement.Node) { n.Cordoned = true }, func(n *placement.Node) { n.Cordoned = false }},
		"memory that gets short": {func(n *placement.Node) { n.Short = true }, func(n *placement.Node) { n.Short = false }},
		"pressure":               {func(n *placement.Node) { n.Problems = map[string]string{"MemoryPressure": "little is left"} }, func(n *placement.Node) { n.Problems = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			e := w.lead()
			defer e.stop()
			pool := filledPool(t, e, 6, 6)
			w.nodes.change(c.begin)
			w.full(pool, 0)
			w.nodes.change(c.end)
			w.full(pool, 6)
			w.agree(e)
		})
	}
	t.Run("another template", func(t *testing.T) {
		w := newWorld(t)
		e := w.lead()
		defer e.stop()
		pool, other := filledPool(t, e, 3, 4), madeTemplate(t, e)
		must(e.UpdatePool(context.Background(), call(""), operations.UpdatePool{UID: pool, Template: &other}))(t)
		w.eventually("all members are of the new template", func() bool {
			ms := w.members(pool)
			return len(ms) == 3 && w.ready(pool) == 3 && !slices.ContainsFunc(ms, func(sb *records.Sandbox) bool { return sb.PoolTemplate != other }) && w.quiet()
		})
		w.agree(e)
	})
	t.Run("a smaller size", func(t *testing.T) {
		w := newWorld(t)
		e := w.lead()
		defer e.stop()
		pool, size := filledPool(t, e, 5, 5), 2
		must(e.UpdatePool(context.Background(), call(""), operations.UpdatePool{UID: pool, Size: &size}))(t)
		w.full(pool, 2)
		w.agree(e)
	})
}

func TestPoolBacksOffWhenMembersFail(t *testing.T) {
	w := newWorld(t)
	var offset atomic.Int64
	w.now = func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }
	e := w.lead()
	defer e.stop()
	tpl := madeTemplate(t, e)
	var restores atomic.Int64
	w.node.mu.Lock()
	w.node.fail = func(verb, _ string) error {
		if verb != "restore" {
			return nil
		}
		restores.Add(1)
		return errs.New(errs.ArtefactDamaged, "the image is damaged")
	}
	w.node.mu.Unlock()
	pool := madePool(t, e, warm.PoolSpec{TemplateUID: tpl, Size: 2})
	w.eventually("the failure is known", func() bool {
		st := w.pool(pool).Status
		return st.Failures > 0 && strings.Contains(st.LastError, "damaged") && w.quiet()
	})
	before := w.pool(pool).Status.Failures
	for before < 4 { // each wait is longer than the one before
		offset.Add(int64(warm.Pause(before)))
		w.eventually("it is tried again", func() bool { return w.pool(pool).Status.Failures > before && w.quiet() })
		before = w.pool(pool).Status.Failures
	}
	w.node.mu.Lock()
	w.node.fail = nil
	w.node.mu.Unlock()
	offset.Add(int64(warm.Pause(before)))
	w.full(pool, 2)
	w.eventually("the failures are over", func() bool { return w.pool(pool).Status.Failures == 0 })
	w.agree(e)
}
