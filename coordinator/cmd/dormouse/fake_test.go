package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// testKey is what the fake accepts.
const testKey = "dm_000000000000_test"

// fake is a coordinator with a memory and no node: enough to see what the command line sends and
// how it shows the answers.
type fake struct {
	dormousev1.UnimplementedSandboxServiceServer
	dormousev1.UnimplementedSnapshotServiceServer
	dormousev1.UnimplementedVolumeServiceServer
	dormousev1.UnimplementedProcessServiceServer
	dormousev1.UnimplementedNodeServiceServer
	dormousev1.UnimplementedImageServiceServer
	dormousev1.UnimplementedOperationServiceServer
	dormousev1.UnimplementedEventServiceServer

	mu        sync.Mutex
	sandboxes []*dormousev1.Sandbox
	snapshots []*dormousev1.Snapshot
	busy      int // deletions of snapshots that the queue has no room for
	volumes   []*dormousev1.Volume
	requests  []proto.Message
	signals   chan int32
	ids       int
	fail      map[string]error // by method, every time
	once      map[string]error // by method, the first time
}

// uidAt gives the n-th uid of the tests.
func uidAt(n int) string { return fmt.Sprintf("01900000-0000-7000-8000-%012d", n) }

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// note remembers a request and gives the error that the test wants.
func (f *fake) note(method string, req proto.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, proto.Clone(req))
	if err := f.once[method]; err != nil {
		delete(f.once, method)
		return err
	}
	return f.fail[method]
}

// asked gives the last request of a type.
func asked[T proto.Message](t *testing.T, f *fake) T {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range slices.Backward(f.requests) {
		if m, ok := r.(T); ok {
			return m
		}
	}
	var none T
	t.Fatalf("no %T was asked", none)
	return none
}

func (f *fake) meta(name string, labels map[string]string) *dormousev1.ObjectMeta {
	f.ids++
	return &dormousev1.ObjectMeta{Uid: uidAt(f.ids), Tenant: "acme", Name: name, Labels: labels, Generation: 1, Revision: 1, CreateTime: timestamppb.New(epoch)}
}

func (f *fake) add(name string, labels map[string]string, spec *dormousev1.SandboxSpec) *dormousev1.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &dormousev1.Sandbox{Meta: f.meta(name, labels), Spec: spec, Status: &dormousev1.SandboxStatus{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING, Node: "n1"}}
	f.sandboxes = append(f.sandboxes, s)
	return s
}

func absent(kind, uid string) error {
	return errs.New(errs.ObjectNotFound, "there is no %s %s", kind, uid).With("kind", kind).With("uid", uid)
}

func (f *fake) sandbox(uid string) (*dormousev1.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.sandboxes {
		if s.GetMeta().GetUid() == uid {
			return s, nil
		}
	}
	return nil, absent("sandbox", uid)
}

func (f *fake) CreateSandbox(_ context.Context, r *dormousev1.CreateSandboxRequest) (*dormousev1.CreateSandboxResponse, error) {
	if err := f.note("CreateSandbox", r); err != nil {
		return nil, err
	}
	return &dormousev1.CreateSandboxResponse{Sandbox: f.add(r.GetName(), r.GetLabels(), r.GetSpec())}, nil
}

func (f *fake) GetSandbox(_ context.Context, r *dormousev1.GetSandboxRequest) (*dormousev1.GetSandboxResponse, error) {
	if err := f.note("GetSandbox", r); err != nil {
		return nil, err
	}
	s, err := f.sandbox(r.GetUid())
	return &dormousev1.GetSandboxResponse{Sandbox: s}, err
}

func (f *fake) GetSandboxNetwork(_ context.Context, r *dormousev1.GetSandboxNetworkRequest) (*dormousev1.GetSandboxNetworkResponse, error) {
	if err := f.note("GetSandboxNetwork", r); err != nil {
		return nil, err
	}
	_, err := f.sandbox(r.GetUid())
	return &dormousev1.GetSandboxNetworkResponse{Network: &dormousev1.SandboxNetwork{Mode: dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND, Address: "10.89.0.7",
		SentBytes: 2048, ReceivedBytes: 3 << 20, RefusedPackets: 4, RefusedNames: 1}}, err
}

// ListSandboxes gives pages of one, so that paging is always at work.
func (f *fake) ListSandboxes(_ context.Context, r *dormousev1.ListSandboxesRequest) (*dormousev1.ListSandboxesResponse, error) {
	if err := f.note("ListSandboxes", r); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &dormousev1.ListSandboxesResponse{Sequence: 1}
	for _, s := range f.sandboxes {
		switch {
		case r.GetName() != "" && s.GetMeta().GetName() != r.GetName(), s.GetMeta().GetUid() <= r.GetPageToken():
		case len(resp.GetSandboxes()) == 1:
			resp.NextPageToken = resp.GetSandboxes()[0].GetMeta().GetUid()
			return resp, nil
		default:
			resp.Sandboxes = append(resp.Sandboxes, s)
		}
	}
	return resp, nil
}

// turn changes the phase of a sandbox.
func (f *fake) turn(uid string, to dormousev1.SandboxPhase) (*dormousev1.Sandbox, error) {
	s, err := f.sandbox(uid)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.Status.Phase = to
	return s, nil
}

func (f *fake) UpdateSandbox(_ context.Context, r *dormousev1.UpdateSandboxRequest) (*dormousev1.UpdateSandboxResponse, error) {
	if err := f.note("UpdateSandbox", r); err != nil {
		return nil, err
	}
	s, err := f.sandbox(r.GetUid())
	return &dormousev1.UpdateSandboxResponse{Sandbox: s}, err
}

func (f *fake) PauseSandbox(_ context.Context, r *dormousev1.PauseSandboxRequest) (*dormousev1.PauseSandboxResponse, error) {
	if err := f.note("PauseSandbox", r); err != nil {
		return nil, err
	}
	s, err := f.turn(r.GetUid(), dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED)
	return &dormousev1.PauseSandboxResponse{Sandbox: s}, err
}

func (f *fake) HibernateSandbox(_ context.Context, r *dormousev1.HibernateSandboxRequest) (*dormousev1.HibernateSandboxResponse, error) {
	if err := f.note("HibernateSandbox", r); err != nil {
		return nil, err
	}
	s, err := f.turn(r.GetUid(), dormousev1.SandboxPhase_SANDBOX_PHASE_HIBERNATED)
	return &dormousev1.HibernateSandboxResponse{Sandbox: s}, err
}

func (f *fake) ResumeSandbox(_ context.Context, r *dormousev1.ResumeSandboxRequest) (*dormousev1.ResumeSandboxResponse, error) {
	if err := f.note("ResumeSandbox", r); err != nil {
		return nil, err
	}
	s, err := f.turn(r.GetUid(), dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING)
	return &dormousev1.ResumeSandboxResponse{Sandbox: s}, err
}

func (f *fake) DeleteSandbox(_ context.Context, r *dormousev1.DeleteSandboxRequest) (*dormousev1.DeleteSandboxResponse, error) {
	if err := f.note("DeleteSandbox", r); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	before := len(f.sandboxes)
	f.sandboxes = slices.DeleteFunc(f.sandboxes, func(s *dormousev1.Sandbox) bool { return s.GetMeta().GetUid() == r.GetUid() })
	if len(f.sandboxes) == before {
		return nil, absent("sandbox", r.GetUid())
	}
	return &dormousev1.DeleteSandboxResponse{}, nil
}

// WatchSandboxes says that the sandbox stopped with code 7.
func (f *fake) WatchSandboxes(r *dormousev1.WatchSandboxesRequest, s grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
	if err := f.note("WatchSandboxes", r); err != nil {
		return err
	}
	sb, err := f.sandbox(r.GetUid())
	if err != nil {
		return err
	}
	sb = proto.CloneOf(sb)
	sb.Status.Phase, sb.Status.ExitCode = dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED, proto.Int32(7)
	return s.Send(&dormousev1.WatchSandboxesResponse{Sequence: 2, Uid: r.GetUid(), Sandbox: sb})
}

func (f *fake) CheckpointSandbox(_ context.Context, r *dormousev1.CheckpointSandboxRequest) (*dormousev1.CheckpointSandboxResponse, error) {
	if err := f.note("CheckpointSandbox", r); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &dormousev1.Snapshot{Meta: f.meta(r.GetName(), r.GetLabels()), SourceSandboxUid: r.GetUid(), Status: &dormousev1.SnapshotStatus{
		Phase: dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY, SizeBytes: 3 << 20, Freeze: durationpb.New(40 * time.Millisecond), Nodes: []string{"n1"}}}
	f.snapshots = append(f.snapshots, s)
	return &dormousev1.CheckpointSandboxResponse{Snapshot: s}, nil
}

func (f *fake) RestoreSandbox(_ context.Context, r *dormousev1.RestoreSandboxRequest) (*dormousev1.RestoreSandboxResponse, error) {
	if err := f.note("RestoreSandbox", r); err != nil {
		return nil, err
	}
	return &dormousev1.RestoreSandboxResponse{Sandbox: f.add(r.GetName(), r.GetLabels(), nil)}, nil
}

func (f *fake) ForkSandbox(_ context.Context, r *dormousev1.ForkSandboxRequest) (*dormousev1.ForkSandboxResponse, error) {
	if err := f.note("ForkSandbox", r); err != nil {
		return nil, err
	}
	resp := &dormousev1.ForkSandboxResponse{SnapshotUid: uidAt(999)}
	for i := range r.GetCount() {
		resp.Sandboxes = append(resp.Sandboxes, f.add(fmt.Sprintf("%s-%d", r.GetNamePrefix(), i), nil, nil))
	}
	return resp, nil
}

func (f *fake) GetSnapshot(_ context.Context, r *dormousev1.GetSnapshotRequest) (*dormousev1.GetSnapshotResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.snapshots {
		if s.GetMeta().GetUid() == r.GetUid() {
			return &dormousev1.GetSnapshotResponse{Snapshot: s}, nil
		}
	}
	return nil, absent("snapshot", r.GetUid())
}

func (f *fake) ListSnapshots(_ context.Context, r *dormousev1.ListSnapshotsRequest) (*dormousev1.ListSnapshotsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &dormousev1.ListSnapshotsResponse{}
	for _, s := range f.snapshots {
		if (r.GetName() == "" || s.GetMeta().GetName() == r.GetName()) && (r.GetSourceSandboxUid() == "" || s.GetSourceSandboxUid() == r.GetSourceSandboxUid()) {
			resp.Snapshots = append(resp.Snapshots, s)
		}
	}
	return resp, nil
}

func (f *fake) DeleteSnapshot(_ context.Context, r *dormousev1.DeleteSnapshotRequest) (*dormousev1.DeleteSnapshotResponse, error) {
	f.mu.Lock()
	if f.busy > 0 {
		f.busy--
		f.mu.Unlock()
		return nil, errs.New(errs.QueueFull, "the test's queue is full")
	}
	f.mu.Unlock()
	return &dormousev1.DeleteSnapshotResponse{}, f.note("DeleteSnapshot", r)
}

func (f *fake) CreateVolume(_ context.Context, r *dormousev1.CreateVolumeRequest) (*dormousev1.CreateVolumeResponse, error) {
	if err := f.note("CreateVolume", r); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v := &dormousev1.Volume{Meta: f.meta(r.GetName(), r.GetLabels()), Spec: r.GetSpec(), Status: &dormousev1.VolumeStatus{Phase: dormousev1.VolumePhase_VOLUME_PHASE_READY, Node: "n1"}}
	f.volumes = append(f.volumes, v)
	return &dormousev1.CreateVolumeResponse{Volume: v}, nil
}

func (f *fake) ListVolumes(_ context.Context, r *dormousev1.ListVolumesRequest) (*dormousev1.ListVolumesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &dormousev1.ListVolumesResponse{}
	for _, v := range f.volumes {
		if r.GetName() == "" || v.GetMeta().GetName() == r.GetName() {
			resp.Volumes = append(resp.Volumes, v)
		}
	}
	return resp, nil
}

func (f *fake) DeleteVolume(_ context.Context, r *dormousev1.DeleteVolumeRequest) (*dormousev1.DeleteVolumeResponse, error) {
	return &dormousev1.DeleteVolumeResponse{}, f.note("DeleteVolume", r)
}

func (f *fake) ListNodes(context.Context, *dormousev1.ListNodesRequest) (*dormousev1.ListNodesResponse, error) {
	return &dormousev1.ListNodesResponse{Nodes: []*dormousev1.Node{{
		Name: "n1", Online: true, LastHeartbeat: timestamppb.New(epoch.Add(58 * time.Second)),
		Requested:    &dormousev1.NodeResources{CpuMillis: 1500, MemoryBytes: 1 << 30, Sandboxes: 3},
		Allocatable:  &dormousev1.NodeResources{CpuMillis: 2000, MemoryBytes: 20 << 30, Sandboxes: 1000},
		NetworkModes: []dormousev1.NetworkMode{dormousev1.NetworkMode_NETWORK_MODE_NONE, dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND},
	}, {Name: "n2", Cordoned: true}}}, nil
}

func (f *fake) CordonNode(_ context.Context, r *dormousev1.CordonNodeRequest) (*dormousev1.CordonNodeResponse, error) {
	return &dormousev1.CordonNodeResponse{Node: &dormousev1.Node{Name: r.GetName(), Cordoned: true}}, f.note("CordonNode", r)
}

func (f *fake) image() *dormousev1.Image {
	return &dormousev1.Image{Reference: "reg.example/a:1", Digest: "sha256:" + strings.Repeat("ab", 32), SizeBytes: 5 << 20, Nodes: []string{"n1", "n2"}, PullTime: timestamppb.New(epoch)}
}

func (f *fake) PullImage(r *dormousev1.PullImageRequest, s grpc.ServerStreamingServer[dormousev1.PullImageResponse]) error {
	if err := f.note("PullImage", r); err != nil {
		return err
	}
	for _, p := range []*dormousev1.PullProgress{{Node: "n1", Step: "resolving"}, {Node: "n1", Step: "pulling", BytesDone: 1, BytesTotal: 10},
		{Node: "n1", Step: "pulling", BytesDone: 9, BytesTotal: 10}, {Node: "n1", Step: "done"}} {
		if err := s.Send(&dormousev1.PullImageResponse{Event: &dormousev1.PullImageResponse_Progress{Progress: p}}); err != nil {
			return err
		}
	}
	return s.Send(&dormousev1.PullImageResponse{Event: &dormousev1.PullImageResponse_Image{Image: f.image()}})
}

func (f *fake) ListImages(context.Context, *dormousev1.ListImagesRequest) (*dormousev1.ListImagesResponse, error) {
	return &dormousev1.ListImagesResponse{Images: []*dormousev1.Image{f.image()}}, nil
}

func (f *fake) DeleteImage(_ context.Context, r *dormousev1.DeleteImageRequest) (*dormousev1.DeleteImageResponse, error) {
	return &dormousev1.DeleteImageResponse{}, f.note("DeleteImage", r)
}

func (f *fake) GetOperation(_ context.Context, r *dormousev1.GetOperationRequest) (*dormousev1.GetOperationResponse, error) {
	return &dormousev1.GetOperationResponse{Operation: &dormousev1.Operation{OperationId: r.GetOperationId(), Kind: "CreateSandbox",
		State: dormousev1.OperationState_OPERATION_STATE_FAILED, ErrorReason: "NO_NODE_FITS", CreateTime: timestamppb.New(epoch)}}, nil
}

func (f *fake) ListEvents(_ context.Context, r *dormousev1.ListEventsRequest) (*dormousev1.ListEventsResponse, error) {
	return &dormousev1.ListEventsResponse{Events: []*dormousev1.Event{{Uid: uidAt(50), ObjectKind: "sandbox", ObjectUid: uidAt(1), Reason: "Started", Message: "it runs",
		Time: timestamppb.New(epoch)}}}, f.note("ListEvents", r)
}

// auth refuses who does not have the key.
func auth(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get("authorization"); len(v) != 1 || v[0] != "Bearer "+testKey {
		return errs.New(errs.CredentialsInvalid, "the API key is not known")
	}
	return nil
}

// serve starts a fake coordinator on a unix socket and points the environment at it.
func serve(t *testing.T) *fake {
	t.Helper()
	f := &fake{fail: make(map[string]error), once: make(map[string]error), signals: make(chan int32, 1)}
	server, err := wire.NewServer(obs.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer(append(server.Options(),
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := auth(ctx); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := auth(ss.Context()); err != nil {
				return err
			}
			return next(srv, ss)
		}))...)
	dormousev1.RegisterSandboxServiceServer(gs, f)
	dormousev1.RegisterSnapshotServiceServer(gs, f)
	dormousev1.RegisterVolumeServiceServer(gs, f)
	dormousev1.RegisterProcessServiceServer(gs, f)
	dormousev1.RegisterNodeServiceServer(gs, f)
	dormousev1.RegisterImageServiceServer(gs, f)
	dormousev1.RegisterOperationServiceServer(gs, f)
	dormousev1.RegisterEventServiceServer(gs, f)
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- gs.Serve(l) }()
	t.Cleanup(func() {
		gs.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Setenv("DORMOUSE_ADDR", "unix://"+path)
	t.Setenv("DORMOUSE_API_KEY", testKey)
	before := now
	now = func() time.Time { return epoch.Add(time.Minute) }
	t.Cleanup(func() { now = before })
	return f
}

// result is what a command did.
type result struct {
	code     int
	out, err string
}

// dormouse runs a command line.
func dormouse(t *testing.T, args ...string) result { return dormouseIn(t, "", args...) }

func dormouseIn(t *testing.T, input string, args ...string) result {
	t.Helper()
	var out, errOut bytes.Buffer
	app := newApp(streams{in: io.Reader(strings.NewReader(input)), out: &out, err: &errOut})
	code := command.Run(t.Context(), app, append([]string{"dormouse"}, args...))
	return result{code, out.String(), errOut.String()}
}
