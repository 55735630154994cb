// Package debug answers agentctl: what is recorded, what is observed, and where the two differ. It is
// served on a unix socket that only root can open, and changes nothing but through doctor's fix.
package debug

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/internal/reconcile"
	"github.com/dormouse-run/dormouse/pkg/errs"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Object is one thing of the node's.
type Object struct {
	UID, Tenant, State string
	Columns            map[string]string
	// Detail gives the record and what is observed, for Inspect.
	Detail func(ctx context.Context) (any, error)
}

// key is the object's place in the order of pages. Images may have several references.
func (o Object) key() string { return o.UID + " " + o.Columns["reference"] }

func pageSize(asked int32) (int, error) {
	if asked < 0 || asked > reconcile.MaxFindings {
		return 0, errs.New(errs.InvalidField, "page_size: %d is outside 1..%d", asked, reconcile.MaxFindings).With("field", "page_size")
	}
	if asked == 0 {
		return reconcile.MaxFindings, nil
	}
	return int(asked), nil
}

// Lister lists all objects of a kind, from the records.
type Lister func(ctx context.Context) ([]Object, error)

// Processes is what the node's process service does, without a coordinator.
type Processes interface {
	ListProcesses(ctx context.Context, req *dormousev1.ListProcessesRequest) (*dormousev1.ListProcessesResponse, error)
	Follow(ctx context.Context, req *dormousev1.ReadOutputRequest, emit func(*dormousev1.OutputChunk) error) (*dormousev1.ProcessExit, error)
}

// Server implements DebugService.
type Server struct {
	nodev1.UnimplementedDebugServiceServer

	Summary   func(ctx context.Context) (*nodev1.OverviewResponse, error)
	Objects   map[nodev1.DebugKind]Lister
	Processes Processes
	Examine   func(ctx context.Context, req reconcile.Request) ([]reconcile.Result, map[string]int, string, error)
}

// Overview implements DebugService.
func (s *Server) Overview(ctx context.Context, _ *nodev1.OverviewRequest) (*nodev1.OverviewResponse, error) {
	return s.Summary(ctx)
}

func (s *Server) list(ctx context.Context, kind nodev1.DebugKind) ([]Object, error) {
	lister, ok := s.Objects[kind]
	if !ok {
		return nil, errs.New(errs.InvalidField, "kind: sandbox, snapshot, volume, image or network").With("field", "kind")
	}
	return lister(ctx)
}

// ListDebugObjects implements DebugService.
func (s *Server) ListDebugObjects(ctx context.Context, req *nodev1.ListDebugObjectsRequest) (*nodev1.ListDebugObjectsResponse, error) {
	all, err := s.list(ctx, req.GetKind())
	if err != nil {
		return nil, err
	}
	size, err := pageSize(req.GetPageSize())
	if err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b Object) int { return strings.Compare(a.key(), b.key()) })
	resp := &nodev1.ListDebugObjectsResponse{}
	last := ""
	for _, o := range all {
		if o.key() <= req.GetAfter() {
			continue
		}
		if len(resp.GetObjects()) == size {
			resp.Next = last
			break
		}
		last = o.key()
		resp.Objects = append(resp.Objects, &nodev1.DebugObject{Uid: o.UID, Tenant: o.Tenant, State: o.State, Columns: o.Columns})
	}
	return resp, nil
}

// Inspect implements DebugService. A unique beginning of the uid will do.
func (s *Server) Inspect(ctx context.Context, req *nodev1.InspectRequest) (*nodev1.InspectResponse, error) {
	all, err := s.list(ctx, req.GetKind())
	if err != nil {
		return nil, err
	}
	o, err := pick(all, req.GetUid())
	if err != nil {
		return nil, err
	}
	detail, err := o.Detail(ctx)
	if err != nil {
		return nil, err
	}
	data, err := json.MarshalIndent(detail, "", "  ")
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "encode the details of %s: %v", o.UID, err)
	}
	return &nodev1.InspectResponse{Json: string(data)}, nil
}

// pick finds the object with the uid, or the only one whose uid begins with it.
func pick(all []Object, uid string) (Object, error) {
	var found []Object
	for _, o := range all {
		if o.UID == uid {
			return o, nil
		}
		if uid != "" && (strings.HasPrefix(o.UID, uid) || strings.HasPrefix(strings.TrimPrefix(o.UID, "sha256:"), uid)) {
			found = append(found, o)
		}
	}
	switch len(found) {
	case 0:
		return Object{}, errs.New(errs.ObjectNotFound, "this node has no such object: %q", uid).With("uid", uid)
	case 1:
		return found[0], nil
	}
	var names []string
	for _, o := range found[:min(len(found), 10)] {
		names = append(names, o.UID)
	}
	return Object{}, errs.New(errs.AmbiguousName, "%q is the beginning of %d uids; give more of it", uid, len(found)).With("matches", strings.Join(names, ","))
}

func (s *Server) sandbox(ctx context.Context, uid string) (string, error) {
	all, err := s.list(ctx, nodev1.DebugKind_DEBUG_KIND_SANDBOX)
	if err != nil {
		return "", err
	}
	o, err := pick(all, uid)
	return o.UID, err
}

// ListSandboxProcesses implements DebugService.
func (s *Server) ListSandboxProcesses(ctx context.Context, req *nodev1.ListSandboxProcessesRequest) (*nodev1.ListSandboxProcessesResponse, error) {
	uid, err := s.sandbox(ctx, req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	resp, err := s.Processes.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: uid})
	if err != nil {
		return nil, err
	}
	return &nodev1.ListSandboxProcessesResponse{Processes: resp.GetProcesses()}, nil
}

// TailOutput implements DebugService.
func (s *Server) TailOutput(req *nodev1.TailOutputRequest, stream grpc.ServerStreamingServer[nodev1.TailOutputResponse]) error {
	uid, err := s.sandbox(stream.Context(), req.GetSandboxUid())
	if err != nil {
		return err
	}
	_, err = s.Processes.Follow(stream.Context(), &dormousev1.ReadOutputRequest{SandboxUid: uid, ProcessId: req.GetProcessId(), Follow: req.GetFollow()},
		func(c *dormousev1.OutputChunk) error { return stream.Send(&nodev1.TailOutputResponse{Output: c}) })
	return err
}

// Doctor implements DebugService.
func (s *Server) Doctor(ctx context.Context, req *nodev1.DoctorRequest) (*nodev1.DoctorResponse, error) {
	size, err := pageSize(req.GetPageSize())
	if err != nil {
		return nil, err
	}
	results, counts, next, err := s.Examine(ctx, reconcile.Request{Fix: req.GetFix(), After: req.GetAfter(), Limit: size})
	if err != nil {
		return nil, err
	}
	resp := &nodev1.DoctorResponse{Next: next, Checked: make(map[string]int32, len(counts))}
	for kind, n := range counts {
		resp.Checked[kind] = int32(n)
	}
	for _, r := range results {
		f := &nodev1.Finding{Kind: string(r.Kind), Name: r.Name, Recorded: r.Recorded, Observed: r.Observed, Remedy: r.Remedy, Fixed: r.Fixed}
		if r.Err != nil {
			f.Error = errs.From(r.Err).Message
		}
		resp.Findings = append(resp.Findings, f)
	}
	return resp, nil
}
