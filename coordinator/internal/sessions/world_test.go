package sessions_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenant = "acme"
	node   = "n1"
)

// world is a coordinator's engine and registry on a store whose reads can be made to fail. Its node is
// the test, over real gRPC.
type world struct {
	*testing.T
	store    *store
	queue    *publish.Queue
	engine   *operations.Engine
	registry *sessions.Registry
	agents   *agents
	epoch    fence.Epoch
	client   nodev1.SessionServiceClient
	observed chan error // what became of each observation

	mu        sync.Mutex
	inventory *nodev1.GetInventoryResponse
	unread    error // of asking for the inventory
	asked     atomic.Int64
	second    *nodev1.GetInventoryResponse    // another page; nil is none
	traces    map[string]*nodev1.JournalEntry // what the node's journal keeps, by key
	torn      error                           // of reading it
}

func newWorld(t *testing.T) *world { return newWorldWith(t, time.Hour) }

// newWorldWith looks for orphans so often.
func newWorldWith(t *testing.T, orphansEvery time.Duration) *world {
	t.Helper()
	w := &world{T: t, store: &store{Store: memory.New(memory.Options{})}, agents: &agents{}, observed: make(chan error, 64), inventory: &nodev1.GetInventoryResponse{}}
	lease, won, err := w.store.Lead(t.Context(), catalog.Claim{Holder: uid.New(), TTL: time.Hour})
	if err != nil || !won {
		t.Fatal(won, err)
	}
	w.epoch = lease.Epoch
	w.queue = publish.New(publish.Options{Store: w.store})
	w.queue.Start()
	w.registry = sessions.New(sessions.Config{Store: w.store, Queue: w.queue, Heartbeat: time.Minute, Inventory: w.ask,
		Trace: w.trace, OrphansEvery: orphansEvery, OrphanGrace: time.Nanosecond,
		PeerNode: func(context.Context) (string, error) { return node, nil }})
	w.agents.registry = w.registry
	w.engine, err = operations.Start(context.Background(), operations.Config{Catalog: w.store, Queue: w.queue, Agents: w.agents, Nodes: w.registry,
		Epoch: w.epoch, RetryMin: time.Millisecond, RetryMax: 5 * time.Millisecond})
	w.ok(err)
	w.ok(w.registry.Lead(t.Context()))
	w.registry.Accept(context.Background(), w.epoch, watched{w.engine, w.observed}, nil)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	w.ok(err)
	// A session is read from for a moment after its handler returned, so nothing may wrap its stream.
	server := grpc.NewServer(grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return wire.ToStatus(next(srv, ss), "", "").Err()
	}))
	nodev1.RegisterSessionServiceServer(server, w.registry)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	cc, err := grpc.NewClient("unix:"+socket, append(wire.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	w.ok(err)
	w.client = nodev1.NewSessionServiceClient(cc)
	t.Cleanup(func() {
		over := errs.New(errs.NoLeader, "the test ended")
		w.registry.Resign(over)
		w.engine.Stop(over)
		w.queue.Close(context.Background())
		server.Stop()
		if err := errors.Join(<-served, cc.Close(), w.store.Close()); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) ask(_ context.Context, _, after string) (*nodev1.GetInventoryResponse, fence.Epoch, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked.Add(1)
	s, _ := sessions.Directory{Registry: w.registry}.Session(node)
	inv := proto.CloneOf(w.inventory)
	if after != "" {
		inv = proto.CloneOf(w.second)
	} else if w.second != nil {
		inv.Next = "second"
	}
	inv.Snapshots = slices.DeleteFunc(inv.GetSnapshots(), func(o *nodev1.SnapshotObservation) bool { return w.agents.has(o.GetUid()) })
	return inv, s.Epoch, w.unread
}

func (w *world) trace(_ context.Context, _, key string) (*nodev1.JournalEntry, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.traces[key], w.torn
}

// holds sets what the node says that it holds, and whether it can say so.
func (w *world) holds(inv *nodev1.GetInventoryResponse, unread error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inventory, w.unread = inv, unread
}

// stream is the node's side of a session.
type stream struct {
	nodev1.SessionService_SessionClient
	epoch fence.Epoch
	end   context.CancelFunc
}

func (w *world) open(networks ...dormousev1.NetworkMode) *stream {
	w.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w.Cleanup(cancel)
	s, err := w.client.Session(ctx)
	w.ok(err)
	w.ok(s.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Hello{Hello: &nodev1.Hello{Node: node, Address: "unix:/none", NetworkModes: networks,
		Allocatable: &dormousev1.NodeResources{CpuMillis: 10_000, MemoryBytes: 1 << 40, DiskBytes: 1 << 40}}}}))
	msg, err := s.Recv()
	w.ok(err)
	return &stream{s, fence.Epoch(msg.GetWelcome().GetSessionEpoch()), cancel}
}

// begin opens the session of a node that holds nothing yet. Sandboxes made from then on are not held
// against its inventory, which stays what the test says that it is.
func (w *world) begin() *stream {
	w.Helper()
	asked := w.asked.Load()
	s := w.open()
	w.eventually("the records and the inventory are read", func() bool { return w.asked.Load() > asked })
	return s
}

func (s *stream) report(o *nodev1.SandboxObservation) error {
	return s.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Report{Report: &nodev1.Report{Id: 1, Sandbox: o}}})
}

// leave ends a session, and waits until the coordinator knows.
func (w *world) leave(s *stream) {
	w.Helper()
	s.end()
	w.eventually("the node is away", func() bool {
		_, online := sessions.Directory{Registry: w.registry}.Session(node)
		return !online
	})
}

func (w *world) eventually(what string, cond func() bool) {
	w.Helper()
	deadline := time.After(time.Minute)
	for !cond() {
		select {
		case <-deadline:
			w.Fatalf("never: %s", what)
		case <-time.After(time.Millisecond):
		}
	}
}

func (w *world) call() operations.Call {
	return operations.Call{Tenant: tenant, OperationID: uid.New()}
}

func (w *world) sandbox() string {
	w.Helper()
	op, err := w.engine.CreateSandbox(w.Context(), w.call(), operations.CreateSandbox{Spec: sandbox.Spec{Image: "registry.test/base:1"}})
	w.ok(err)
	return op.Plan.Copies[0].SandboxUID
}

func (w *world) snapshot(box string) string {
	w.Helper()
	op, err := w.engine.CheckpointSandbox(w.Context(), w.call(), operations.CheckpointSandbox{UID: box})
	w.ok(err)
	return op.Plan.SnapshotUID
}

func (w *world) record(key catalog.Key) catalog.Record {
	w.Helper()
	rec, err := w.store.Store.Get(context.Background(), key)
	w.ok(err)
	return rec
}

func (w *world) seq() uint64 {
	w.Helper()
	n, err := w.store.Seq(context.Background())
	w.ok(err)
	return n
}

// watched tells what became of observations.
type watched struct {
	*operations.Engine
	observed chan<- error
}

func (e watched) Observe(ctx context.Context, node string, o operations.Observation) error {
	err := e.Engine.Observe(ctx, node, o)
	select {
	case e.observed <- err:
	default: // nobody looks
	}
	return err
}

// store fails the reads of one kind while it is told to.
type store struct {
	catalog.Store
	mu     sync.Mutex
	broken string
	failed int
}

func (s *store) breakReads(method string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken, s.failed = method, 0
}

func (s *store) failures() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

func (s *store) check(method string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != method {
		return nil
	}
	s.failed++
	return errs.New(errs.StoreUnavailable, "the test broke %s", method)
}

func (s *store) Get(ctx context.Context, key catalog.Key) (catalog.Record, error) {
	if err := s.check("Get"); err != nil {
		return catalog.Record{}, err
	}
	return s.Store.Get(ctx, key)
}

func (s *store) List(ctx context.Context, q catalog.Query) (catalog.Page, error) {
	if err := s.check("List"); err != nil {
		return catalog.Page{}, err
	}
	return s.Store.List(ctx, q)
}

func (s *store) Tombstone(ctx context.Context, key catalog.Key) (catalog.Tombstone, error) {
	if err := s.check("Tombstone"); err != nil {
		return catalog.Tombstone{}, err
	}
	return s.Store.Tombstone(ctx, key)
}

func (s *store) Living(ctx context.Context, keys []catalog.Key) (map[catalog.Key]bool, error) {
	if err := s.check("Living"); err != nil {
		return nil, err
	}
	return s.Store.Living(ctx, keys)
}

func (s *store) Status(ctx context.Context) (catalog.Status, error) {
	if err := s.check("Status"); err != nil {
		return catalog.Status{}, err
	}
	return s.Store.Status(ctx)
}

func (s *store) Compare(ctx context.Context, p catalog.Point) (catalog.Relation, error) {
	if err := s.check("Compare"); err != nil {
		return "", err
	}
	return s.Store.Compare(ctx, p)
}

// agents answers for the node, in the session in force.
type agents struct {
	registry *sessions.Registry
	mu       sync.Mutex
	deleted  []string // what it was told to delete
	away     string   // what it does not answer for
}

func (a *agents) session() fence.Epoch {
	s, _ := sessions.Directory{Registry: a.registry}.Session(node)
	return s.Epoch
}

func (a *agents) remove(u string) (fence.Epoch, error) {
	session := a.session()
	a.mu.Lock()
	defer a.mu.Unlock()
	if u == a.away {
		return session, errs.New(errs.NodeAway, "away").With("node", node)
	}
	a.deleted = append(a.deleted, u)
	return session, nil
}

// has tells whether it was told to delete something, and nobody forgot that since.
func (a *agents) has(u string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Contains(a.deleted, u)
}

func (a *agents) setAway(u string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.away = u
}

// forget gives what was deleted since the last time.
func (a *agents) forget() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.deleted
	a.deleted = nil
	return was
}

func (a *agents) StartSandbox(_ context.Context, _ string, c operations.Command, sb *records.Sandbox, _ map[string]string) (operations.Observation, error) {
	return operations.Observation{UID: sb.UID, Tenant: c.Tenant, Phase: sandbox.Running, Number: 1, Session: a.session()}, nil
}

func (a *agents) RestoreSandbox(ctx context.Context, n string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	return a.StartSandbox(ctx, n, c, sb, nil)
}

func (a *agents) DeleteSandbox(_ context.Context, _ string, _ operations.Command, u string) (fence.Epoch, error) {
	return a.remove(u)
}

func (a *agents) CheckpointSandbox(context.Context, string, operations.Command, string, string) (snapshot.Status, fence.Epoch, error) {
	return snapshot.Status{SizeBytes: 7}, a.session(), nil
}

func (a *agents) PauseSandbox(context.Context, string, operations.Command, string, time.Duration) (operations.Observation, error) {
	return operations.Observation{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) UpdateSandbox(context.Context, string, operations.Command, *records.Sandbox) (operations.Observation, error) {
	return operations.Observation{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) ResumeSandbox(context.Context, string, operations.Command, string) (operations.Observation, error) {
	return operations.Observation{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) ClaimSandbox(context.Context, string, operations.Command, *records.Sandbox, map[string]string) (operations.Observation, error) {
	return operations.Observation{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) RunProcess(context.Context, string, operations.Command, string, operations.Process) (operations.ProcessEnd, error) {
	return operations.ProcessEnd{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) HibernateSandbox(context.Context, string, operations.Command, string, time.Duration) (operations.Observation, error) {
	return operations.Observation{}, errs.New(errs.NotSupported, "not asked for here")
}

func (a *agents) DeleteSnapshot(_ context.Context, _ string, _ operations.Command, u string) (fence.Epoch, error) {
	return a.remove(u)
}

func (a *agents) CreateVolume(context.Context, string, operations.Command, string, int64, string, string) (int64, fence.Epoch, error) {
	return 0, a.session(), nil
}

func (a *agents) DeleteVolume(_ context.Context, _ string, _ operations.Command, u string) (fence.Epoch, error) {
	return a.remove(u)
}
