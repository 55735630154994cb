package operations_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
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

func TestPoolsLeaveRoomAndMakeRoom(t *testing.T) {
	w := newWorld(t)
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
