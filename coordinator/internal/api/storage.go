package api

import (
	"context"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

type snapshotService struct {
	dormousev1.UnimplementedSnapshotServiceServer
	*Server
}

func snapshotToProto(s *records.Snapshot) *dormousev1.Snapshot {
	return wire.SnapshotToProto(s.Snapshot, wire.Record{Revision: s.Revision, Updated: s.Updated})
}

func (s snapshotService) GetSnapshot(ctx context.Context, req *dormousev1.GetSnapshotRequest) (*dormousev1.GetSnapshotResponse, error) {
	rec, err := s.get(ctx, catalog.KindSnapshot, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	snap, err := records.SnapshotOf(rec)
	if err != nil {
		return nil, err
	}
	return &dormousev1.GetSnapshotResponse{Snapshot: snapshotToProto(snap)}, nil
}

// stageDeleted is the part of a list that has the tombstones, after the living.
const stageDeleted = "deleted"

func (s snapshotService) ListSnapshots(ctx context.Context, req *dormousev1.ListSnapshotsRequest) (*dormousev1.ListSnapshotsResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	phase, err := wire.SnapshotPhaseFromProto(req.GetPhase())
	if err != nil {
		return nil, err
	}
	seq, err := s.cfg.Store.Seq(ctx)
	if err != nil {
		return nil, err
	}
	filter := filterID("snapshots", req.GetName(), req.GetSourceSandboxUid(), string(phase))
	if req.GetIncludeDeleted() {
		filter += "d"
	}
	t, err := parseToken(req.GetPageToken(), filter)
	if err != nil {
		return nil, err
	}
	matches := func(name, source string) bool {
		return (req.GetName() == "" || name == req.GetName()) && (req.GetSourceSandboxUid() == "" || source == req.GetSourceSandboxUid())
	}
	resp := &dormousev1.ListSnapshotsResponse{Sequence: seq}
	if t.Stage == stageDeleted || phase == snapshot.Deleted && req.GetIncludeDeleted() {
		return resp, s.listDeleted(ctx, id.Tenant, req, t, filter, matches, resp)
	}
	q := catalog.Query{Kind: catalog.KindSnapshot, Tenant: id.Tenant}
	if phase != "" {
		q.Phases = []string{string(phase)}
	}
	sel := selection{query: q, size: req.GetPageSize(), token: req.GetPageToken(), filter: filter}
	all, next, err := list(ctx, s.Server, sel, records.SnapshotOf, func(snap *records.Snapshot) bool {
		return matches(snap.Name, snap.SourceSandboxUID)
	})
	if err != nil {
		return nil, err
	}
	for _, snap := range all {
		resp.Snapshots = append(resp.Snapshots, snapshotToProto(snap))
	}
	if next == "" && req.GetIncludeDeleted() && phase == "" {
		next = token{Version: tokenVersion, Filter: filter, Stage: stageDeleted}.encode()
	}
	resp.NextPageToken = next
	return resp, nil
}

// listDeleted gives tombstones.
func (s snapshotService) listDeleted(ctx context.Context, tenant string, req *dormousev1.ListSnapshotsRequest, t token, filter string, matches func(name, source string) bool, resp *dormousev1.ListSnapshotsResponse) error {
	size, err := catalog.PageSize(int(req.GetPageSize()))
	if err != nil {
		return err
	}
	tombs, err := s.cfg.Store.ListTombstones(ctx, tenant, catalog.KindSnapshot, t.After, size)
	if err != nil {
		return err
	}
	for _, tomb := range tombs.Tombstones {
		trace, err := records.DecodeTrace(tomb.Body)
		if err != nil {
			return err
		}
		if !matches(trace.Name, trace.Source) {
			continue
		}
		dead := snapshot.Snapshot{UID: tomb.Key.UID, Tenant: tenant, Name: trace.Name, Created: trace.Created, SourceSandboxUID: trace.Source}
		dead.Status.Phase = snapshot.Deleted
		resp.Snapshots = append(resp.Snapshots, wire.SnapshotToProto(dead, wire.Record{Revision: tomb.Revision, Updated: tomb.At}))
	}
	if tombs.Next != "" {
		resp.NextPageToken = token{Version: tokenVersion, Filter: filter, Stage: stageDeleted, After: tombs.Next}.encode()
	}
	return nil
}

func (s snapshotService) DeleteSnapshot(ctx context.Context, req *dormousev1.DeleteSnapshotRequest) (*dormousev1.DeleteSnapshotResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.DeleteSnapshot(ctx, c, operations.Delete{UID: req.GetUid()})
	if err != nil {
		return nil, err
	}
	return &dormousev1.DeleteSnapshotResponse{OperationId: op.ID}, nil
}

func (s snapshotService) WatchSnapshots(req *dormousev1.WatchSnapshotsRequest, stream grpc.ServerStreamingServer[dormousev1.WatchSnapshotsResponse]) error {
	return s.watch(stream.Context(), catalog.KindSnapshot, req.GetAfterSequence(), req.GetUid(), func(w watched) error {
		resp := &dormousev1.WatchSnapshotsResponse{Sequence: w.seq, Uid: w.uid, Deleted: w.rec == nil}
		if w.rec != nil {
			snap, err := records.SnapshotOf(*w.rec)
			if err != nil {
				return err
			}
			resp.Snapshot = snapshotToProto(snap)
		}
		return stream.Send(resp)
	})
}

type volumeService struct {
	dormousev1.UnimplementedVolumeServiceServer
	*Server
}

// maxNamed bounds the snapshots that a volume names.
const maxNamed = 100

// volumeToProto adds who uses the volume, as far as the first page of them tells.
func (s volumeService) volumeToProto(ctx context.Context, v *records.Volume) (*dormousev1.Volume, error) {
	h, err := s.cfg.Store.Referrers(ctx, records.VolumeKey(v.Tenant, v.UID), "", maxNamed)
	if err != nil {
		return nil, err
	}
	use := wire.VolumeUse{SnapshotCount: int64(h.Count)}
	for _, holder := range h.Holders {
		switch {
		case holder.Mode.Attaches():
			use.SnapshotCount--
			use.Attachments = append(use.Attachments, wire.VolumeAttachment{SandboxUID: holder.Key.UID, ReadOnly: holder.Mode == catalog.Shared})
		case holder.Key.Kind == catalog.KindSnapshot:
			use.SnapshotUIDs = append(use.SnapshotUIDs, holder.Key.UID)
		default:
			use.SnapshotCount--
		}
	}
	return wire.VolumeToProto(v.Volume, use, wire.Record{Revision: v.Revision, Updated: v.Updated}), nil
}

func (s volumeService) CreateVolume(ctx context.Context, req *dormousev1.CreateVolumeRequest) (*dormousev1.CreateVolumeResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	spec, err := wire.VolumeSpecFromProto(req.GetSpec())
	if err != nil {
		return nil, err
	}
	op, err := e.CreateVolume(ctx, c, operations.CreateVolume{Name: req.GetName(), Labels: req.GetLabels(), Spec: spec})
	if err != nil {
		return nil, err
	}
	if op.Result == nil || op.Result.Volume == nil {
		return nil, errs.New(errs.ObjectNotFound, "operation %s succeeded; get volume %s", op.ID, op.Plan.VolumeUID)
	}
	v := op.Result.Volume
	return &dormousev1.CreateVolumeResponse{OperationId: op.ID,
		Volume: wire.VolumeToProto(v.Volume, wire.VolumeUse{}, wire.Record{Revision: v.Revision, Updated: v.Updated})}, nil
}

func (s volumeService) GetVolume(ctx context.Context, req *dormousev1.GetVolumeRequest) (*dormousev1.GetVolumeResponse, error) {
	rec, err := s.get(ctx, catalog.KindVolume, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	v, err := records.VolumeOf(rec)
	if err != nil {
		return nil, err
	}
	p, err := s.volumeToProto(ctx, v)
	return &dormousev1.GetVolumeResponse{Volume: p}, err
}

func (s volumeService) ListVolumes(ctx context.Context, req *dormousev1.ListVolumesRequest) (*dormousev1.ListVolumesResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if req.GetNode() != "" {
		if err := catalog.ValidateNode(req.GetNode()); err != nil {
			return nil, err
		}
	}
	seq, err := s.cfg.Store.Seq(ctx)
	if err != nil {
		return nil, err
	}
	sel := selection{query: catalog.Query{Kind: catalog.KindVolume, Tenant: id.Tenant, Node: req.GetNode()},
		size: req.GetPageSize(), token: req.GetPageToken(), filter: filterID("volumes", req.GetName(), req.GetNode())}
	all, next, err := list(ctx, s.Server, sel, records.VolumeOf, func(v *records.Volume) bool {
		return req.GetName() == "" || v.Name == req.GetName()
	})
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListVolumesResponse{NextPageToken: next, Sequence: seq}
	for _, v := range all {
		p, err := s.volumeToProto(ctx, v)
		if err != nil {
			return nil, err
		}
		resp.Volumes = append(resp.Volumes, p)
	}
	return resp, nil
}

func (s volumeService) DeleteVolume(ctx context.Context, req *dormousev1.DeleteVolumeRequest) (*dormousev1.DeleteVolumeResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.DeleteVolume(ctx, c, operations.Delete{UID: req.GetUid()})
	if err != nil {
		return nil, err
	}
	return &dormousev1.DeleteVolumeResponse{OperationId: op.ID}, nil
}
