// Package api is the node's gRPC surface: each method decodes, calls and encodes. It decides nothing.
//
// It is served over mTLS to a coordinator's certificate only; who may connect is the listener's to say.
// Every mutation goes through the runner's Commands, which refuse lower epochs and answer a command
// that was finished with its kept result.
package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Runner is what is done with sandboxes and snapshots.
type Runner interface {
	StartSandbox(ctx context.Context, req runner.StartRequest) (Observed, error)
	RestoreSandbox(ctx context.Context, req runner.RestoreRequest) (Observed, error)
	DeleteSandbox(ctx context.Context, uid string) error
	CheckpointSandbox(ctx context.Context, req runner.CaptureRequest) (snapshot.Snapshot, error)
	DeleteSnapshot(ctx context.Context, uid string) error
	// PauseSandbox and HibernateSandbox are refused with WRONG_PHASE if the sandbox was used within ifUnusedFor; 0 is in any case.
	PauseSandbox(ctx context.Context, uid string, ifUnusedFor time.Duration) (Observed, error)
	ResumeSandbox(ctx context.Context, uid string) (Observed, error)
	HibernateSandbox(ctx context.Context, uid string, ifUnusedFor time.Duration) (Observed, error)
	ClaimSandbox(ctx context.Context, req runner.ClaimRequest) (Observed, error)
	// SetEgress changes what a sandbox may reach; a generation below the node's changes nothing.
	SetEgress(ctx context.Context, uid string, generation int64, egress *sandbox.Egress) (Observed, error)
}

// Observed is what the node tells of a sandbox.
type Observed struct {
	UID, Tenant string
	Status      sandbox.Status
}

// Proto gives its form on the wire.
func (o Observed) Proto() *nodev1.SandboxObservation {
	return wire.SandboxObservationToProto(o.UID, o.Tenant, o.Status)
}

// VolumeRequest asks for a volume, or for a copy of one.
type VolumeRequest struct {
	UID, Tenant      string
	SizeLimitBytes   int64
	SourceUID        string
	FreezeSandboxUID string
}

// Volumes is what is done with volumes.
type Volumes interface {
	CreateVolume(ctx context.Context, req VolumeRequest) (volume.Volume, error)
	DeleteVolume(ctx context.Context, uid string) error
}

// Images is what is done with images.
type Images interface {
	PullImage(ctx context.Context, reference string, progress func(*dormousev1.PullProgress)) (*dormousev1.Image, error)
	RemoveImage(ctx context.Context, digest string) error
}

// Inventory is what the node holds, from its records.
type Inventory interface {
	// Inventory gives a page; a limit of 0 is the largest.
	Inventory(ctx context.Context, after string, limit int) (*nodev1.GetInventoryResponse, error)
	// JournalEntry gives what the node keeps of one record of the catalog: nil is nothing.
	JournalEntry(key string) (*nodev1.JournalEntry, error)
	// Journal gives a page of what the node keeps of the catalog, and the key to go on after.
	Journal(after string, limit int) ([]*nodev1.JournalEntry, string, error)
}

// Networks tells what networks have seen.
type Networks interface {
	// SandboxNetwork is refused with OBJECT_NOT_FOUND for a sandbox that is not here, or another tenant's.
	SandboxNetwork(ctx context.Context, tenant, uid string) (*dormousev1.SandboxNetwork, error)
}

// Commands admits mutations and keeps their results.
type Commands interface {
	Do(ctx context.Context, cmd runner.Command, run func(ctx context.Context) ([]byte, error)) ([]byte, error)
	// Admit only checks the epochs: for what is idempotent by itself and streams.
	Admit(ctx context.Context, cmd runner.Command) error
}

// Server implements AgentService.
type Server struct {
	nodev1.UnimplementedAgentServiceServer

	Commands  Commands
	Runner    Runner
	Volumes   Volumes
	Images    Images
	Inventory Inventory
	Networks  Networks
}

// repeats are the methods that answer the same when they are done again after a success: a sandbox's
// record names the command that made it, and what is deleted stays so.
var repeats = map[string]bool{"StartSandbox": true, "RestoreSandbox": true, "ClaimSandbox": true, "UpdateSandbox": true, "DeleteSandbox": true}

// command makes the command of a request. The body's digest leaves out what differs between retries: what an update may have changed of
// a sandbox since it was asked for the first time. And the values of secrets, whose digest would be a way to guess them.
func command(kind string, c *nodev1.Command, body proto.Message) (runner.Command, error) {
	cmd := runner.Command{Coordinator: fence.Epoch(c.GetCoordinatorEpoch()), Session: fence.Epoch(c.GetSessionEpoch()), ID: c.GetCommandId(), Kind: kind, Repeats: repeats[kind]}
	clean := proto.Clone(body)
	m := clean.ProtoReflect()
	m.Clear(m.Descriptor().Fields().ByName("command"))
	switch made := clean.(type) {
	case *nodev1.StartSandboxRequest:
		for name := range made.GetSecretEnv() {
			made.SecretEnv[name] = ""
		}
		made.Generation = 0
		if spec := made.GetSpec(); spec != nil {
			spec.Lifetime, spec.IdleTimeout, spec.OnIdle, spec.WakeOnUse, spec.Egress = nil, nil, 0, false, nil
		}
	case *nodev1.RestoreSandboxRequest:
		made.Generation, made.Network = 0, nil
	case *nodev1.ClaimSandboxRequest:
		made.Generation = 0
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(clean)
	if err != nil {
		return cmd, errs.Wrap(err, errs.InternalError, "encode a command: %v", err)
	}
	sum := sha256.Sum256(append([]byte(c.GetTenant()+"\x00"), data...))
	cmd.Digest = hex.EncodeToString(sum[:])
	return cmd, nil
}

// run does a command whose answer is resp, filled by fn.
func run[Resp proto.Message](ctx context.Context, s *Server, kind string, c *nodev1.Command, body proto.Message, resp Resp, fn func(ctx context.Context) error) (Resp, error) {
	var none Resp
	cmd, err := command(kind, c, body)
	if err != nil {
		return none, err
	}
	// fill is the goroutine's own: this call may return before it ends.
	fill := resp
	data, err := s.Commands.Do(ctx, cmd, func(ctx context.Context) ([]byte, error) {
		if err := fn(ctx); err != nil {
			return nil, err
		}
		return proto.Marshal(fill)
	})
	if err != nil {
		return none, err
	}
	out := resp.ProtoReflect().New().Interface().(Resp)
	if err := proto.Unmarshal(data, out); err != nil {
		return none, errs.Wrap(err, errs.InternalError, "decode a kept result: %v", err)
	}
	return out, nil
}

func checkUID(field, value string) error {
	if err := uid.Check(value); err != nil {
		return errs.New(errs.InvalidField, "%s: %v", field, err).With("field", field)
	}
	return nil
}

func checkCommand(c *nodev1.Command) error {
	if c.GetTenant() == "" {
		return errs.New(errs.InvalidField, "a command needs a tenant").With("field", "command.tenant")
	}
	return nil
}

// first gives the first error.
func first(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

// StartSandbox implements AgentService.
func (s *Server) StartSandbox(ctx context.Context, req *nodev1.StartSandboxRequest) (*nodev1.StartSandboxResponse, error) {
	spec, err := wire.SpecFromProto(req.GetSpec())
	if err := first(err, checkCommand(req.GetCommand()), checkUID("uid", req.GetUid())); err != nil {
		return nil, err
	}
	for _, p := range []*sandbox.Problem{spec.Validate(), sandbox.ValidateEnv("secret_env", req.GetSecretEnv()), sandbox.ValidateName("name", req.GetName())} {
		if err := wire.FromProblem(p); err != nil {
			return nil, err
		}
	}
	resp := &nodev1.StartSandboxResponse{}
	return run(ctx, s, "StartSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.StartSandbox(ctx, runner.StartRequest{
			UID: req.GetUid(), Tenant: req.GetCommand().GetTenant(), Name: req.GetName(), Generation: req.GetGeneration(),
			CommandID: req.GetCommand().GetCommandId(), Spec: spec, SecretEnv: req.GetSecretEnv(),
		})
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// RestoreSandbox implements AgentService.
func (s *Server) RestoreSandbox(ctx context.Context, req *nodev1.RestoreSandboxRequest) (*nodev1.RestoreSandboxResponse, error) {
	if err := first(checkCommand(req.GetCommand()), checkUID("uid", req.GetUid()), checkUID("snapshot_uid", req.GetSnapshotUid())); err != nil {
		return nil, err
	}
	var volumes []snapshot.VolumeReference
	for _, v := range req.GetVolumes() {
		if err := checkUID("volumes.volume_uid", v.GetVolumeUid()); err != nil {
			return nil, err
		}
		volumes = append(volumes, snapshot.VolumeReference{VolumeUID: v.GetVolumeUid(), Path: v.GetPath(), ReadOnly: v.GetReadOnly()})
	}
	network, err := networkOf(req.GetNetwork())
	if err != nil {
		return nil, err
	}
	resp := &nodev1.RestoreSandboxResponse{}
	return run(ctx, s, "RestoreSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.RestoreSandbox(ctx, runner.RestoreRequest{
			UID: req.GetUid(), Tenant: req.GetCommand().GetTenant(), Name: req.GetName(), Generation: req.GetGeneration(),
			CommandID: req.GetCommand().GetCommandId(), SnapshotUID: req.GetSnapshotUid(), Volumes: volumes, Hostname: req.GetHostname(), Network: network,
			Parked: req.GetParked(),
		})
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

func egressOf(p *dormousev1.EgressPolicy) (*sandbox.Egress, error) {
	egress, err := wire.EgressFromProto(p)
	if err != nil {
		return nil, err
	}
	return egress, wire.FromProblem(egress.Validate("egress"))
}

func networkOf(p *nodev1.RestoreNetwork) (*runner.NetworkRequest, error) {
	if p == nil {
		return nil, nil //nolint:nilnil // the snapshot's
	}
	egress, err := egressOf(p.GetEgress())
	return &runner.NetworkRequest{Egress: egress}, err
}

// UpdateSandbox implements AgentService.
func (s *Server) UpdateSandbox(ctx context.Context, req *nodev1.UpdateSandboxRequest) (*nodev1.UpdateSandboxResponse, error) {
	egress, err := egressOf(req.GetEgress())
	if err := first(err, checkUID("uid", req.GetUid())); err != nil {
		return nil, err
	}
	if req.GetGeneration() < 1 {
		return nil, errs.New(errs.InvalidField, "generation: from 1 on, got %d", req.GetGeneration()).With("field", "generation")
	}
	resp := &nodev1.UpdateSandboxResponse{}
	return run(ctx, s, "UpdateSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.SetEgress(ctx, req.GetUid(), req.GetGeneration(), egress)
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// DeleteSandbox implements AgentService.
func (s *Server) DeleteSandbox(ctx context.Context, req *nodev1.DeleteSandboxRequest) (*nodev1.DeleteSandboxResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	return run(ctx, s, "DeleteSandbox", req.GetCommand(), req, &nodev1.DeleteSandboxResponse{}, func(ctx context.Context) error {
		return s.Runner.DeleteSandbox(ctx, req.GetUid())
	})
}

// CheckpointSandbox implements AgentService.
func (s *Server) CheckpointSandbox(ctx context.Context, req *nodev1.CheckpointSandboxRequest) (*nodev1.CheckpointSandboxResponse, error) {
	if err := first(checkCommand(req.GetCommand()), checkUID("uid", req.GetUid()), checkUID("snapshot_uid", req.GetSnapshotUid())); err != nil {
		return nil, err
	}
	resp := &nodev1.CheckpointSandboxResponse{}
	return run(ctx, s, "CheckpointSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		snap, err := s.Runner.CheckpointSandbox(ctx, runner.CaptureRequest{
			UID: req.GetUid(), SnapshotUID: req.GetSnapshotUid(), Tenant: req.GetCommand().GetTenant(), CommandID: req.GetCommand().GetCommandId(),
		})
		if err == nil {
			resp.Snapshot = wire.SnapshotObservationToProto(snap)
		}
		return err
	})
}

// PauseSandbox implements AgentService.
func (s *Server) PauseSandbox(ctx context.Context, req *nodev1.PauseSandboxRequest) (*nodev1.PauseSandboxResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	resp := &nodev1.PauseSandboxResponse{}
	return run(ctx, s, "PauseSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.PauseSandbox(ctx, req.GetUid(), req.GetIfUnusedFor().AsDuration())
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// ResumeSandbox implements AgentService.
func (s *Server) ResumeSandbox(ctx context.Context, req *nodev1.ResumeSandboxRequest) (*nodev1.ResumeSandboxResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	resp := &nodev1.ResumeSandboxResponse{}
	return run(ctx, s, "ResumeSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.ResumeSandbox(ctx, req.GetUid())
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// ClaimSandbox implements AgentService.
func (s *Server) ClaimSandbox(ctx context.Context, req *nodev1.ClaimSandboxRequest) (*nodev1.ClaimSandboxResponse, error) {
	if err := first(checkCommand(req.GetCommand()), checkUID("uid", req.GetUid())); err != nil {
		return nil, err
	}
	for _, p := range []*sandbox.Problem{sandbox.ValidateName("name", req.GetName()), sandbox.ValidateHostname("hostname", req.GetHostname()), sandbox.ValidateEnv("env", req.GetEnv())} {
		if err := wire.FromProblem(p); err != nil {
			return nil, err
		}
	}
	resp := &nodev1.ClaimSandboxResponse{}
	return run(ctx, s, "ClaimSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.ClaimSandbox(ctx, runner.ClaimRequest{
			UID: req.GetUid(), Tenant: req.GetCommand().GetTenant(), Name: req.GetName(), Generation: req.GetGeneration(),
			CommandID: req.GetCommand().GetCommandId(), Hostname: req.GetHostname(), Env: req.GetEnv(),
		})
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// HibernateSandbox implements AgentService.
func (s *Server) HibernateSandbox(ctx context.Context, req *nodev1.HibernateSandboxRequest) (*nodev1.HibernateSandboxResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	resp := &nodev1.HibernateSandboxResponse{}
	return run(ctx, s, "HibernateSandbox", req.GetCommand(), req, resp, func(ctx context.Context) error {
		o, err := s.Runner.HibernateSandbox(ctx, req.GetUid(), req.GetIfUnusedFor().AsDuration())
		if err == nil {
			resp.Sandbox = o.Proto()
		}
		return err
	})
}

// DeleteSnapshot implements AgentService.
func (s *Server) DeleteSnapshot(ctx context.Context, req *nodev1.DeleteSnapshotRequest) (*nodev1.DeleteSnapshotResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	return run(ctx, s, "DeleteSnapshot", req.GetCommand(), req, &nodev1.DeleteSnapshotResponse{}, func(ctx context.Context) error {
		return s.Runner.DeleteSnapshot(ctx, req.GetUid())
	})
}

// CreateVolume implements AgentService.
func (s *Server) CreateVolume(ctx context.Context, req *nodev1.CreateVolumeRequest) (*nodev1.CreateVolumeResponse, error) {
	if err := first(checkCommand(req.GetCommand()), checkUID("uid", req.GetUid())); err != nil {
		return nil, err
	}
	if req.GetSizeLimitBytes() < 0 {
		return nil, errs.New(errs.InvalidField, "size_limit_bytes: must not be negative").With("field", "size_limit_bytes")
	}
	resp := &nodev1.CreateVolumeResponse{}
	return run(ctx, s, "CreateVolume", req.GetCommand(), req, resp, func(ctx context.Context) error {
		v, err := s.Volumes.CreateVolume(ctx, VolumeRequest{
			UID: req.GetUid(), Tenant: req.GetCommand().GetTenant(), SizeLimitBytes: req.GetSizeLimitBytes(),
			SourceUID: req.GetSourceUid(), FreezeSandboxUID: req.GetFreezeSandboxUid(),
		})
		if err == nil {
			resp.Volume = wire.VolumeObservationToProto(v)
		}
		return err
	})
}

// DeleteVolume implements AgentService.
func (s *Server) DeleteVolume(ctx context.Context, req *nodev1.DeleteVolumeRequest) (*nodev1.DeleteVolumeResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	return run(ctx, s, "DeleteVolume", req.GetCommand(), req, &nodev1.DeleteVolumeResponse{}, func(ctx context.Context) error {
		return s.Volumes.DeleteVolume(ctx, req.GetUid())
	})
}

// PullImage implements AgentService. It is idempotent by itself: only the epochs are checked.
func (s *Server) PullImage(req *nodev1.PullImageRequest, stream grpc.ServerStreamingServer[nodev1.PullImageResponse]) error {
	cmd, err := command("PullImage", req.GetCommand(), req)
	if err == nil {
		err = s.Commands.Admit(stream.Context(), cmd)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	img, err := s.Images.PullImage(ctx, req.GetReference(), func(p *dormousev1.PullProgress) {
		if err := stream.Send(&nodev1.PullImageResponse{Event: &nodev1.PullImageResponse_Progress{Progress: p}}); err != nil {
			cancel(err)
		}
	})
	if err != nil {
		return err
	}
	return stream.Send(&nodev1.PullImageResponse{Event: &nodev1.PullImageResponse_Image{Image: img}})
}

// RemoveImage implements AgentService.
func (s *Server) RemoveImage(ctx context.Context, req *nodev1.RemoveImageRequest) (*nodev1.RemoveImageResponse, error) {
	return run(ctx, s, "RemoveImage", req.GetCommand(), req, &nodev1.RemoveImageResponse{}, func(ctx context.Context) error {
		return s.Images.RemoveImage(ctx, req.GetDigest())
	})
}

// GetSandboxNetwork implements AgentService.
func (s *Server) GetSandboxNetwork(ctx context.Context, req *nodev1.GetSandboxNetworkRequest) (*nodev1.GetSandboxNetworkResponse, error) {
	if err := checkUID("uid", req.GetUid()); err != nil {
		return nil, err
	}
	n, err := s.Networks.SandboxNetwork(ctx, req.GetTenant(), req.GetUid())
	return &nodev1.GetSandboxNetworkResponse{Network: n}, err
}

// GetInventory implements AgentService.
func (s *Server) GetInventory(ctx context.Context, req *nodev1.GetInventoryRequest) (*nodev1.GetInventoryResponse, error) {
	return s.Inventory.Inventory(ctx, req.GetAfter(), int(req.GetPageSize()))
}

// ReadJournal implements AgentService.
func (s *Server) ReadJournal(_ context.Context, req *nodev1.ReadJournalRequest) (*nodev1.ReadJournalResponse, error) {
	if key := req.GetKey(); key != "" {
		e, err := s.Inventory.JournalEntry(key)
		if e == nil || err != nil {
			return &nodev1.ReadJournalResponse{}, err
		}
		return &nodev1.ReadJournalResponse{Entries: []*nodev1.JournalEntry{e}}, nil
	}
	entries, next, err := s.Inventory.Journal(req.GetAfter(), int(req.GetPageSize()))
	return &nodev1.ReadJournalResponse{Entries: entries, Next: next}, err
}
