package api

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func timeToProto(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

type nodeService struct {
	dormousev1.UnimplementedNodeServiceServer
	*Server
}

func resourcesToProto(cpu, memory, disk, sandboxes int64) *dormousev1.NodeResources {
	return &dormousev1.NodeResources{CpuMillis: cpu, MemoryBytes: memory, DiskBytes: disk, Sandboxes: sandboxes}
}

func nodeToProto(v sessions.View) *dormousev1.Node {
	res := func(r records.Resources) *dormousev1.NodeResources {
		return resourcesToProto(r.CPUMillis, r.MemoryBytes, r.DiskBytes, r.Sandboxes)
	}
	placed := func(r placement.Resources) *dormousev1.NodeResources {
		return resourcesToProto(r.CPUMillis, r.MemoryBytes, r.DiskBytes, r.Sandboxes)
	}
	n := &dormousev1.Node{Name: v.Name, SessionEpoch: v.SessionEpoch, Labels: v.Labels, Cordoned: v.Cordoned, Online: v.Online,
		Capacity: res(v.Capacity), Allocatable: res(v.Allocatable), Requested: placed(v.Requested), RuntimeBundles: v.RuntimeBundles, NetworkModes: wire.NetworkModesToProto(v.Networks),
		CpuFeatures: v.CPUFeatures, LastHeartbeat: timeToProto(v.LastBeat), Version: v.Version, Address: v.Address, Memory: v.Memory}
	ready := &dormousev1.Condition{Type: "Ready", Status: v.Online && len(v.Problems) == 0, Reason: "Online"}
	switch {
	case !v.Online:
		ready.Reason, ready.Message = "Away", "no session; what it holds is unknown until it is back"
	case len(v.Problems) > 0:
		ready.Reason = "Unhealthy"
	}
	n.Conditions = append(n.Conditions, ready)
	for _, said := range []map[string]string{v.Problems, v.Notices} {
		for _, k := range slices.Sorted(maps.Keys(said)) {
			n.Conditions = append(n.Conditions, &dormousev1.Condition{Type: k, Status: true, Reason: k, Message: said[k]})
		}
	}
	return n
}

// views gives the nodes, which only the leader knows, to an operator.
func (s nodeService) views(ctx context.Context) ([]sessions.View, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	if _, err := s.cfg.Engine(); err != nil {
		return nil, err
	}
	return s.cfg.Nodes.Views(), nil
}

func (s nodeService) node(ctx context.Context, name string) (*dormousev1.Node, error) {
	views, err := s.views(ctx)
	if err != nil {
		return nil, err
	}
	for _, v := range views {
		if v.Name == name {
			return nodeToProto(v), nil
		}
	}
	return nil, errs.New(errs.ObjectNotFound, "there is no node %q", name).With("kind", "node").With("name", name)
}

func (s nodeService) GetNode(ctx context.Context, req *dormousev1.GetNodeRequest) (*dormousev1.GetNodeResponse, error) {
	n, err := s.node(ctx, req.GetName())
	return &dormousev1.GetNodeResponse{Node: n}, err
}

func (s nodeService) ListNodes(ctx context.Context, req *dormousev1.ListNodesRequest) (*dormousev1.ListNodesResponse, error) {
	views, err := s.views(ctx)
	if err != nil {
		return nil, err
	}
	page, next, err := slicePage(views, req.GetPageSize(), req.GetPageToken(), "nodes", func(v sessions.View) string { return v.Name })
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListNodesResponse{NextPageToken: next}
	for _, v := range page {
		resp.Nodes = append(resp.Nodes, nodeToProto(v))
	}
	return resp, nil
}

// slicePage gives a page of what is in memory, sorted by key.
func slicePage[T any](all []T, size int32, tok, filter string, key func(T) string) ([]T, string, error) {
	n, err := catalog.PageSize(int(size))
	if err != nil {
		return nil, "", err
	}
	t, err := parseToken(tok, filterID(filter))
	if err != nil {
		return nil, "", err
	}
	from := 0
	for from < len(all) && t.After != "" && strings.Compare(key(all[from]), t.After) <= 0 {
		from++
	}
	page := all[from:min(from+n, len(all))]
	if from+n >= len(all) {
		return page, "", nil
	}
	t.After = key(page[len(page)-1])
	return page, t.encode(), nil
}

func (s nodeService) cordon(ctx context.Context, operationID, name string, cordoned bool) (*dormousev1.Node, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	e, c, err := s.mutate(ctx, operationID)
	if err != nil {
		return nil, err
	}
	if _, err := e.CordonNode(ctx, c, operations.Cordon{Name: name}, cordoned); err != nil {
		return nil, err
	}
	return s.node(ctx, name)
}

func (s nodeService) CordonNode(ctx context.Context, req *dormousev1.CordonNodeRequest) (*dormousev1.CordonNodeResponse, error) {
	n, err := s.cordon(ctx, req.GetOperationId(), req.GetName(), true)
	return &dormousev1.CordonNodeResponse{Node: n}, err
}

func (s nodeService) UncordonNode(ctx context.Context, req *dormousev1.UncordonNodeRequest) (*dormousev1.UncordonNodeResponse, error) {
	n, err := s.cordon(ctx, req.GetOperationId(), req.GetName(), false)
	return &dormousev1.UncordonNodeResponse{Node: n}, err
}

type imageService struct {
	dormousev1.UnimplementedImageServiceServer
	*Server
}

// PullImage asks the nodes at once and sends their progress as it comes.
func (s imageService) PullImage(req *dormousev1.PullImageRequest, stream grpc.ServerStreamingServer[dormousev1.PullImageResponse]) error {
	ctx := stream.Context()
	id, err := auth.From(ctx)
	if err != nil {
		return err
	}
	if req.GetReference() == "" || len(req.GetReference()) > 512 {
		return errs.New(errs.InvalidReference, "reference: name an image, in at most 512 bytes").With("image", req.GetReference())
	}
	if _, err := s.cfg.Engine(); err != nil {
		return err
	}
	nodes, err := s.pullers(req.GetNode())
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var whole *dormousev1.Image
	group, groupCtx := errgroup.WithContext(ctx)
	for _, node := range nodes {
		group.Go(func() error {
			c := operations.Command{ID: "pull/" + uid.New(), Tenant: id.Tenant, RequestID: obs.RequestID(ctx)}
			img, err := s.cfg.Agents.PullImage(groupCtx, node, c, req.GetReference(), func(p *dormousev1.PullProgress) error {
				mu.Lock()
				defer mu.Unlock()
				return stream.Send(&dormousev1.PullImageResponse{Event: &dormousev1.PullImageResponse_Progress{Progress: p}})
			})
			if err != nil {
				return err
			}
			s.cfg.Nodes.LearnImage(node, img)
			mu.Lock()
			defer mu.Unlock()
			if whole == nil {
				whole = proto.CloneOf(img)
				whole.Nodes = nil
			}
			whole.Nodes = append(whole.Nodes, node)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	slices.Sort(whole.Nodes)
	return stream.Send(&dormousev1.PullImageResponse{Event: &dormousev1.PullImageResponse_Image{Image: whole}})
}

// pullers are the nodes to pull on: the one, or all that are online.
func (s imageService) pullers(only string) ([]string, error) {
	var nodes []string
	for _, v := range s.cfg.Nodes.Views() {
		if v.Online && (only == "" || v.Name == only) {
			nodes = append(nodes, v.Name)
		}
	}
	if len(nodes) > 0 {
		return nodes, nil
	}
	if only != "" {
		return nil, errs.New(errs.NodeAway, "node %s is not online", only).With("node", only)
	}
	return nil, errs.New(errs.NoNodeFits, "no node is online")
}

func (s imageService) ListImages(ctx context.Context, req *dormousev1.ListImagesRequest) (*dormousev1.ListImagesResponse, error) {
	if _, err := auth.From(ctx); err != nil {
		return nil, err
	}
	if _, err := s.cfg.Engine(); err != nil {
		return nil, err
	}
	page, next, err := slicePage(s.cfg.Nodes.Images(), req.GetPageSize(), req.GetPageToken(), "images",
		func(i *dormousev1.Image) string { return i.GetDigest() + " " + i.GetReference() })
	return &dormousev1.ListImagesResponse{Images: page, NextPageToken: next}, err
}

func (s imageService) DeleteImage(ctx context.Context, req *dormousev1.DeleteImageRequest) (*dormousev1.DeleteImageResponse, error) {
	id, err := auth.Operator(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := s.cfg.Engine(); err != nil {
		return nil, err
	}
	if req.GetDigest() == "" {
		return nil, errs.New(errs.InvalidField, "digest: name an image by its digest").With("field", "digest")
	}
	found := false
	var refused error // the first: the other nodes are asked all the same
	for _, v := range s.cfg.Nodes.Views() {
		if !v.Online {
			continue
		}
		there, err := s.removeImage(ctx, id.Tenant, v.Name, req.GetDigest())
		found = found || there
		if err != nil && refused == nil {
			refused = errs.From(err).With("node", v.Name)
		}
	}
	if refused != nil {
		return nil, refused
	}
	if !found {
		return nil, errs.New(errs.ObjectNotFound, "no node that is online has image %q", req.GetDigest()).With("kind", "image").With("digest", req.GetDigest())
	}
	return &dormousev1.DeleteImageResponse{}, nil
}

// removeImage removes an image from a node and tells whether it was there. The node itself is asked: what
// it said with its last heartbeat may be old.
func (s imageService) removeImage(ctx context.Context, tenant, node, digest string) (bool, error) {
	inv, _, err := s.cfg.Agents.Inventory(ctx, node, "image/"+digest) // the page that begins with the digest, if it is there
	if err != nil {
		return false, err
	}
	if !slices.ContainsFunc(inv.GetImages(), func(i *dormousev1.Image) bool { return i.GetDigest() == digest }) {
		return false, nil
	}
	c := operations.Command{ID: "remove-image/" + uid.New(), Tenant: tenant, RequestID: obs.RequestID(ctx)}
	if err := s.cfg.Agents.RemoveImage(ctx, node, c, digest); err != nil {
		return true, err
	}
	s.cfg.Nodes.ForgetImage(node, digest)
	return true, nil
}

type operationService struct {
	dormousev1.UnimplementedOperationServiceServer
	*Server
}

func (s operationService) GetOperation(ctx context.Context, req *dormousev1.GetOperationRequest) (*dormousev1.GetOperationResponse, error) {
	rec, err := s.get(ctx, catalog.KindOperation, "operation_id", req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := operations.OperationOf(rec)
	if err != nil {
		return nil, err
	}
	p := &dormousev1.Operation{OperationId: op.ID, Kind: string(op.Kind), Uids: op.UIDs(), CreateTime: timeToProto(op.Created), DoneTime: timeToProto(op.Done)}
	switch op.State {
	case operations.Pending:
		p.State = dormousev1.OperationState_OPERATION_STATE_PENDING
	case operations.Succeeded:
		p.State = dormousev1.OperationState_OPERATION_STATE_SUCCEEDED
	case operations.Failed:
		p.State = dormousev1.OperationState_OPERATION_STATE_FAILED
	}
	if op.Error != nil {
		p.ErrorCode, p.ErrorReason, p.ErrorMessage = string(op.Error.Code), string(op.Error.Reason), op.Error.Message
	}
	return &dormousev1.GetOperationResponse{Operation: p}, nil
}

type eventService struct {
	dormousev1.UnimplementedEventServiceServer
	*Server
}

func (s eventService) ListEvents(ctx context.Context, req *dormousev1.ListEventsRequest) (*dormousev1.ListEventsResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	sel := selection{query: catalog.Query{Kind: catalog.KindEvent, Tenant: id.Tenant},
		size: req.GetPageSize(), token: req.GetPageToken(), filter: filterID("events", req.GetObjectUid())}
	all, next, err := list(ctx, s.Server, sel, records.EventOf, func(ev *records.Event) bool {
		return req.GetObjectUid() == "" || ev.ObjectUID == req.GetObjectUid()
	})
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListEventsResponse{NextPageToken: next}
	for _, ev := range all {
		resp.Events = append(resp.Events, &dormousev1.Event{Uid: ev.UID, ObjectKind: ev.ObjectKind, ObjectUid: ev.ObjectUID,
			Reason: ev.Reason, Message: ev.Message, Warning: ev.Warning, Time: timeToProto(ev.Time)})
	}
	return resp, nil
}
