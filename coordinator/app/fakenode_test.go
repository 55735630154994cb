package app_test

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// fakeNode speaks as agentd does, over the same wire.
type fakeNode struct {
	witness *nodev1.CatalogPoint // what it has seen of the catalog

	nodev1.UnimplementedAgentServiceServer
	dormousev1.UnimplementedProcessServiceServer
	dormousev1.UnimplementedPortServiceServer
	t     *testing.T
	name  string
	tls   *pki.Source
	addr  string
	srv   *grpc.Server
	done  chan struct{}
	words map[string]chan string // what ReadOutput says of a process
	ports map[uint32]string      // where what listens inside is
	hold  chan struct{}          // a resume waits for it, if it is not nil
	save  func(context.Context)  // what a checkpoint does first, if it is not nil
	begin func(uid string)       // what a start does first, if it is not nil
	read  func()                 // what reading the journal does first, if it is not nil; there is none to read
	times int64                  // how large it is, in usual ones; 0 is 1
	feed  chan struct{}          // lets a process "greedy" take input
	came  atomic.Int64           // attachments that there were
	there atomic.Int64           // and are
	yawns atomic.Int64           // how many uses of a sandbox it refuses, since it has just paused it

	mu        sync.Mutex
	sandboxes map[string]*nodev1.SandboxObservation
	snapshots map[string]*nodev1.SnapshotObservation
	volumes   map[string]*nodev1.VolumeObservation
	journal   map[string]*nodev1.JournalEntry // what it tells of single records, by key
	number    uint64
	asked     int                       // to resume
	turns     []dormousev1.SandboxPhase // what pauses and resumes came to
	commands  []*nodev1.Command
	epoch     uint64 // highest coordinator epoch seen

	cancel  context.CancelFunc
	session sync.WaitGroup
	stream  grpc.BidiStreamingClient[nodev1.SessionRequest, nodev1.SessionResponse]
	acks    chan *nodev1.ReportAck
}

func newFakeNode(t *testing.T, p *pkiFiles, name string) *fakeNode {
	n := &fakeNode{t: t, name: name, tls: p.source(t, pki.Identity{Role: pki.RoleNode, Name: name}),
		sandboxes: map[string]*nodev1.SandboxObservation{}, snapshots: map[string]*nodev1.SnapshotObservation{}, volumes: map[string]*nodev1.VolumeObservation{},
		done: make(chan struct{}), ports: map[uint32]string{}, feed: make(chan struct{}), words: map[string]chan string{"p1": make(chan string), "p2": make(chan string)}}
	sock := filepath.Join(t.TempDir(), "node.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	n.addr = "unix:" + sock
	around, err := wire.NewServer(quiet(), nil)
	if err != nil {
		t.Fatal(err)
	}
	n.srv = grpc.NewServer(append(around.Options(), grpc.Creds(credentials.NewTLS(n.tls.Server(pki.RoleCoordinator))))...)
	nodev1.RegisterAgentServiceServer(n.srv, n)
	dormousev1.RegisterProcessServiceServer(n.srv, n)
	dormousev1.RegisterPortServiceServer(n.srv, n)
	go func() {
		defer close(n.done)
		_ = n.srv.Serve(l) // ends with Stop
	}()
	t.Cleanup(func() {
		n.hangUp()
		n.srv.Stop()
		<-n.done
	})
	return n
}

// dial opens a session and beats until hangUp.
func (n *fakeNode) dial(coordinator string, beat time.Duration) error {
	ctx, cancel := context.WithCancel(context.Background())
	cc, err := grpc.NewClient("passthrough:///"+coordinator, append(wire.DialOptions(),
		grpc.WithTransportCredentials(credentials.NewTLS(n.tls.Client(pki.RoleCoordinator, ""))))...)
	if err != nil {
		cancel()
		return err
	}
	fail := func(err error) error {
		cancel()
		_ = cc.Close()
		return err
	}
	stream, err := nodev1.NewSessionServiceClient(cc).Session(ctx)
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	hello := &nodev1.Hello{Node: n.name, Address: n.addr, Version: "test", Architecture: "amd64", HighestCoordinatorEpoch: n.epoch, Witness: n.witness,
		Allocatable: &dormousev1.NodeResources{CpuMillis: 4000 * max(n.times, 1), MemoryBytes: 8 << 30 * max(n.times, 1), DiskBytes: 100 << 30 * max(n.times, 1), Sandboxes: 1000 * max(n.times, 1)},
		Inventory:   n.inventory()}
	n.mu.Unlock()
	if err := stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Hello{Hello: hello}}); err != nil {
		_, err = stream.Recv()
		return fail(err)
	}
	first, err := stream.Recv()
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	n.epoch = first.GetWelcome().GetCoordinatorEpoch()
	n.cancel, n.stream, n.acks = cancel, stream, make(chan *nodev1.ReportAck, 16)
	n.mu.Unlock()
	n.session.Go(func() {
		defer func() { _ = cc.Close() }()
		for {
			msg, err := stream.Recv()
			if err != nil {
				return
			}
			if ack := msg.GetReportAck(); ack != nil {
				n.acks <- ack
			}
		}
	})
	n.session.Go(func() {
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			select {
			case <-stream.Context().Done():
				return
			case <-tick.C:
				_ = stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{}}})
			}
		}
	})
	return nil
}

func (n *fakeNode) hangUp() {
	n.mu.Lock()
	cancel := n.cancel
	n.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	n.session.Wait()
}

// inventory wants the lock.
func (n *fakeNode) inventory() *nodev1.GetInventoryResponse {
	inv := &nodev1.GetInventoryResponse{}
	for _, s := range n.sandboxes {
		inv.Sandboxes = append(inv.Sandboxes, s)
	}
	for _, s := range n.snapshots {
		inv.Snapshots = append(inv.Snapshots, s)
	}
	for _, v := range n.volumes {
		inv.Volumes = append(inv.Volumes, v)
	}
	return inv
}

func (n *fakeNode) take(c *nodev1.Command) error {
	n.commands = append(n.commands, c)
	if c.GetCoordinatorEpoch() < n.epoch {
		return errs.New(errs.Fenced, "an older coordinator")
	}
	return nil
}

func (n *fakeNode) run(c *nodev1.Command, uid, from string) (*nodev1.SandboxObservation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.take(c); err != nil {
		return nil, err
	}
	n.number++
	n.sandboxes[uid] = &nodev1.SandboxObservation{Uid: uid, Tenant: c.GetTenant(), Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING,
		ObservedGeneration: 1, ImageDigest: "sha256:abc", RestoredFrom: from, Observation: n.number}
	return n.sandboxes[uid], nil
}

func (n *fakeNode) StartSandbox(_ context.Context, req *nodev1.StartSandboxRequest) (*nodev1.StartSandboxResponse, error) {
	if n.begin != nil {
		n.begin(req.GetUid())
	}
	if req.GetSpec().GetImage() == "registry.test/missing:1" {
		return nil, errs.New(errs.ImageNotFound, "the registry has no such image").With("image", req.GetSpec().GetImage())
	}
	o, err := n.run(req.GetCommand(), req.GetUid(), "")
	return &nodev1.StartSandboxResponse{Sandbox: o}, err
}

func (n *fakeNode) RestoreSandbox(_ context.Context, req *nodev1.RestoreSandboxRequest) (*nodev1.RestoreSandboxResponse, error) {
	o, err := n.run(req.GetCommand(), req.GetUid(), req.GetSnapshotUid())
	return &nodev1.RestoreSandboxResponse{Sandbox: o}, err
}

func (n *fakeNode) DeleteSandbox(_ context.Context, req *nodev1.DeleteSandboxRequest) (*nodev1.DeleteSandboxResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.sandboxes, req.GetUid())
	return &nodev1.DeleteSandboxResponse{}, n.take(req.GetCommand())
}

// turn makes a sandbox one of a phase, if the node has it.
func (n *fakeNode) turn(c *nodev1.Command, uid string, to dormousev1.SandboxPhase) (*nodev1.SandboxObservation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.take(c); err != nil {
		return nil, err
	}
	was := n.sandboxes[uid]
	if was == nil {
		return nil, errs.New(errs.StaleUID, "no sandbox %s", uid)
	}
	n.number++
	now := proto.CloneOf(was)
	now.Phase, now.Observation = to, n.number
	n.sandboxes[uid] = now
	n.turns = append(n.turns, to)
	return now, nil
}

func (n *fakeNode) PauseSandbox(_ context.Context, req *nodev1.PauseSandboxRequest) (*nodev1.PauseSandboxResponse, error) {
	o, err := n.turn(req.GetCommand(), req.GetUid(), dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED)
	return &nodev1.PauseSandboxResponse{Sandbox: o}, err
}

func (n *fakeNode) ResumeSandbox(ctx context.Context, req *nodev1.ResumeSandboxRequest) (*nodev1.ResumeSandboxResponse, error) {
	n.mu.Lock()
	n.asked++
	n.mu.Unlock()
	if n.hold != nil {
		select {
		case <-n.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	o, err := n.turn(req.GetCommand(), req.GetUid(), dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING)
	return &nodev1.ResumeSandboxResponse{Sandbox: o}, err
}

// awake refuses a use of a sandbox that it has just paused, and has not told of it.
func (n *fakeNode) awake(uid string) error {
	if n.yawns.Add(-1) < 0 {
		return nil
	}
	return errs.New(errs.SandboxPaused, "sandbox %s is Paused: resume it first", uid).With("uid", uid).With("phase", "Paused")
}

func (n *fakeNode) ListProcesses(_ context.Context, req *dormousev1.ListProcessesRequest) (*dormousev1.ListProcessesResponse, error) {
	if err := n.awake(req.GetSandboxUid()); err != nil {
		return nil, err
	}
	return &dormousev1.ListProcessesResponse{Processes: []*dormousev1.Process{{ProcessId: "p1"}}}, nil
}

func (n *fakeNode) CheckpointSandbox(ctx context.Context, req *nodev1.CheckpointSandboxRequest) (*nodev1.CheckpointSandboxResponse, error) {
	if n.save != nil {
		n.save(ctx)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	o := &nodev1.SnapshotObservation{Uid: req.GetSnapshotUid(), Tenant: req.GetCommand().GetTenant(), SourceSandboxUid: req.GetUid(), SizeBytes: 5}
	n.snapshots[o.GetUid()] = o
	return &nodev1.CheckpointSandboxResponse{Snapshot: o}, n.take(req.GetCommand())
}

func (n *fakeNode) DeleteSnapshot(_ context.Context, req *nodev1.DeleteSnapshotRequest) (*nodev1.DeleteSnapshotResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.snapshots, req.GetUid())
	return &nodev1.DeleteSnapshotResponse{}, n.take(req.GetCommand())
}

func (n *fakeNode) CreateVolume(_ context.Context, req *nodev1.CreateVolumeRequest) (*nodev1.CreateVolumeResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o := &nodev1.VolumeObservation{Uid: req.GetUid(), Tenant: req.GetCommand().GetTenant()}
	n.volumes[o.GetUid()] = o
	return &nodev1.CreateVolumeResponse{Volume: o}, n.take(req.GetCommand())
}

func (n *fakeNode) DeleteVolume(_ context.Context, req *nodev1.DeleteVolumeRequest) (*nodev1.DeleteVolumeResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.volumes, req.GetUid())
	return &nodev1.DeleteVolumeResponse{}, n.take(req.GetCommand())
}

func (n *fakeNode) ReadJournal(ctx context.Context, req *nodev1.ReadJournalRequest) (*nodev1.ReadJournalResponse, error) {
	n.mu.Lock()
	read, entry := n.read, n.journal[req.GetKey()]
	n.mu.Unlock()
	if req.GetKey() != "" {
		resp := new(nodev1.ReadJournalResponse)
		if entry != nil {
			resp.Entries = append(resp.Entries, entry)
		}
		return resp, nil
	}
	if read != nil {
		read()
	}
	return n.UnimplementedAgentServiceServer.ReadJournal(ctx, req)
}

func (n *fakeNode) GetInventory(context.Context, *nodev1.GetInventoryRequest) (*nodev1.GetInventoryResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.inventory(), nil
}

func (n *fakeNode) RunProcess(req *dormousev1.RunProcessRequest, out grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error {
	if err := n.awake(req.GetSandboxUid()); err != nil {
		return err
	}
	if len(req.GetSpec().GetArgv()) == 0 {
		return errs.New(errs.CommandNotFound, "no such command")
	}
	for _, msg := range []*dormousev1.RunProcessResponse{
		{Event: &dormousev1.RunProcessResponse_Started{Started: &dormousev1.Process{ProcessId: "p1", Pid: 2}}},
		{Event: &dormousev1.RunProcessResponse_Output{Output: &dormousev1.OutputChunk{Data: []byte("hello")}}},
		{Event: &dormousev1.RunProcessResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 3}}},
	} {
		if err := out.Send(msg); err != nil {
			return err
		}
	}
	return nil
}

func (n *fakeNode) ReadOutput(req *dormousev1.ReadOutputRequest, out grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
	for {
		select {
		case word := <-n.words[req.GetProcessId()]:
			if err := out.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: &dormousev1.OutputChunk{Data: []byte(word)}}}); err != nil {
				return err
			}
		case <-out.Context().Done():
			return out.Context().Err()
		}
	}
}

func (n *fakeNode) PullImage(req *nodev1.PullImageRequest, out grpc.ServerStreamingServer[nodev1.PullImageResponse]) error {
	if err := out.Send(&nodev1.PullImageResponse{Event: &nodev1.PullImageResponse_Progress{Progress: &dormousev1.PullProgress{Step: "pulling"}}}); err != nil {
		return err
	}
	return out.Send(&nodev1.PullImageResponse{Event: &nodev1.PullImageResponse_Image{Image: &dormousev1.Image{Reference: req.GetReference(), Digest: "sha256:abc"}}})
}

func (n *fakeNode) ForwardPort(stream grpc.BidiStreamingServer[dormousev1.ForwardPortRequest, dormousev1.ForwardPortResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	conn, err := net.Dial("tcp", n.ports[first.GetOpen().GetPort()])
	if err != nil {
		return errs.New(errs.PortClosed, "nothing listens on port %d", first.GetOpen().GetPort())
	}
	defer func() { _ = conn.Close() }() // both directions are over
	if err := stream.Send(&dormousev1.ForwardPortResponse{Message: &dormousev1.ForwardPortResponse_Opened{Opened: &dormousev1.ForwardOpened{}}}); err != nil {
		return err
	}
	go func() { // ends with the stream
		for {
			msg, err := stream.Recv()
			if err != nil {
				_ = conn.(*net.TCPConn).CloseWrite() // its reader sees what is wrong
				return
			}
			if _, err := conn.Write(msg.GetData()); err != nil {
				return
			}
		}
	}()
	stop := context.AfterFunc(stream.Context(), func() { _ = conn.Close() })
	defer stop()
	buf := make([]byte, 32<<10)
	for {
		k, err := conn.Read(buf)
		if k > 0 {
			if err := stream.Send(&dormousev1.ForwardPortResponse{Message: &dormousev1.ForwardPortResponse_Data{Data: buf[:k]}}); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}
