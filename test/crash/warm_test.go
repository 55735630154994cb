package crash

import (
	"context"
	"fmt"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func (w *world) templateRequest() *dormousev1.CreateTemplateRequest {
	return &dormousev1.CreateTemplateRequest{OperationId: uid.New(), Spec: &dormousev1.TemplateSpec{
		Sandbox: w.spec(), Setup: []*dormousev1.SetupCommand{{Argv: []string{"touch", "/tmp/one"}}, {Argv: []string{"sh", "-c", "ls /tmp/one && mkdir /tmp/two"}}},
		Readiness: &dormousev1.ReadinessCheck{Argv: []string{"test", "-p", "/tmp/q"}},
	}}
}

func (w *world) newTemplate() *client.Template {
	w.Helper()
	t, err := w.api.CreateTemplate(w.ctx, w.templateRequest())
	w.ok(err)
	return t
}

// newPool is a pool of one, which is full.
func (w *world) newPool(t *client.Template) *client.Pool {
	w.Helper()
	p, err := w.api.CreatePool(w.ctx, &dormousev1.CreatePoolRequest{Spec: &dormousev1.PoolSpec{TemplateUid: t.UID, Size: 1, MaxMembers: 1}})
	w.ok(err)
	w.filled(p)
	return p
}

func (w *world) filled(p *client.Pool) {
	w.Helper()
	w.await("the pool is full", func() error {
		if err := p.Refresh(w.ctx); err != nil {
			return err
		}
		if st := p.Last.GetStatus(); st.GetReady() != 1 || st.GetFilling()+st.GetDraining() != 0 {
			return fmt.Errorf("it is %v", st)
		}
		return nil
	})
}

func createTemplate(w *world) operation {
	var made *client.Template
	req := w.templateRequest()
	return operation{
		id:  req.OperationId,
		run: func(ctx context.Context) (err error) { made, err = w.api.CreateTemplate(ctx, req); return err },
		check: func() {
			s, err := made.Claim(w.ctx, &dormousev1.ClaimSandboxRequest{})
			w.ok(err)
			w.answers(s)
			w.drop(s)
		},
		clean: func() { w.ok(gone(made.Delete(w.ctx, ""))) },
	}
}

func dropTemplate(w *world) operation {
	t, id := w.newTemplate(), uid.New()
	return operation{id: id, run: func(ctx context.Context) error { return t.Delete(ctx, id) }, check: func() {}, clean: func() {}}
}

// fillPool is a pool whose member is made while a daemon dies.
func fillPool(w *world) operation {
	t := w.newTemplate()
	var made *client.Pool
	req := &dormousev1.CreatePoolRequest{OperationId: uid.New(), Spec: &dormousev1.PoolSpec{TemplateUid: t.UID, Size: 1, MaxMembers: 1}}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreatePool(ctx, req); return err },
		check: func() { w.filled(made) },
		clean: func() {
			w.ok(gone(made.Delete(w.ctx, "")))
			w.ok(gone(t.Delete(w.ctx, "")))
		},
	}
}

// claimReady takes the ready member of a pool, which fills again meanwhile.
func claimReady(w *world) operation {
	t := w.newTemplate()
	p := w.newPool(t)
	var made *client.Sandbox
	req := &dormousev1.ClaimSandboxRequest{OperationId: uid.New(), Name: "claimed", Fallback: dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = p.Claim(ctx, req); return err },
		check: func() { w.answers(made); w.filled(p) },
		clean: func() {
			w.drop(made)
			w.ok(gone(p.Delete(w.ctx, "")))
			w.ok(gone(t.Delete(w.ctx, "")))
		},
	}
}

func dropPool(w *world) operation {
	t := w.newTemplate()
	p, id := w.newPool(t), uid.New()
	return operation{id: id, run: func(ctx context.Context) error { return p.Delete(ctx, id) }, check: func() {}, clean: func() { w.ok(gone(t.Delete(w.ctx, ""))) }}
}
