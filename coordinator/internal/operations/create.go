package operations

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// CreateSandbox makes a sandbox and returns when it runs. A sandbox that could not be started
// stays as a Failed record that holds nothing, not even its name.
func (e *Engine) CreateSandbox(ctx context.Context, c Call, req CreateSandbox) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if err := problem(req.Spec.Validate()); err != nil {
		return nil, err
	}
	if err := problem(sandbox.ValidateEnv("secret_env", req.SecretEnv)); err != nil {
		return nil, err
	}
	req.SecretNames = slices.Sorted(maps.Keys(req.SecretEnv))
	return e.submit(ctx, c, KindCreateSandbox, req, req.SecretEnv, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		spec := req.Spec.Clone()
		spec.Resources = spec.Resources.WithDefaults()
		if err := e.possible(spec); err != nil {
			return writes{}, err
		}
		held, err := e.attach(ctx, r, op.Tenant, spec.Volumes)
		if err != nil {
			return writes{}, err
		}
		sb, err := newSandbox(op, req.Name, req.Labels, spec, held)
		if err != nil {
			return writes{}, err
		}
		op.Plan.Copies = []Copy{{SandboxUID: sb.UID}}
		var p puts
		placed, err := e.placeAtOnce(ctx, r, sb, &p)
		if err != nil {
			return writes{}, err
		}
		p.add(fits(sb.Put()))
		return writes{puts: p.all, placed: placed}, p.err
	})
}

func newSandbox(op *Operation, name string, labels map[string]string, spec sandbox.Spec, held []records.Attachment) (*records.Sandbox, error) {
	sb := &records.Sandbox{Attachments: held}
	sb.UID, sb.Tenant, sb.Name, sb.Labels = uid.New(), op.Tenant, name, labels
	sb.Generation, sb.Created, sb.Spec, sb.OperationID = 1, op.Created, spec, op.ID
	if sb.Spec.Network == "" {
		sb.Spec.Network = sandbox.NetworkNone
	}
	return sb, enterSandbox(sb, sandbox.Pending)
}

// driveCopies makes the sandboxes of a create, a restore or a fork: the snapshot first where the fork
// takes one, then for each copy its volumes, then the copy itself.
func (e *Engine) driveCopies(ctx context.Context, t *task) error {
	if t.op.Error != nil {
		return e.undoCopies(ctx, t)
	}
	err := e.makeCopies(ctx, t)
	if env, ok := isFinal(err); ok {
		if err := e.undoing(ctx, t, env); err != nil || t.op.State != Pending {
			return err
		}
		return e.undoCopies(ctx, t)
	}
	return err
}

func (e *Engine) makeCopies(ctx context.Context, t *task) error {
	plan := t.op.Plan
	if plan.MakesSnapshot {
		if err := e.makeSnapshot(ctx, t, plan.SnapshotUID, nil); err != nil {
			return err
		}
	}
	var fin func(*Operation, *records.Sandbox) (catalog.Put, error)
	var last *Operation // of fin's last call
	if len(plan.Copies) == 1 && t.op.Kind != KindForkSandbox {
		fin = func(op *Operation, sb *records.Sandbox) (catalog.Put, error) {
			done := *sb
			done.Revision++
			last = op
			return e.ended(op, nil, func(r *Result) { r.Sandboxes = []*records.Sandbox{&done} })
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(e.cfg.Parallel)
	ended := false // by fin, of the only copy
	for _, c := range plan.Copies {
		group.Go(func() error {
			for _, clone := range c.Clones {
				if err := e.makeVolume(groupCtx, t, clone, nil); err != nil {
					return err
				}
			}
			committed, err := e.makeRun(groupCtx, t, c.SandboxUID, fin)
			if fin != nil && committed {
				ended = true
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if ended {
		t.op = last
		return nil
	}
	if err := e.reload(ctx, t); err != nil || t.op.State != Pending {
		return err
	}
	sandboxes, err := e.readCopies(ctx, t.op)
	if err != nil {
		return err
	}
	return e.finish(ctx, t, nil, func(r *Result) { r.Sandboxes = sandboxes })
}

func (e *Engine) readCopies(ctx context.Context, op *Operation) ([]*records.Sandbox, error) {
	var all []*records.Sandbox
	for _, c := range op.Plan.Copies {
		sb, err := e.sandbox(ctx, e.cfg.Catalog, op.Tenant, c.SandboxUID)
		if errs.Has(err, errs.ObjectNotFound) {
			continue // it ran, and was deleted since
		}
		if err != nil {
			return nil, err
		}
		all = append(all, sb)
	}
	return all, nil
}

// Copies gives the sandboxes of an ended operation: as they were when it ended, or where that was
// too large to keep, as they are.
func (e *Engine) Copies(ctx context.Context, op *Operation) ([]*records.Sandbox, error) {
	if op.Result != nil {
		return op.Result.Sandboxes, nil
	}
	return e.readCopies(ctx, op)
}

// undoCopies takes back what a failed operation made. A fork leaves nothing; a create or
// restore leaves its sandbox as a Failed record that says why.
func (e *Engine) undoCopies(ctx context.Context, t *task) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(e.cfg.Parallel)
	for _, c := range t.op.Plan.Copies {
		group.Go(func() error {
			undo := e.failSandbox
			if t.op.Kind == KindForkSandbox {
				undo = e.removeSandbox
			}
			if err := undo(groupCtx, t, c.SandboxUID); err != nil {
				return err
			}
			for _, clone := range c.Clones {
				if err := e.volumeAbsent(groupCtx, t, clone, nil); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if t.op.Plan.MakesSnapshot {
		if err := e.snapshotAbsent(ctx, t, t.op.Plan.SnapshotUID, nil); err != nil {
			return err
		}
	}
	return e.finish(ctx, t, t.op.Error, nil)
}

// failSandbox records that the sandbox never ran, has what is left of it removed from its node,
// and then lets go of its volumes.
func (e *Engine) failSandbox(ctx context.Context, t *task, u string) error {
	env := t.op.Error
	sb, err := e.changeSandbox(ctx, t.op.Tenant, u, func(sb *records.Sandbox) ([]catalog.Put, error) {
		if !take(sb, sandbox.Failed, sandbox.ReasonStartFailed, env.Message) {
			return nil, errNothing
		}
		sb.Unnamed = true
		sb.Status.Conditions = append(sb.Status.Conditions, sandbox.Condition{Type: "Started", Reason: string(env.Reason), Message: env.Message, LastTransitionTime: e.now()})
		ev, err := e.event(records.SandboxKey(sb.Tenant, sb.UID), "StartFailed", env.Message, true)
		return []catalog.Put{ev}, err
	})
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if sb == nil {
		if sb, err = e.sandbox(ctx, e.cfg.Catalog, t.op.Tenant, u); errs.Has(err, errs.ObjectNotFound) {
			return nil
		} else if err != nil {
			return err
		}
	}
	if sb.Status.Phase != sandbox.Failed {
		return nil // a deletion has it
	}
	if sb.Status.Node != "" {
		if err := e.deleteOnNode(ctx, t, sb); err != nil {
			return err
		}
	}
	_, err = e.changeSandbox(ctx, t.op.Tenant, u, func(sb *records.Sandbox) ([]catalog.Put, error) {
		if sb.Status.Phase != sandbox.Failed || len(sb.Attachments) == 0 && sb.SourceSnapshot == "" && sb.Status.Node == "" {
			return nil, errNothing
		}
		sb.LastNode = cmp.Or(sb.Status.Node, sb.LastNode)
		sb.Attachments, sb.SourceSnapshot, sb.Status.Node = nil, "", ""
		return nil, nil
	})
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	return err
}
