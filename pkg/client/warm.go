package client

import (
	"context"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Template is a handle: a uid and what was last seen of it.
type Template struct {
	c    *Client
	UID  string
	Last *dormousev1.Template // nil until it was read
}

// Template gives the handle of a uid without asking the server.
func (c *Client) Template(uid string) *Template { return &Template{c: c, UID: uid} }

// CreateTemplate returns when the template's golden snapshot is there. When a command of it failed, the error is SETUP_FAILED with the end
// of what the command said in its details.
func (c *Client) CreateTemplate(ctx context.Context, req *dormousev1.CreateTemplateRequest) (*Template, error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CreateTemplateResponse, error) {
		return c.templates.CreateTemplate(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return &Template{c: c, UID: resp.GetTemplate().GetMeta().GetUid(), Last: resp.GetTemplate()}, nil
}

// FindTemplate gives the template of a uid, or the living one of a name.
func (c *Client) FindTemplate(ctx context.Context, ref string) (*Template, error) {
	if uid.Check(ref) == nil {
		t := c.Template(ref)
		return t, t.Refresh(ctx)
	}
	found, err := byName(ctx, "template", ref, living(c.ListTemplates(ctx, &dormousev1.ListTemplatesRequest{Name: ref})))
	if err != nil {
		return nil, err
	}
	return &Template{c: c, UID: found.GetMeta().GetUid(), Last: found}, nil
}

// living leaves out the templates that failed, which have given up their names.
func living(all iter.Seq2[*dormousev1.Template, error]) iter.Seq2[*dormousev1.Template, error] {
	return func(yield func(*dormousev1.Template, error) bool) {
		for t, err := range all {
			if t.GetStatus().GetPhase() != dormousev1.TemplatePhase_TEMPLATE_PHASE_FAILED && !yield(t, err) {
				return
			}
		}
	}
}

// ListTemplates gives all templates that match, page by page.
func (c *Client) ListTemplates(ctx context.Context, req *dormousev1.ListTemplatesRequest) iter.Seq2[*dormousev1.Template, error] {
	return pages(func(token string) ([]*dormousev1.Template, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListTemplatesResponse, error) {
			return c.templates.ListTemplates(ctx, next)
		})
		return resp.GetTemplates(), resp.GetNextPageToken(), err
	})
}

// Refresh reads the template.
func (t *Template) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetTemplateResponse, error) {
		return t.c.templates.GetTemplate(ctx, &dormousev1.GetTemplateRequest{Uid: t.UID})
	})
	if err != nil {
		return err
	}
	t.Last = resp.GetTemplate()
	return nil
}

// Delete returns when the template and its golden snapshot are gone.
func (t *Template) Delete(ctx context.Context, operationID string) error {
	req := &dormousev1.DeleteTemplateRequest{Uid: t.UID, OperationId: operation(operationID)}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteTemplateResponse, error) {
		return t.c.templates.DeleteTemplate(ctx, req)
	})
	return err
}

// Claim gives a sandbox of the template: a ready member of any pool of it, or what the request's fallback says. The request's template is the handle's.
func (t *Template) Claim(ctx context.Context, req *dormousev1.ClaimSandboxRequest) (*Sandbox, error) {
	req = proto.CloneOf(req)
	req.TemplateUid, req.PoolUid = t.UID, ""
	return t.c.ClaimSandbox(ctx, req)
}

// ClaimSandbox gives a sandbox of the template or pool that the request names.
func (c *Client) ClaimSandbox(ctx context.Context, req *dormousev1.ClaimSandboxRequest) (*Sandbox, error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ClaimSandboxResponse, error) {
		return c.sandboxes.ClaimSandbox(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return c.seen(resp.GetSandbox()), nil
}

// Pool is a handle: a uid and what was last seen of it.
type Pool struct {
	c    *Client
	UID  string
	Last *dormousev1.Pool // nil until it was read
}

// Pool gives the handle of a uid without asking the server.
func (c *Client) Pool(uid string) *Pool { return &Pool{c: c, UID: uid} }

// CreatePool returns when the pool is recorded; it fills from then on.
func (c *Client) CreatePool(ctx context.Context, req *dormousev1.CreatePoolRequest) (*Pool, error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CreatePoolResponse, error) {
		return c.pools.CreatePool(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return &Pool{c: c, UID: resp.GetPool().GetMeta().GetUid(), Last: resp.GetPool()}, nil
}

// FindPool gives the pool of a uid, or the living one of a name.
func (c *Client) FindPool(ctx context.Context, ref string) (*Pool, error) {
	if uid.Check(ref) == nil {
		p := c.Pool(ref)
		return p, p.Refresh(ctx)
	}
	found, err := byName(ctx, "pool", ref, c.ListPools(ctx, &dormousev1.ListPoolsRequest{Name: ref}))
	if err != nil {
		return nil, err
	}
	return &Pool{c: c, UID: found.GetMeta().GetUid(), Last: found}, nil
}

// ListPools gives all pools that match, page by page.
func (c *Client) ListPools(ctx context.Context, req *dormousev1.ListPoolsRequest) iter.Seq2[*dormousev1.Pool, error] {
	return pages(func(token string) ([]*dormousev1.Pool, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListPoolsResponse, error) {
			return c.pools.ListPools(ctx, next)
		})
		return resp.GetPools(), resp.GetNextPageToken(), err
	})
}

// Refresh reads the pool, and counts its members.
func (p *Pool) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetPoolResponse, error) {
		return p.c.pools.GetPool(ctx, &dormousev1.GetPoolRequest{Uid: p.UID})
	})
	if err != nil {
		return err
	}
	p.Last = resp.GetPool()
	return nil
}

// Update changes what the request's mask names. The request's uid is the handle's.
func (p *Pool) Update(ctx context.Context, req *dormousev1.UpdatePoolRequest) error {
	req = proto.CloneOf(req)
	req.Uid, req.OperationId = p.UID, operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.UpdatePoolResponse, error) {
		return p.c.pools.UpdatePool(ctx, req)
	})
	if err != nil {
		return err
	}
	p.Last = resp.GetPool()
	return nil
}

// Delete returns when the pool and its members are gone.
func (p *Pool) Delete(ctx context.Context, operationID string) error {
	req := &dormousev1.DeletePoolRequest{Uid: p.UID, OperationId: operation(operationID)}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeletePoolResponse, error) {
		return p.c.pools.DeletePool(ctx, req)
	})
	return err
}

// Claim gives a sandbox of the pool, or what the request's fallback says. The request's pool is the handle's.
func (p *Pool) Claim(ctx context.Context, req *dormousev1.ClaimSandboxRequest) (*Sandbox, error) {
	req = proto.CloneOf(req)
	req.PoolUid, req.TemplateUid = p.UID, ""
	return p.c.ClaimSandbox(ctx, req)
}

// Claimable is a pool or a template.
type Claimable interface {
	Claim(ctx context.Context, req *dormousev1.ClaimSandboxRequest) (*Sandbox, error)
}

// FindClaimable gives the pool or the template of a uid or name. A name that both have is AMBIGUOUS_NAME.
func (c *Client) FindClaimable(ctx context.Context, ref string) (Claimable, error) {
	pool, err := c.FindPool(ctx, ref)
	if err != nil && !errs.Has(err, errs.ObjectNotFound) {
		return nil, err
	}
	tpl, tplErr := c.FindTemplate(ctx, ref)
	switch {
	case err == nil && tplErr == nil:
		return nil, errs.New(errs.AmbiguousName, "a pool and a template are named %q; give the uid of one: %s, %s", ref, pool.UID, tpl.UID).With("name", ref)
	case err == nil && errs.Has(tplErr, errs.ObjectNotFound):
		return pool, nil
	case tplErr == nil:
		return tpl, nil
	case errs.Has(tplErr, errs.ObjectNotFound):
		return nil, errs.New(errs.ObjectNotFound, "there is no pool and no template %q", ref).With("name", ref)
	}
	return nil, tplErr
}
