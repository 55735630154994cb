package api

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

type sandboxService struct {
	dormousev1.UnimplementedSandboxServiceServer
	*Server
}

func sandboxToProto(sb *records.Sandbox) *dormousev1.Sandbox {
	return wire.SandboxToProto(sb.Sandbox, wire.Record{Revision: sb.Revision, Updated: sb.Updated})
}

// CreateSandbox implements the service, as the following do.
func (s sandboxService) CreateSandbox(ctx context.Context, req *dormousev1.CreateSandboxRequest) (*dormousev1.CreateSandboxResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	spec, err := wire.SpecFromProto(req.GetSpec())
	if err != nil {
		return nil, err
	}
	op, err := e.CreateSandbox(ctx, c, operations.CreateSandbox{Name: req.GetName(), Labels: req.GetLabels(), Spec: spec, SecretEnv: req.GetSecretEnv()})
	if err != nil {
		return nil, err
	}
	sb, err := one(ctx, e, op)
	if err != nil {
		return nil, err
	}
	return &dormousev1.CreateSandboxResponse{Sandbox: sb, OperationId: op.ID}, nil
}

// one gives the only sandbox that an operation made.
func one(ctx context.Context, e *operations.Engine, op *operations.Operation) (*dormousev1.Sandbox, error) {
	made, err := e.Copies(ctx, op)
	if err != nil {
		return nil, err
	}
	if len(made) != 1 {
		return nil, errs.New(errs.ObjectNotFound, "operation %s succeeded; its sandbox was deleted since", op.ID).With("kind", "sandbox")
	}
	return sandboxToProto(made[0]), nil
}

func (s sandboxService) GetSandbox(ctx context.Context, req *dormousev1.GetSandboxRequest) (*dormousev1.GetSandboxResponse, error) {
	sb, err := s.sandbox(ctx, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	return &dormousev1.GetSandboxResponse{Sandbox: sandboxToProto(sb)}, nil
}

// networkTime bounds how long a node is asked for its counters.
const networkTime = 5 * time.Second

// GetSandboxNetwork asks the node; what has none says so by itself.
func (s sandboxService) GetSandboxNetwork(ctx context.Context, req *dormousev1.GetSandboxNetworkRequest) (*dormousev1.GetSandboxNetworkResponse, error) {
	sb, err := s.sandbox(ctx, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	mode := wire.NetworkModesToProto([]sandbox.NetworkMode{cmp.Or(sb.Spec.Network, sandbox.NetworkNone)})[0]
	nothing := &dormousev1.GetSandboxNetworkResponse{Network: &dormousev1.SandboxNetwork{Mode: mode}}
	if sb.Status.Node == "" || sb.Spec.Network != sandbox.NetworkOutbound {
		return nothing, nil
	}
	place, err := s.placeOf(ctx, sb)
	if err != nil {
		return nil, err
	}
	cc, err := s.cfg.Streams.Conn(ctx, place, false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, networkTime)
	defer cancel()
	resp, err := nodev1.NewAgentServiceClient(cc).GetSandboxNetwork(ctx, &nodev1.GetSandboxNetworkRequest{Tenant: sb.Tenant, Uid: sb.UID})
	if errs.Has(err, errs.ObjectNotFound) { // not yet, or not any more
		return nothing, nil
	}
	return &dormousev1.GetSandboxNetworkResponse{Network: resp.GetNetwork()}, err
}

func (s sandboxService) ListSandboxes(ctx context.Context, req *dormousev1.ListSandboxesRequest) (*dormousev1.ListSandboxesResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	labels, err := parseLabels(req.GetLabels())
	if err != nil {
		return nil, err
	}
	phase, err := wire.SandboxPhaseFromProto(req.GetPhase())
	if err != nil {
		return nil, err
	}
	q := catalog.Query{Kind: catalog.KindSandbox, Tenant: id.Tenant, Node: req.GetNode()}
	if phase != "" {
		q.Phases = []string{string(phase)}
	}
	if req.GetNode() != "" {
		if err := catalog.ValidateNode(req.GetNode()); err != nil {
			return nil, err
		}
	}
	seq, err := s.cfg.Store.Seq(ctx) // before the list, so that a watch from it misses nothing
	if err != nil {
		return nil, err
	}
	sorted := slices.Sorted(slices.Values(req.GetLabels()))
	sel := selection{query: q, size: req.GetPageSize(), token: req.GetPageToken(),
		filter: filterID("sandboxes", req.GetName(), req.GetNode(), string(phase), fmt.Sprintf("%q", sorted))}
	all, next, err := list(ctx, s.Server, sel, records.SandboxOf, func(sb *records.Sandbox) bool {
		return !sb.Hidden() && (req.GetNode() == "" || sb.Status.Node == req.GetNode()) && (req.GetName() == "" || sb.Name == req.GetName()) && hasLabels(sb.Labels, labels)
	})
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListSandboxesResponse{NextPageToken: next, Sequence: seq}
	for _, sb := range all {
		resp.Sandboxes = append(resp.Sandboxes, sandboxToProto(sb))
	}
	return resp, nil
}

func (s sandboxService) DeleteSandbox(ctx context.Context, req *dormousev1.DeleteSandboxRequest) (*dormousev1.DeleteSandboxResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.DeleteSandbox(ctx, c, operations.Delete{UID: req.GetUid()})
	if err != nil {
		return nil, err
	}
	return &dormousev1.DeleteSandboxResponse{OperationId: op.ID}, nil
}

func (s sandboxService) WatchSandboxes(req *dormousev1.WatchSandboxesRequest, stream grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
	return s.watch(stream.Context(), catalog.KindSandbox, req.GetAfterSequence(), req.GetUid(), func(w watched) error {
		resp := &dormousev1.WatchSandboxesResponse{Sequence: w.seq, Uid: w.uid, Deleted: w.rec == nil}
		if w.rec != nil {
			sb, err := records.SandboxOf(*w.rec)
			if err != nil {
				return err
			}
			if sb.Hidden() {
				return nil
			}
			resp.Sandbox = sandboxToProto(sb)
		}
		return stream.Send(resp)
	})
}

func (s sandboxService) CheckpointSandbox(ctx context.Context, req *dormousev1.CheckpointSandboxRequest) (*dormousev1.CheckpointSandboxResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.CheckpointSandbox(ctx, c, operations.CheckpointSandbox{UID: req.GetUid(), Name: req.GetName(), Labels: req.GetLabels()})
	if err != nil {
		return nil, err
	}
	if op.Result == nil || op.Result.Snapshot == nil {
		return nil, errs.New(errs.ObjectNotFound, "operation %s succeeded; its result was too large to keep: get snapshot %s", op.ID, op.Plan.SnapshotUID)
	}
	return &dormousev1.CheckpointSandboxResponse{Snapshot: snapshotToProto(op.Result.Snapshot), OperationId: op.ID}, nil
}

func (s sandboxService) RestoreSandbox(ctx context.Context, req *dormousev1.RestoreSandboxRequest) (*dormousev1.RestoreSandboxResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	bindings, err := bindingsOf(req.GetVolumes())
	if err != nil {
		return nil, err
	}
	op, err := e.RestoreSandbox(ctx, c, operations.RestoreSandbox{SnapshotUID: req.GetSnapshotUid(), Name: req.GetName(), Labels: req.GetLabels(), Volumes: bindings})
	if err != nil {
		return nil, err
	}
	sb, err := one(ctx, e, op)
	if err != nil {
		return nil, err
	}
	return &dormousev1.RestoreSandboxResponse{Sandbox: sb, OperationId: op.ID}, nil
}

func (s sandboxService) ForkSandbox(ctx context.Context, req *dormousev1.ForkSandboxRequest) (*dormousev1.ForkSandboxResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	bindings, err := bindingsOf(req.GetVolumes())
	if err != nil {
		return nil, err
	}
	op, err := e.ForkSandbox(ctx, c, operations.ForkSandbox{SandboxUID: req.GetSandboxUid(), SnapshotUID: req.GetSnapshotUid(), Count: int(req.GetCount()),
		NamePrefix: req.GetNamePrefix(), Labels: req.GetLabels(), Volumes: bindings})
	if err != nil {
		return nil, err
	}
	made, err := e.Copies(ctx, op)
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ForkSandboxResponse{SnapshotUid: op.Plan.SnapshotUID, OperationId: op.ID}
	for _, sb := range made {
		resp.Sandboxes = append(resp.Sandboxes, sandboxToProto(sb))
	}
	return resp, nil
}

func (s sandboxService) UpdateSandbox(ctx context.Context, req *dormousev1.UpdateSandboxRequest) (*dormousev1.UpdateSandboxResponse, error) {
	change, err := updateOf(ctx, req)
	if err != nil {
		return nil, err
	}
	sb, op, err := s.change(ctx, req.GetOperationId(), func(e *operations.Engine, c operations.Call) (*operations.Operation, error) {
		return e.UpdateSandbox(ctx, c, change)
	})
	return &dormousev1.UpdateSandboxResponse{Sandbox: sb, OperationId: op}, err
}

// updateOf reads what the mask names.
func updateOf(ctx context.Context, req *dormousev1.UpdateSandboxRequest) (operations.UpdateSandbox, error) {
	u := operations.UpdateSandbox{UID: req.GetUid(), IfRevision: req.GetIfRevision()}
	if u.IfRevision == 0 {
		match, err := ifMatch(ctx)
		if err != nil {
			return u, err
		}
		u.IfRevision = match
	}
	for _, path := range req.GetUpdateMask().GetPaths() {
		switch path {
		case "labels":
			labels := req.GetLabels()
			u.Labels = &labels
		case "lifetime":
			d, err := wire.TimerFromProto(path, req.GetLifetime())
			if err != nil {
				return u, err
			}
			u.Lifetime = &d
		case "idle_timeout":
			d, err := wire.TimerFromProto(path, req.GetIdleTimeout())
			if err != nil {
				return u, err
			}
			u.Idle = &d
		case "on_idle":
			on, err := wire.IdleActionFromProto(req.GetOnIdle())
			if err != nil {
				return u, err
			}
			u.OnIdle = &on
		case "wake_on_use":
			on := req.GetWakeOnUse()
			u.WakeOnUse = &on
		case "egress":
			policy, err := wire.EgressFromProto(req.GetEgress())
			if err != nil {
				return u, err
			}
			u.Egress = &operations.EgressUpdate{Policy: policy}
		default:
			return u, errs.New(errs.UnknownField, "update_mask: %q cannot be changed; labels, idle_timeout, on_idle, lifetime, wake_on_use and egress can", path).With("field", "update_mask")
		}
	}
	return u, nil
}

// ifMatch is the revision of REST's header If-Match, 0 for none.
func ifMatch(ctx context.Context) (uint64, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	got := md.Get(wire.IfMatchKey)
	if len(got) == 0 {
		return 0, nil
	}
	n, err := strconv.ParseUint(strings.Trim(got[0], `"`), 10, 64)
	if err != nil || n == 0 {
		return 0, errs.New(errs.InvalidField, "If-Match: a revision as the sandbox's meta has it, got %q", got[0]).With("field", "if_revision")
	}
	return n, nil
}

func (s sandboxService) PauseSandbox(ctx context.Context, req *dormousev1.PauseSandboxRequest) (*dormousev1.PauseSandboxResponse, error) {
	sb, op, err := s.change(ctx, req.GetOperationId(), func(e *operations.Engine, c operations.Call) (*operations.Operation, error) {
		return e.PauseSandbox(ctx, c, operations.Turn{UID: req.GetUid()})
	})
	return &dormousev1.PauseSandboxResponse{Sandbox: sb, OperationId: op}, err
}

func (s sandboxService) ResumeSandbox(ctx context.Context, req *dormousev1.ResumeSandboxRequest) (*dormousev1.ResumeSandboxResponse, error) {
	sb, op, err := s.change(ctx, req.GetOperationId(), func(e *operations.Engine, c operations.Call) (*operations.Operation, error) {
		return e.ResumeSandbox(ctx, c, operations.Turn{UID: req.GetUid()})
	})
	return &dormousev1.ResumeSandboxResponse{Sandbox: sb, OperationId: op}, err
}

func (s sandboxService) HibernateSandbox(ctx context.Context, req *dormousev1.HibernateSandboxRequest) (*dormousev1.HibernateSandboxResponse, error) {
	sb, op, err := s.change(ctx, req.GetOperationId(), func(e *operations.Engine, c operations.Call) (*operations.Operation, error) {
		return e.HibernateSandbox(ctx, c, operations.Turn{UID: req.GetUid()})
	})
	return &dormousev1.HibernateSandboxResponse{Sandbox: sb, OperationId: op}, err
}

func (s sandboxService) ClaimSandbox(ctx context.Context, req *dormousev1.ClaimSandboxRequest) (*dormousev1.ClaimSandboxResponse, error) {
	claim, err := claimOf(req)
	if err != nil {
		return nil, err
	}
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.ClaimSandbox(ctx, c, claim)
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ClaimSandboxResponse{OperationId: op.ID}
	if len(op.Plan.Copies) > 0 {
		resp.Sandbox, err = one(ctx, e, op)
		return resp, err
	}
	sb, err := e.Changed(ctx, op)
	if err != nil {
		return nil, err
	}
	resp.Sandbox, resp.PoolUid = sandboxToProto(sb), sb.ClaimedFrom
	return resp, nil
}

// claimOf reads what of the template's settings a claim replaces.
func claimOf(req *dormousev1.ClaimSandboxRequest) (operations.ClaimSandbox, error) {
	c := operations.ClaimSandbox{TemplateUID: req.GetTemplateUid(), PoolUID: req.GetPoolUid(), Name: req.GetName(), Labels: req.GetLabels(), WakeOnUse: req.WakeOnUse, Env: req.GetEnv()}
	switch req.GetFallback() {
	case dormousev1.ClaimFallback_CLAIM_FALLBACK_UNSPECIFIED, dormousev1.ClaimFallback_CLAIM_FALLBACK_RESTORE:
	case dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE:
		c.Refuse = true
	default:
		return c, errs.New(errs.InvalidField, "fallback: restore or refuse").With("field", "fallback")
	}
	var err error
	if c.OnIdle, err = wire.IdleActionFromProto(req.GetOnIdle()); err != nil {
		return c, err
	}
	for _, t := range []struct {
		field string
		from  *durationpb.Duration
		to    **time.Duration
	}{{"lifetime", req.GetLifetime(), &c.Lifetime}, {"idle_timeout", req.GetIdleTimeout(), &c.Idle}} {
		if t.from == nil {
			continue
		}
		d, err := wire.TimerFromProto(t.field, t.from)
		if err != nil {
			return c, err
		}
		*t.to = &d
	}
	return c, nil
}

// change runs an operation that changes one sandbox, and gives the sandbox and the operation's id.
func (s sandboxService) change(ctx context.Context, operationID string, run func(*operations.Engine, operations.Call) (*operations.Operation, error)) (*dormousev1.Sandbox, string, error) {
	e, c, err := s.mutate(ctx, operationID)
	if err != nil {
		return nil, "", err
	}
	op, err := run(e, c)
	if err != nil {
		return nil, "", err
	}
	sb, err := e.Changed(ctx, op)
	if err != nil {
		return nil, "", err
	}
	return sandboxToProto(sb), op.ID, nil
}

func bindingsOf(in []*dormousev1.VolumeBinding) ([]operations.Binding, error) {
	if len(in) > 64 {
		return nil, errs.New(errs.LimitExceeded, "volumes: at most 64 bindings, got %d", len(in)).With("field", "volumes")
	}
	var out []operations.Binding
	for _, b := range in {
		policy, ok := map[dormousev1.VolumePolicy]operations.Policy{
			dormousev1.VolumePolicy_VOLUME_POLICY_UNSPECIFIED: "",
			dormousev1.VolumePolicy_VOLUME_POLICY_SAME:        operations.PolicySame,
			dormousev1.VolumePolicy_VOLUME_POLICY_CLONE:       operations.PolicyClone,
			dormousev1.VolumePolicy_VOLUME_POLICY_REPLACE:     operations.PolicyReplace,
		}[b.GetPolicy()]
		if !ok {
			return nil, errs.New(errs.InvalidField, "volumes.policy: same, clone or replace").With("field", "volumes.policy")
		}
		out = append(out, operations.Binding{Path: b.GetPath(), Policy: policy, ReplaceWith: b.GetReplaceWith()})
	}
	return out, nil
}
