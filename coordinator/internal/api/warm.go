package api

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

type templateService struct {
	dormousev1.UnimplementedTemplateServiceServer
	*Server
}

func templateToProto(t *records.Template) *dormousev1.Template {
	return wire.TemplateToProto(t.Template, wire.Record{Revision: t.Revision, Updated: t.Updated})
}

// CreateTemplate implements the service, as the following do.
func (s templateService) CreateTemplate(ctx context.Context, req *dormousev1.CreateTemplateRequest) (*dormousev1.CreateTemplateResponse, error) {
	spec, err := wire.TemplateSpecFromProto(req.GetSpec())
	if err != nil {
		return nil, err
	}
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.CreateTemplate(ctx, c, operations.CreateTemplate{Name: req.GetName(), Labels: req.GetLabels(), Spec: spec})
	if err != nil {
		return nil, err
	}
	if op.Result == nil || op.Result.Template == nil {
		return nil, errs.New(errs.ObjectNotFound, "operation %s succeeded; its result was too large to keep: get template %s", op.ID, op.Plan.Target)
	}
	return &dormousev1.CreateTemplateResponse{Template: templateToProto(op.Result.Template), OperationId: op.ID}, nil
}

func (s templateService) GetTemplate(ctx context.Context, req *dormousev1.GetTemplateRequest) (*dormousev1.GetTemplateResponse, error) {
	rec, err := s.get(ctx, catalog.KindTemplate, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	t, err := records.TemplateOf(rec)
	if err != nil {
		return nil, err
	}
	return &dormousev1.GetTemplateResponse{Template: templateToProto(t)}, nil
}

func (s templateService) ListTemplates(ctx context.Context, req *dormousev1.ListTemplatesRequest) (*dormousev1.ListTemplatesResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	phase, err := wire.TemplatePhaseFromProto(req.GetPhase())
	if err != nil {
		return nil, err
	}
	q := catalog.Query{Kind: catalog.KindTemplate, Tenant: id.Tenant}
	if phase != "" {
		q.Phases = []string{string(phase)}
	}
	sel := selection{query: q, size: req.GetPageSize(), token: req.GetPageToken(), filter: filterID("templates", req.GetName(), string(phase))}
	all, next, err := list(ctx, s.Server, sel, records.TemplateOf, func(t *records.Template) bool {
		return req.GetName() == "" || t.Name == req.GetName()
	})
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListTemplatesResponse{NextPageToken: next}
	for _, t := range all {
		resp.Templates = append(resp.Templates, templateToProto(t))
	}
	return resp, nil
}

func (s templateService) DeleteTemplate(ctx context.Context, req *dormousev1.DeleteTemplateRequest) (*dormousev1.DeleteTemplateResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.DeleteTemplate(ctx, c, operations.Delete{UID: req.GetUid()})
	if err != nil {
		return nil, err
	}
	return &dormousev1.DeleteTemplateResponse{OperationId: op.ID}, nil
}

type poolService struct {
	dormousev1.UnimplementedPoolServiceServer
	*Server
}

// poolToProto counts the members: the sandboxes that refer to the pool.
func (s poolService) poolToProto(ctx context.Context, p *records.Pool) (*dormousev1.Pool, error) {
	var m wire.PoolMembers
	for after := ""; ; {
		h, err := s.cfg.Store.Referrers(ctx, records.PoolKey(p.Tenant, p.UID), after, catalog.MaxPage)
		if err != nil {
			return nil, err
		}
		keys := make([]catalog.Key, 0, len(h.Holders))
		for _, holder := range h.Holders {
			keys = append(keys, holder.Key)
		}
		recs, err := s.cfg.Store.GetMany(ctx, keys)
		if err != nil {
			return nil, err
		}
		for _, rec := range recs {
			sb, err := records.SandboxOf(rec)
			if err != nil {
				return nil, err
			}
			if sb.Pool != p.UID { // it was claimed meanwhile
				continue
			}
			m.MemoryBytes += sb.Spec.Resources.WithDefaults().MemoryRequestBytes
			switch {
			case sb.PoolReady && sb.Status.Phase == sandbox.Paused:
				m.Ready++
			case sb.Status.Phase == sandbox.Deleting || sb.Status.Phase.Terminal():
				m.Draining++
			default:
				m.Filling++
			}
		}
		if after = h.Next; after == "" {
			return wire.PoolToProto(p.Pool, m, wire.Record{Revision: p.Revision, Updated: p.Updated}), nil
		}
	}
}

// changed gives the pool of an operation that changed it.
func (s poolService) changed(ctx context.Context, op *operations.Operation) (*dormousev1.Pool, error) {
	if op.Result == nil || op.Result.Pool == nil {
		return nil, errs.New(errs.ObjectNotFound, "operation %s succeeded; its result was too large to keep: get pool %s", op.ID, op.Plan.Target)
	}
	return s.poolToProto(ctx, op.Result.Pool)
}

func (s poolService) CreatePool(ctx context.Context, req *dormousev1.CreatePoolRequest) (*dormousev1.CreatePoolResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.CreatePool(ctx, c, operations.CreatePool{Name: req.GetName(), Labels: req.GetLabels(), Spec: wire.PoolSpecFromProto(req.GetSpec())})
	if err != nil {
		return nil, err
	}
	p, err := s.changed(ctx, op)
	return &dormousev1.CreatePoolResponse{Pool: p, OperationId: op.ID}, err
}

func (s poolService) GetPool(ctx context.Context, req *dormousev1.GetPoolRequest) (*dormousev1.GetPoolResponse, error) {
	rec, err := s.get(ctx, catalog.KindPool, "uid", req.GetUid())
	if err != nil {
		return nil, err
	}
	p, err := records.PoolOf(rec)
	if err != nil {
		return nil, err
	}
	pool, err := s.poolToProto(ctx, p)
	return &dormousev1.GetPoolResponse{Pool: pool}, err
}

func (s poolService) ListPools(ctx context.Context, req *dormousev1.ListPoolsRequest) (*dormousev1.ListPoolsResponse, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if req.GetTemplateUid() != "" {
		if err := checkUID("template_uid", req.GetTemplateUid()); err != nil {
			return nil, err
		}
	}
	sel := selection{query: catalog.Query{Kind: catalog.KindPool, Tenant: id.Tenant}, size: req.GetPageSize(), token: req.GetPageToken(),
		filter: filterID("pools", req.GetName(), req.GetTemplateUid())}
	all, next, err := list(ctx, s.Server, sel, records.PoolOf, func(p *records.Pool) bool {
		return (req.GetName() == "" || p.Name == req.GetName()) && (req.GetTemplateUid() == "" || p.Spec.TemplateUID == req.GetTemplateUid())
	})
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.ListPoolsResponse{NextPageToken: next}
	for _, p := range all {
		pool, err := s.poolToProto(ctx, p)
		if err != nil {
			return nil, err
		}
		resp.Pools = append(resp.Pools, pool)
	}
	return resp, nil
}

func (s poolService) UpdatePool(ctx context.Context, req *dormousev1.UpdatePoolRequest) (*dormousev1.UpdatePoolResponse, error) {
	change, err := poolUpdateOf(ctx, req)
	if err != nil {
		return nil, err
	}
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.UpdatePool(ctx, c, change)
	if err != nil {
		return nil, err
	}
	p, err := s.changed(ctx, op)
	return &dormousev1.UpdatePoolResponse{Pool: p, OperationId: op.ID}, err
}

// poolUpdateOf reads what the mask names.
func poolUpdateOf(ctx context.Context, req *dormousev1.UpdatePoolRequest) (operations.UpdatePool, error) {
	u := operations.UpdatePool{UID: req.GetUid(), IfRevision: req.GetIfRevision()}
	if u.IfRevision == 0 {
		var err error
		if u.IfRevision, err = ifMatch(ctx); err != nil {
			return u, err
		}
	}
	for _, path := range req.GetUpdateMask().GetPaths() {
		switch path {
		case "labels":
			labels := req.GetLabels()
			u.Labels = &labels
		case "template_uid":
			template := req.GetTemplateUid()
			u.Template = &template
		case "size":
			n := int(req.GetSize())
			u.Size = &n
		case "max_members":
			n := int(req.GetMaxMembers())
			u.MaxMembers = &n
		case "max_memory_bytes":
			n := req.GetMaxMemoryBytes()
			u.MaxMemoryBytes = &n
		default:
			return u, errs.New(errs.UnknownField, "update_mask: %q cannot be changed; labels, template_uid, size, max_members and max_memory_bytes can", path).With("field", "update_mask")
		}
	}
	return u, nil
}

func (s poolService) DeletePool(ctx context.Context, req *dormousev1.DeletePoolRequest) (*dormousev1.DeletePoolResponse, error) {
	e, c, err := s.mutate(ctx, req.GetOperationId())
	if err != nil {
		return nil, err
	}
	op, err := e.DeletePool(ctx, c, operations.Delete{UID: req.GetUid()})
	if err != nil {
		return nil, err
	}
	return &dormousev1.DeletePoolResponse{OperationId: op.ID}, nil
}
