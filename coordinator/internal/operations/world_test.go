package operations_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const tenant = "acme"

// world is a catalog and a node that outlive engines.
type world struct {
	t     *testing.T
	store catalog.Store
	node  *fakeNode
	nodes *fakeNodes

	gate *gate // in front of the node's deletions of snapshots; nil is none

	patience time.Duration // how long a placement waits; 0 is hardly at all

	mu     sync.Mutex
	now    func() time.Time
	jitter func()        // called at every boundary
	crash  int           // the boundary to crash at; 0 is never
	passed int           // boundaries passed
	down   chan struct{} // closed at the crash
	gone   chan struct{} // closed when the engine has ended: what waited for it dies too
}

func newWorld(t *testing.T) *world { return newWorldOn(t, memory.New(memory.Options{})) }

// newWorldOn has its catalog in a store, which it closes.
func newWorldOn(t *testing.T, store catalog.Store) *world {
	w := &world{t: t, store: store, down: make(chan struct{}), gone: make(chan struct{})}
	w.node = &fakeNode{name: "n1", sandboxes: map[string]bool{}, snapshots: map[string]bool{}, volumes: map[string]bool{}, paused: map[string]bool{}, asleep: map[string]bool{}, generations: map[string]int64{}, policies: map[string]*sandbox.Egress{}, answers: map[string]answer{}, epoch: 0}
	w.nodes = &fakeNodes{all: []placement.Node{{Name: "n1", Online: true, Allocatable: placement.Resources{CPUMillis: 100_000, MemoryBytes: 1 << 40, DiskBytes: 1 << 40}}}}
	t.Cleanup(func() {
		if err := w.store.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// term is one leadership.
type term struct {
	*operations.Engine
	w     *world
	queue *publish.Queue
}

func (w *world) lead() *term {
	w.t.Helper()
	ctx := context.Background()
	lease, won, err := w.store.Lead(ctx, catalog.Claim{Holder: uid.New(), TTL: time.Hour})
	if err != nil {
		w.t.Fatal(err)
	}
	if !won { // the holder before crashed: its lease ran out
		if err := w.store.Release(ctx, lease.Holder, lease.Epoch); err != nil {
			w.t.Fatal(err)
		}
		if lease, won, err = w.store.Lead(ctx, catalog.Claim{Holder: uid.New(), TTL: time.Hour}); err != nil || !won {
			w.t.Fatal(won, err)
		}
	}
	session, err := w.store.OpenSession(ctx, lease.Epoch, "n1", 0)
	if err != nil {
		w.t.Fatal(err)
	}
	w.node.mu.Lock()
	w.node.epoch = session
	w.node.mu.Unlock()
	queue := publish.New(publish.Options{Store: w.store})
	queue.Start()
	e, err := operations.Start(ctx, operations.Config{Catalog: w.store, Queue: crashingQueue{queue, w}, Agents: gatedAgents{crashingAgents{w.node, w}, w.gate}, Nodes: w.nodes,
		Epoch: lease.Epoch, DeletionsPerNode: storm.width, MaxPending: storm.maxPending, PlacementWait: cmp.Or(w.patience, 20*time.Millisecond), RetryMin: time.Millisecond, RetryMax: 5 * time.Millisecond, Now: w.now})
	if err != nil {
		w.t.Fatal(err)
	}
	return &term{e, w, queue}
}

func (t *term) stop() {
	t.Stop(errs.New(errs.NoLeader, "the term ended"))
	t.queue.Close(context.Background())
}

// boundary is a place where the process may die: it then never gets past it.
func (w *world) boundary(ctx context.Context) error {
	w.mu.Lock()
	w.passed++
	hit := w.crash != 0 && w.passed == w.crash
	jitter := w.jitter
	w.mu.Unlock()
	if jitter != nil {
		jitter()
	}
	if !hit {
		return nil
	}
	close(w.down)
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-w.gone:
		return errCut
	}
}

type crashingQueue struct {
	*publish.Queue
	w *world
}

func (q crashingQueue) Publish(ctx context.Context, build func(context.Context, catalog.Reader) (catalog.Commit, error)) (catalog.Result, error) {
	if err := q.w.boundary(ctx); err != nil {
		return catalog.Result{}, err
	}
	r, err := q.Queue.Publish(ctx, q.w.watchPhases(build))
	if crash := q.w.boundary(ctx); crash != nil {
		return catalog.Result{}, crash
	}
	return r, err
}

// fakeNodes is what placement sees.
type fakeNodes struct {
	all []placement.Node
	mu  sync.Mutex // for who changes them while an engine runs
}

func (n *fakeNodes) Nodes() []placement.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.all)
}

func (n *fakeNodes) change(f func(*placement.Node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.all[0])
}

func (n *fakeNodes) Changed() <-chan struct{} { return nil }
func (n *fakeNodes) Cordon(name string, cordoned bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.all {
		if n.all[i].Name == name {
			n.all[i].Cordoned = cordoned
		}
	}
}

// fakeNode holds what a node holds, and answers a command id as it did before.
type fakeNode struct {
	name string

	mu        sync.Mutex
	epoch     fence.Epoch
	sandboxes map[string]bool
	snapshots map[string]bool
	volumes   map[string]bool
	paused    map[string]bool
	asleep    map[string]bool
	// generations and policies are those that the node has in force.
	generations map[string]int64
	policies    map[string]*sandbox.Egress
	answers     map[string]answer
	calls       []string
	fail        func(verb, uid string) error // a final answer of the node
	away        func(verb string) error      // before anything is done
	number      uint64
	hold        chan struct{} // StartSandbox waits for it, or for the end of its call
	secrets     map[string]string
	full        map[string]bool // nodes, this one or others that are only names, that refuse what starts
	claims      []string        // what was claimed, in order
	ran         []string        // processes, by id
	exits       func(operations.Process) operations.ProcessEnd
}

type answer struct {
	obs operations.Observation
	err error
}

func (n *fakeNode) do(ctx context.Context, c operations.Command, verb, u string, effect func()) (answer, fence.Epoch, error) {
	n.mu.Lock()
	hold := n.hold
	n.mu.Unlock()
	if hold != nil && verb == "start" {
		select {
		case <-hold:
		case <-ctx.Done():
			return answer{}, 0, ctx.Err()
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls = append(n.calls, c.ID)
	if n.away != nil {
		if err := n.away(verb); err != nil {
			return answer{}, n.epoch, err
		}
	}
	if a, ok := n.answers[c.ID]; ok {
		a.obs.Session = n.epoch
		return a, n.epoch, a.err
	}
	var a answer
	if n.fail != nil {
		a.err = n.fail(verb, u)
	}
	if a.err == nil {
		effect()
	}
	n.number++
	phase := sandbox.Running
	switch {
	case n.paused[u]:
		phase = sandbox.Paused
	case n.asleep[u]:
		phase = sandbox.Hibernated
	}
	a.obs = operations.Observation{UID: u, Tenant: c.Tenant, Phase: phase, ObservedGeneration: n.generations[u], ImageDigest: "sha256:image", Number: n.number, Session: n.epoch}
	n.answers[c.ID] = a
	return a, n.epoch, a.err
}

func set(m map[string]bool, u string) func()   { return func() { m[u] = true } }
func unset(m map[string]bool, u string) func() { return func() { delete(m, u) } }

// crashingAgents is the node with boundaries around each call.
type crashingAgents struct {
	n *fakeNode
	w *world
}

func (a crashingAgents) do(ctx context.Context, c operations.Command, verb, u string, effect func()) (answer, fence.Epoch, error) {
	if err := a.w.boundary(ctx); err != nil {
		return answer{}, 0, err
	}
	got, epoch, err := a.n.do(ctx, c, verb, u, effect)
	if crash := a.w.boundary(ctx); crash != nil {
		return answer{}, 0, crash
	}
	return got, epoch, err
}

func (a crashingAgents) StartSandbox(ctx context.Context, node string, c operations.Command, sb *records.Sandbox, secrets map[string]string) (operations.Observation, error) {
	if a.n.full[node] {
		err := errors.Join(a.w.boundary(ctx), errs.New(errs.OutOfMemory, "64Mi of memory is asked, the node can give 1Mi").With("resource", "memory").With("asked", "64").With("left", "1"))
		return operations.Observation{}, err
	}
	got, _, err := a.do(ctx, c, "start", sb.UID, func() {
		a.n.sandboxes[sb.UID] = true
		a.n.govern(sb.UID, sb.Generation, sb.Spec.Egress)
		a.n.secrets = secrets
	})
	return got.obs, err
}

func (a crashingAgents) RestoreSandbox(ctx context.Context, _ string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "restore", sb.UID, func() {
		if !a.n.snapshots[sb.SourceSnapshot] {
			panic("a restore without its artefact")
		}
		for _, m := range sb.Spec.Volumes {
			if !a.n.volumes[m.VolumeUID] {
				panic("a restore without its volume")
			}
		}
		a.n.sandboxes[sb.UID] = true
		if sb.Pool != "" { // it is parked
			a.n.paused[sb.UID] = true
		}
		a.n.govern(sb.UID, sb.Generation, sb.Spec.Egress)
	})
	got.obs.RestoredFrom = sb.SourceSnapshot
	return got.obs, err
}

// govern wants the lock.
func (n *fakeNode) govern(u string, generation int64, egress *sandbox.Egress) {
	if generation >= n.generations[u] {
		n.generations[u], n.policies[u] = generation, egress
	}
}

func (a crashingAgents) UpdateSandbox(ctx context.Context, _ string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "update", sb.UID, func() { a.n.govern(sb.UID, sb.NodeGeneration, sb.Spec.Egress) })
	return got.obs, err
}

func (a crashingAgents) DeleteSandbox(ctx context.Context, _ string, c operations.Command, u string) (fence.Epoch, error) {
	_, e, err := a.do(ctx, c, "delete", u, unset(a.n.sandboxes, u))
	return e, err
}

func (a crashingAgents) CheckpointSandbox(ctx context.Context, _ string, c operations.Command, u, snap string) (snapshot.Status, fence.Epoch, error) {
	_, e, err := a.do(ctx, c, "checkpoint", snap, set(a.n.snapshots, snap))
	return snapshot.Status{SizeBytes: 7, ImageDigest: "sha256:image", Freeze: 5 * time.Millisecond}, e, err
}

func (a crashingAgents) PauseSandbox(ctx context.Context, _ string, c operations.Command, u string, _ time.Duration) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "pause", u, func() { a.n.paused[u] = true })
	return got.obs, err
}

func (a crashingAgents) HibernateSandbox(ctx context.Context, _ string, c operations.Command, u string, _ time.Duration) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "hibernate", u, func() {
		delete(a.n.paused, u)
		a.n.asleep[u] = true
	})
	return got.obs, err
}

func (a crashingAgents) ResumeSandbox(ctx context.Context, _ string, c operations.Command, u string) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "resume", u, func() {
		delete(a.n.paused, u)
		delete(a.n.asleep, u)
	})
	return got.obs, err
}

func (a crashingAgents) ClaimSandbox(ctx context.Context, _ string, c operations.Command, sb *records.Sandbox, _ map[string]string) (operations.Observation, error) {
	got, _, err := a.do(ctx, c, "claim", sb.UID, func() {
		if !a.n.paused[sb.UID] {
			panic("a claim of what does not stand still")
		}
		delete(a.n.paused, sb.UID)
		a.n.claims = append(a.n.claims, sb.UID)
	})
	return got.obs, err
}

func (a crashingAgents) RunProcess(ctx context.Context, _ string, c operations.Command, u string, p operations.Process) (end operations.ProcessEnd, err error) {
	_, _, err = a.do(ctx, c, "setup", u, func() { a.n.ran = append(a.n.ran, p.ID) })
	a.n.mu.Lock()
	defer a.n.mu.Unlock()
	if a.n.exits != nil && err == nil {
		end = a.n.exits(p)
	}
	return end, err
}

func (a crashingAgents) DeleteSnapshot(ctx context.Context, _ string, c operations.Command, u string) (fence.Epoch, error) {
	_, e, err := a.do(ctx, c, "delete-snapshot", u, unset(a.n.snapshots, u))
	return e, err
}

func (a crashingAgents) CreateVolume(ctx context.Context, _ string, c operations.Command, u string, _ int64, source, _ string) (int64, fence.Epoch, error) {
	_, e, err := a.do(ctx, c, "volume", u, set(a.n.volumes, u))
	return 1, e, err
}

func (a crashingAgents) DeleteVolume(ctx context.Context, _ string, c operations.Command, u string) (fence.Epoch, error) {
	_, e, err := a.do(ctx, c, "delete-volume", u, unset(a.n.volumes, u))
	return e, err
}

// agree checks that the records, the node and the ledger say the same.
func (w *world) agree(t *term) {
	w.t.Helper()
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	var running []string
	for _, c := range []struct {
		kind    catalog.Kind
		on      map[string]bool
		present func(catalog.Record) bool
	}{
		{catalog.KindSandbox, w.node.sandboxes, func(r catalog.Record) bool {
			switch sandbox.Phase(r.Phase) {
			case sandbox.Running:
				return !w.node.paused[r.UID] && !w.node.asleep[r.UID]
			case sandbox.Paused:
				return w.node.paused[r.UID]
			}
			return r.Phase == string(sandbox.Hibernated) && w.node.asleep[r.UID]
		}},
		{catalog.KindSnapshot, w.node.snapshots, func(r catalog.Record) bool { return r.Phase == string(snapshot.Ready) }},
		{catalog.KindVolume, w.node.volumes, func(r catalog.Record) bool { return r.Phase == "Ready" }},
	} {
		page, err := w.store.List(context.Background(), catalog.Query{Kind: c.kind, PageSize: catalog.MaxPage})
		if err != nil {
			w.t.Fatal(err)
		}
		var recorded []string
		for _, r := range page.Records {
			if c.present(r) {
				recorded = append(recorded, r.UID)
			} else if r.Phase != string(sandbox.Failed) || len(r.Refs) > 0 || r.Name != "" {
				w.t.Errorf("%s is left in phase %s with name %q and refs %v", r.Key, r.Phase, r.Name, r.Refs)
			}
		}
		slices.Sort(recorded)
		if there := slices.Sorted(maps.Keys(c.on)); !slices.Equal(recorded, there) {
			w.t.Errorf("%s: recorded %v, on the node %v", c.kind, recorded, there)
		}
		if c.kind == catalog.KindSandbox {
			running = slices.DeleteFunc(recorded, func(u string) bool { return w.node.asleep[u] }) // what is hibernated takes no room
		}
	}
	// The ledger follows the records a moment later.
	w.eventually(fmt.Sprintf("the ledger has what runs, %v", running), func() bool { return slices.Equal(t.PlacedUIDs("n1"), running) })
	if got := t.PlacedUIDs("n1"); !slices.Equal(got, running) {
		w.t.Errorf("the ledger has %v, running are %v", got, running)
	}
}

func spec(volumes ...string) sandbox.Spec {
	s := sandbox.Spec{Image: "registry.test/base:1"}
	for i, v := range volumes {
		s.Volumes = append(s.Volumes, sandbox.VolumeMount{VolumeUID: v, Path: fmt.Sprintf("/data%d", i)})
	}
	return s
}

func call(id string) operations.Call { return operations.Call{Tenant: tenant, OperationID: id} }

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

var errCut = errors.New("the connection was cut")
