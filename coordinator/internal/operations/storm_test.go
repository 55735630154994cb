package operations_test

import (
	"context"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// storm is how narrow engines of this package's tests are: enough for all of them, and soon full.
var storm = struct{ width, maxPending int }{2, 128}

// gate lets the node's deletions of snapshots through when it is told to, and counts those that wait there.
type gate struct {
	mu     sync.Mutex
	open   chan struct{}
	at     int // how many wait there
	most   int
	begun  int
	reply  error // what the node answers for one uid
	refuse string
}

func newGate() *gate { return &gate{open: make(chan struct{})} }

func (g *gate) pass(ctx context.Context, u string) error {
	g.mu.Lock()
	g.at++
	g.most = max(g.most, g.at)
	g.begun++
	open, reply := g.open, g.reply
	refused := u == g.refuse
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.at--
	}()
	if refused {
		return reply
	}
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *gate) look() (at, most, begun int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.at, g.most, g.begun
}

// gatedAgents is the node behind a gate.
type gatedAgents struct {
	crashingAgents
	gate *gate
}

func (a gatedAgents) DeleteSnapshot(ctx context.Context, node string, c operations.Command, u string) (fence.Epoch, error) {
	if a.gate != nil {
		if err := a.gate.pass(ctx, u); err != nil {
			return 0, err
		}
	}
	return a.crashingAgents.DeleteSnapshot(ctx, node, c, u)
}

// snapshots makes some of a tenant.
func (w *world) snapshots(t *testing.T, e *term, tenant string, n int) []string {
	t.Helper()
	ctx := context.Background()
	box := must(e.CreateSandbox(ctx, operations.Call{Tenant: tenant}, operations.CreateSandbox{Spec: spec()}))(t).Plan.Copies[0].SandboxUID
	var all []string
	for range n {
		op := must(e.CheckpointSandbox(ctx, operations.Call{Tenant: tenant}, operations.CheckpointSandbox{UID: box}))(t)
		all = append(all, op.Plan.SnapshotUID)
	}
	return all
}

// deletions asks for the deletion of each, at the same time, and gives what became of them.
func deletions(e *term, tenant string, uids []string) <-chan error {
	ended := make(chan error, len(uids))
	for _, u := range uids {
		go func() {
			_, err := e.DeleteSnapshot(context.Background(), operations.Call{Tenant: tenant, OperationID: uid.New()}, operations.Delete{UID: u})
			ended <- err
		}()
	}
	return ended
}

func pending(e *term) operations.Deletion { return e.Deletions()[0] }

// A tenant that deletes many snapshots at once holds a node's disk with no more than its width, and delays nothing else.
func TestDeletionStormIsPaced(t *testing.T) {
	w := newWorld(t)
	w.gate = newGate()
	e := w.lead()
	ctx := context.Background()
	const many = 30
	mine, other := w.snapshots(t, e, tenant, many), w.snapshots(t, e, "other", 1)
	stormed := deletions(e, tenant, mine)
	w.eventually("all are pending, and the width is used", func() bool {
		d := pending(e)
		at, _, _ := w.gate.look()
		return d.Pending == many && d.Active == storm.width && at == storm.width
	})
	if d := pending(e); d.Kind != catalog.KindSnapshot || d.Oldest.IsZero() || d.Ended != 0 {
		t.Errorf("progress: %+v", d)
	}
	// Whatever else goes on meanwhile, also for the same tenant on the same node.
	box := madeSandbox(t, e)
	kept := madeSnapshot(t, e, box)
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: box}))(t)

	late := deletions(e, "other", other)
	w.eventually("the other's is in line", func() bool { return pending(e).Pending == many+1 })
	close(w.gate.open)
	if err := <-late; err != nil {
		t.Fatal(err)
	}
	_, most, _ := w.gate.look()
	if most > storm.width {
		t.Errorf("%d deletions at the node at once", most)
	}
	for range many {
		if err := <-stormed; err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("progress says so", func() bool { d := pending(e); return d.Pending == 0 && d.Oldest.IsZero() && d.Ended == many+1 })
	w.node.mu.Lock()
	left := len(w.node.snapshots)
	there := w.node.snapshots[kept]
	w.node.mu.Unlock()
	if left != 1 || !there {
		t.Errorf("%d artefacts are left, the one that was kept: %v", left, there)
	}
	e.stop()
}

// A storm that a coordinator leaves behind is brought to its end by the next one, at the same pace; nothing is deleted twice
// in a way that shows, nothing is forgotten.
func TestDeletionStormSurvivesTheCoordinator(t *testing.T) {
	w := newWorld(t)
	w.gate = newGate()
	e := w.lead()
	const many = 30
	mine := w.snapshots(t, e, tenant, many)
	stormed := deletions(e, tenant, mine)
	w.eventually("all are pending", func() bool { return pending(e).Pending == many && pending(e).Active == storm.width })
	e.stop()
	for range many {
		wantReason(t, <-stormed, errs.NoLeader)
	}
	e = w.lead()
	w.eventually("the next leader has them all", func() bool { return pending(e).Pending == many && pending(e).Active == storm.width })
	close(w.gate.open)
	w.eventually("they are gone", func() bool { return pending(e).Pending == 0 })
	if _, most, _ := w.gate.look(); most > storm.width {
		t.Errorf("%d deletions at the node at once", most)
	}
	for _, u := range mine {
		if _, err := w.store.Tombstone(context.Background(), catalog.Key{Tenant: tenant, Kind: catalog.KindSnapshot, UID: u}); err != nil {
			t.Error(err)
		}
	}
	w.agree(e)
	e.stop()
}

// What a node does not delete holds no turn while it is not tried, so that the rest goes on.
func TestStuckDeletionLetsOthersPass(t *testing.T) {
	w := newWorld(t)
	w.gate = newGate()
	e := w.lead()
	all := w.snapshots(t, e, tenant, 2+2*storm.width)
	w.gate.refuse, w.gate.reply = all[0], errs.New(errs.StillReferenced, "it is being restored")
	close(w.gate.open)
	stuck := deletions(e, tenant, all[:1])
	w.eventually("it was refused", func() bool { _, _, begun := w.gate.look(); return begun > 2 })
	rest := deletions(e, tenant, all[1:])
	for range all[1:] {
		if err := <-rest; err != nil {
			t.Fatal(err)
		}
	}
	if d := pending(e); d.Pending != 1 {
		t.Errorf("%d pending", d.Pending)
	}
	w.gate.mu.Lock()
	w.gate.refuse = ""
	w.gate.mu.Unlock()
	if err := <-stuck; err != nil {
		t.Fatal(err)
	}
	w.agree(e)
	e.stop()
}

// Deletions fill a part of what may be pending, those of one tenant a smaller one; the rest is for others.
func TestDeletionsAreAPartOfWhatMayBePending(t *testing.T) {
	w := newWorld(t)
	w.gate = newGate()
	e := w.lead()
	share := storm.maxPending / 4
	mine := w.snapshots(t, e, tenant, share+1)
	stormed := deletions(e, tenant, mine[:share])
	w.eventually("the share is used", func() bool { return pending(e).Pending == share })
	env := wantEnvelope(t, <-deletions(e, tenant, mine[share:]), errs.QueueFull)
	if env.Outcome != errs.NotStarted || env.Details["resource"] != "deletions" {
		t.Errorf("%+v", env)
	}
	more := w.snapshots(t, e, "other", share+1)
	alsoStormed := deletions(e, "other", more[:share])
	w.eventually("half is used", func() bool { return pending(e).Pending == 2*share })
	third := w.snapshots(t, e, "third", 1) // creations and checkpoints are accepted
	wantReason(t, <-deletions(e, "third", third), errs.QueueFull)
	close(w.gate.open)
	for range share {
		if err := errs.From(<-stormed); err != nil {
			t.Fatal(err)
		}
		if err := errs.From(<-alsoStormed); err != nil {
			t.Fatal(err)
		}
	}
	for tenant, left := range map[string]string{tenant: mine[share], "other": more[share], "third": third[0]} {
		if err := <-deletions(e, tenant, []string{left}); err != nil {
			t.Fatal(err)
		}
	}
	e.stop()
}

// full is a catalog that never runs out of expired tombstones.
type full struct {
	catalog.Store
	calls int
}

func (f *full) Compact(_ context.Context, limit int) (int, error) {
	f.calls++
	return limit, nil
}

// C28: one pass forgets a bounded number of tombstones, a page at a time.
func TestC28OnePassForgetsABoundedNumber(t *testing.T) {
	store := &full{Store: memory.New(memory.Options{})}
	w := newWorldOn(t, store)
	e := w.lead()
	defer e.stop()
	if err := e.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	if store.calls != 40 {
		t.Errorf("%d pages of %d in one pass", store.calls, catalog.MaxPage)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Sweep(ctx); err == nil || store.calls > 41 {
		t.Errorf("a pass that was cancelled: %v, %d pages", err, store.calls-40)
	}
}
