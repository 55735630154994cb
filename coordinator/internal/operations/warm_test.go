package operations_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

func templateSpec() warm.TemplateSpec {
	return warm.TemplateSpec{Sandbox: spec(), Setup: []warm.Command{{Argv: []string{"make", "one"}}, {Argv: []string{"make", "two"}}},
		Readiness: warm.Readiness{Argv: []string{"ready"}}}
}

func createTemplate(name string) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.CreateTemplate(ctx, c, operations.CreateTemplate{Name: name, Spec: templateSpec()})
	}
}

func madeTemplate(t *testing.T, e *term) string {
	t.Helper()
	return must(createTemplate("")(context.Background(), e, call("")))(t).Plan.Target
}

func madePool(t *testing.T, e *term, s warm.PoolSpec) string {
	t.Helper()
	op := must(e.CreatePool(context.Background(), call(""), operations.CreatePool{Spec: s}))(t)
	return op.Plan.Target
}

// filledPool is a pool of a new template with so many ready members.
func filledPool(t *testing.T, e *term, size, most int) string {
	t.Helper()
	pool := madePool(t, e, warm.PoolSpec{TemplateUID: madeTemplate(t, e), Size: size, MaxMembers: most})
	e.w.full(pool, size)
	e.w.eventually("all may be claimed", func() bool { return e.Claimable(pool) == size })
	return pool
}

// members are the sandboxes that refer to the pool.
func (w *world) members(pool string) (all []*records.Sandbox) {
	w.t.Helper()
	ctx := context.Background()
	for after := ""; ; {
		h, err := w.store.Referrers(ctx, records.PoolKey(tenant, pool), after, 100)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, holder := range h.Holders {
			rec, err := w.store.Get(ctx, holder.Key)
			if errs.Has(err, errs.ObjectNotFound) {
				continue
			}
			if err != nil {
				w.t.Fatal(err)
			}
			sb, err := records.SandboxOf(rec)
			if err != nil {
				w.t.Fatal(err)
			}
			all = append(all, sb)
		}
		if after = h.Next; after == "" {
			return all
		}
	}
}

func (w *world) ready(pool string) (n int) {
	for _, sb := range w.members(pool) {
		if sb.Pool == pool && sb.PoolReady && sb.Status.Phase == sandbox.Paused {
			n++
		}
	}
	return n
}

// full waits until the pool has exactly so many members, all of them ready, and nothing goes on.
func (w *world) full(pool string, size int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("the pool has %d ready members and no others", size), func() bool {
		return w.ready(pool) == size && len(w.members(pool)) == size && w.quiet()
	})
}

// quiet tells that no operation is pending.
func (w *world) quiet() bool {
	page, err := w.store.List(context.Background(), catalog.Query{Kind: catalog.KindOperation, Phases: []string{string(operations.Pending)}})
	if err != nil {
		w.t.Fatal(err)
	}
	return len(page.Records) == 0
}

func (w *world) pool(u string) *records.Pool {
	w.t.Helper()
	p, err := records.PoolOf(must(w.store.Get(context.Background(), records.PoolKey(tenant, u)))(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func claim(pool, name string, refuse bool) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.ClaimSandbox(ctx, c, operations.ClaimSandbox{PoolUID: pool, Name: name, Refuse: refuse})
	}
}

// given is the sandbox of a claim.
func given(op *operations.Operation) string {
	if len(op.Plan.Copies) > 0 {
		return op.Plan.Copies[0].SandboxUID
	}
	return op.Plan.Target
}

// warmScenes are those of templates and pools, for TestCrashAtEveryBoundary.
func warmScenes() []scene {
	settled := func(w *world) { w.eventually("nothing goes on", w.quiet) }
	refilled := func(size int) func(*world) {
		return func(w *world) {
			page, err := w.store.List(context.Background(), catalog.Query{Kind: catalog.KindPool})
			if err != nil || len(page.Records) != 1 {
				w.t.Fatalf("%d pools, %v", len(page.Records), err)
			}
			w.full(page.Records[0].UID, size)
		}
	}
	return []scene{
		{name: "create a template", setUp: func(*testing.T, *term) run { return createTemplate("golden") }, settle: settled},
		{name: "creating a template fails", want: errs.SetupFailed, setUp: func(_ *testing.T, e *term) run {
			e.w.node.exits = func(p operations.Process) operations.ProcessEnd {
				return operations.ProcessEnd{Code: strings.Count(p.ID, "setup-1"), Tail: "no such thing"}
			}
			return createTemplate("golden")
		}, settle: settled},
		{name: "delete a template", setUp: func(t *testing.T, e *term) run {
			u := madeTemplate(t, e)
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.DeleteTemplate(ctx, c, operations.Delete{UID: u})
			}
		}},
		{name: "fill a pool", setUp: func(t *testing.T, e *term) run {
			w, u := e.w, madeTemplate(t, e)
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				again := isClosed(w.gone)
				op, err := e.CreatePool(ctx, c, operations.CreatePool{Spec: warm.PoolSpec{TemplateUID: u, Size: 2, MaxMembers: 2}})
				if err == nil {
					w.eventually("it is full, or the process died", func() bool { return w.ready(op.Plan.Target) == 2 || !again && isClosed(w.gone) })
				}
				return op, err
			}
		}, settle: refilled(2)},
		{name: "claim", setUp: func(t *testing.T, e *term) run { return claim(filledPool(t, e, 1, 1), "mine", true) }, settle: refilled(1)},
		{name: "claim what cannot be resumed", want: errs.ClaimFailed, fail: refuse("claim", errs.GuestSilent),
			setUp: func(t *testing.T, e *term) run { return claim(filledPool(t, e, 1, 1), "mine", true) }, settle: refilled(1)},
		{name: "claim what cannot be resumed, and the next", setUp: func(t *testing.T, e *term) run {
			pool := filledPool(t, e, 2, 2)
			e.w.node.failing(1)
			return claim(pool, "mine", true)
		}, settle: refilled(2)},
		{name: "claim what cannot be resumed, and a restore", fail: refuse("claim", errs.GuestSilent),
			setUp: func(t *testing.T, e *term) run { return claim(filledPool(t, e, 1, 1), "mine", false) }, settle: refilled(1)},
		{name: "claim cold", setUp: func(t *testing.T, e *term) run {
			u := madeTemplate(t, e)
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.ClaimSandbox(ctx, c, operations.ClaimSandbox{TemplateUID: u, Name: "mine"})
			}
		}},
		{name: "delete a pool", setUp: func(t *testing.T, e *term) run {
			u := filledPool(t, e, 2, 2)
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.DeletePool(ctx, c, operations.Delete{UID: u})
			}
		}, settle: settled},
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestTemplateSaysWhatFailed(t *testing.T) {
	for name, c := range map[string]struct {
		spec warm.TemplateSpec
		exit func(operations.Process) operations.ProcessEnd
		want warm.Failure
	}{
		"set-up": {templateSpec(), func(p operations.Process) operations.ProcessEnd {
			if p.Argv[0] == "make" && p.Argv[1] == "two" {
				return operations.ProcessEnd{Code: 7, Tail: "make: two: no such target"}
			}
			return operations.ProcessEnd{}
		}, warm.Failure{Step: "setup", Index: 1, ExitCode: 7, Tail: "make: two: no such target"}},
		"time": {templateSpec(), func(operations.Process) operations.ProcessEnd {
			return operations.ProcessEnd{Code: 137, TimedOut: true, Tail: "still at it"}
		}, warm.Failure{Step: "setup", ExitCode: 137, TimedOut: true, Tail: "still at it"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			e := w.lead()
			defer e.stop()
			w.node.exits = c.exit
			id := uid.New()
			_, err := e.CreateTemplate(context.Background(), call(id), operations.CreateTemplate{Name: "golden", Spec: c.spec})
			env := wantEnvelope(t, err, errs.SetupFailed)
			if env.Details["step"] != c.want.Step || env.Details["exit_code"] != strconv.Itoa(c.want.ExitCode) || env.Details["output_tail"] != c.want.Tail {
				t.Errorf("%v", env.Details)
			}
			op := must(e.Operation(context.Background(), tenant, id))(t)
			tpl, err := records.TemplateOf(must(w.store.Get(context.Background(), records.TemplateKey(tenant, op.Plan.Target)))(t))
			if err != nil || tpl.Status.Phase != warm.Failed || tpl.Status.Failure == nil || *tpl.Status.Failure != c.want {
				t.Errorf("%+v %v", tpl.Status, err)
			}
			w.agree(e)
			w.node.exits = nil
			must(createTemplate("golden")(context.Background(), e, call("")))(t) // the name is free again
		})
	}
}

func TestTemplateWaitsUntilItIsReady(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	w.node.exits = func(p operations.Process) operations.ProcessEnd {
		if strings.HasPrefix(p.ID, "dormouse-ready-") && p.ID != "dormouse-ready-3" {
			return operations.ProcessEnd{Code: 1}
		}
		return operations.ProcessEnd{}
	}
	op := must(createTemplate("")(context.Background(), e, call("")))(t)
	want := []string{"dormouse-setup-0", "dormouse-setup-1", "dormouse-ready-0", "dormouse-ready-1", "dormouse-ready-2", "dormouse-ready-3"}
	if !slices.Equal(w.node.ran, want) {
		t.Errorf("ran %v", w.node.ran)
	}
	_, err := e.DeleteSnapshot(context.Background(), call(""), operations.Delete{UID: op.Plan.SnapshotUID})
	wantReason(t, err, errs.StillReferenced)
	w.agree(e)
}
