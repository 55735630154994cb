package operations

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// Templates: see docs/adr/0047-warm-starts.md. The template's operation makes a builder, runs the commands in it, captures it, and has it
// deleted; what is next follows from the records of template, builder and snapshot.

// TemplateLabel is the label by which a golden snapshot tells its template.
const TemplateLabel = "dormouse.template"

// CreateTemplate makes a template and returns when its golden snapshot is there. One that could not be made stays as a Failed record that
// holds nothing, not even its name.
func (e *Engine) CreateTemplate(ctx context.Context, c Call, req CreateTemplate) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if err := problem(req.Spec.Validate()); err != nil {
		return nil, err
	}
	return e.submit(ctx, c, KindCreateTemplate, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		spec := req.Spec.WithDefaults()
		if err := e.possible(spec.Sandbox); err != nil {
			return writes{}, err
		}
		tpl := new(records.Template)
		tpl.UID, tpl.Tenant, tpl.Name, tpl.Labels = uid.New(), op.Tenant, req.Name, maps.Clone(req.Labels)
		tpl.Generation, tpl.Created, tpl.Spec, tpl.OperationID = 1, op.Created, spec, op.ID
		if err := enterTemplate(tpl, warm.Preparing); err != nil {
			return writes{}, err
		}
		sb, err := newSandbox(op, "", nil, resting(spec.Sandbox), nil)
		if err != nil {
			return writes{}, err
		}
		sb.Template = tpl.UID
		tpl.Builder, tpl.Golden = sb.UID, uid.New()
		op.Plan.Target, op.Plan.SnapshotUID, op.Plan.MakesSnapshot = tpl.UID, tpl.Golden, true
		op.Plan.Copies = []Copy{{SandboxUID: sb.UID}}
		var p puts
		placed, err := e.placeAtOnce(ctx, r, sb, &p)
		if err != nil {
			return writes{}, err
		}
		tpl.Status.Node = sb.Status.Node
		p.add(fits(tpl.Put()))
		p.add(fits(sb.Put()))
		return writes{puts: p.all, placed: placed}, p.err
	})
}

// resting is the spec of a sandbox that no caller has: nothing happens to it because time passes.
func resting(s sandbox.Spec) sandbox.Spec {
	s = s.Clone()
	s.Lifetime, s.IdleTimeout, s.OnIdle, s.WakeOnUse, s.Hostname = 0, 0, "", false, ""
	return s
}

func (e *Engine) template(ctx context.Context, r catalog.Reader, tenant, u string) (*records.Template, error) {
	rec, err := r.Get(ctx, records.TemplateKey(tenant, u))
	if err != nil {
		return nil, err
	}
	return records.TemplateOf(rec)
}

func (e *Engine) driveTemplate(ctx context.Context, t *task) error {
	if t.op.Error == nil {
		err := e.makeTemplate(ctx, t)
		env, failed := isFinal(err)
		if !failed {
			return err
		}
		if err := e.undoing(ctx, t, env); err != nil || t.op.State != Pending {
			return err
		}
	}
	return e.undoTemplate(ctx, t)
}

// makeTemplate goes on from where the records are.
func (e *Engine) makeTemplate(ctx context.Context, t *task) error {
	tpl, err := e.preparing(ctx, e.cfg.Catalog, t)
	if err != nil {
		return err
	}
	if tpl.Status.SnapshotUID == "" { // not captured yet
		if err := e.setUp(ctx, t, tpl); err != nil {
			return err
		}
		if err := e.reserveGolden(ctx, t, tpl); err != nil {
			return err
		}
	}
	if err := e.makeSnapshot(ctx, t, tpl.Golden, nil); err != nil {
		return err
	}
	if err := e.removeSandbox(ctx, t, tpl.Builder); err != nil {
		return err
	}
	_, err = e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		op, err := e.operation(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		tpl, err := e.preparing(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if err := enterTemplate(tpl, warm.Ready); err != nil {
			return catalog.Commit{}, err
		}
		tpl.Status.ReadyTime = e.now()
		var p puts
		p.add(tpl.Put())
		done := *tpl
		done.Revision++
		p.add(e.event(records.TemplateKey(tpl.Tenant, tpl.UID), "Ready", "golden snapshot "+tpl.Golden, false))
		p.add(e.ended(op, nil, func(res *Result) { res.Template = &done }))
		return catalog.Commit{Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	return e.reload(ctx, t)
}

// preparing reads the template of a task while it is being made; a final error says that a deletion has it.
func (e *Engine) preparing(ctx context.Context, r catalog.Reader, t *task) (*records.Template, error) {
	tpl, err := e.template(ctx, r, t.op.Tenant, t.op.Plan.Target)
	if errs.Has(err, errs.ObjectNotFound) || err == nil && tpl.Status.Phase != warm.Preparing {
		return nil, finally(errs.New(errs.WrongPhase, "template %s was deleted before it was ready", t.op.Plan.Target).
			With("uid", t.op.Plan.Target).With("phase", string(warm.Deleting)).WithOutcome(errs.Terminal, errs.Never))
	}
	return tpl, err
}

// setUp brings the builder to the point where it is captured.
func (e *Engine) setUp(ctx context.Context, t *task, tpl *records.Template) error {
	if _, err := e.makeRun(ctx, t, tpl.Builder, nil); err != nil {
		return err
	}
	sb, err := e.sandbox(ctx, e.cfg.Catalog, tpl.Tenant, tpl.Builder)
	if err != nil {
		return err
	}
	for i := tpl.Status.SetupDone; i < len(tpl.Spec.Setup); i++ {
		c := tpl.Spec.Setup[i]
		end, err := e.runIn(ctx, t, sb, Process{ID: "dormouse-setup-" + strconv.Itoa(i), Argv: c.Argv, Env: c.Env, User: c.User, WorkingDir: c.WorkingDir, Timeout: c.Timeout})
		if err != nil {
			return err
		}
		if end.Code != 0 || end.TimedOut {
			return finally(setupFailed("setup", i, c.Argv[0], c.Timeout, end))
		}
		if err := e.setUpTo(ctx, t, i+1); err != nil {
			return err
		}
	}
	return e.untilReady(ctx, t, tpl, sb)
}

// setUpTo records how many commands have succeeded.
func (e *Engine) setUpTo(ctx context.Context, t *task, n int) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		tpl, err := e.preparing(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if tpl.Status.SetupDone >= n {
			return catalog.Commit{}, errNothing
		}
		tpl.Status.SetupDone = n
		put, err := tpl.Put()
		return catalog.Commit{Puts: []catalog.Put{put}}, err
	})
	return err
}

// Pauses between two readiness checks.
const (
	readyPause    = 50 * time.Millisecond
	maxReadyPause = 2 * time.Second
)

// untilReady asks the readiness command until it succeeds or its time is over. The time counts from when this term began to ask; the tries have
// numbers, so that a next term asks those before again, which ended, and goes on after them.
func (e *Engine) untilReady(ctx context.Context, t *task, tpl *records.Template, sb *records.Sandbox) error {
	check := tpl.Spec.Readiness
	if len(check.Argv) == 0 {
		return nil
	}
	until := e.cfg.Now().Add(check.Timeout)
	delay := min(readyPause, e.cfg.RetryMin)
	for try := 0; ; try++ {
		left := max(until.Sub(e.cfg.Now()), time.Second)
		end, err := e.runIn(ctx, t, sb, Process{ID: "dormouse-ready-" + strconv.Itoa(try), Argv: check.Argv, Timeout: left})
		if err != nil {
			return err
		}
		if end.Code == 0 && !end.TimedOut {
			return nil
		}
		if !e.cfg.Now().Before(until) {
			end.TimedOut = true
			return finally(setupFailed("readiness", try, check.Argv[0], check.Timeout, end))
		}
		if delay = min(e.pause(ctx, delay), maxReadyPause); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// runIn runs a process of the template's in its builder. What cannot be started there is the template's failure.
func (e *Engine) runIn(ctx context.Context, t *task, sb *records.Sandbox, p Process) (end ProcessEnd, err error) {
	err = e.call(ctx, t, sb.Status.Node, "setup:"+sb.UID+"/"+p.ID, func(ctx context.Context, c Command) (err error) {
		end, err = e.cfg.Agents.RunProcess(ctx, sb.Status.Node, c, sb.UID, p)
		return err
	})
	return end, err
}

// setupFailed is SETUP_FAILED: which command, how it ended and what it last said.
func setupFailed(step string, index int, program string, limit time.Duration, end ProcessEnd) *errs.Error {
	how := "ended with exit code " + strconv.Itoa(end.Code)
	if end.TimedOut {
		how = "did not succeed within " + limit.String()
	}
	return errs.New(errs.SetupFailed, "%s command %d (%s) %s; look at output_tail, change the template and create it again", step, index, program, how).
		With("step", step).With("index", strconv.Itoa(index)).With("exit_code", strconv.Itoa(end.Code)).
		With("timed_out", strconv.FormatBool(end.TimedOut)).With("output_tail", end.Tail)
}

// failureOf reads what setupFailed made.
func failureOf(env *errs.Error) *warm.Failure {
	if env.Reason != errs.SetupFailed {
		return nil
	}
	index, err := strconv.Atoi(env.Details["index"])
	code, cerr := strconv.Atoi(env.Details["exit_code"])
	if errors.Join(err, cerr) != nil {
		return nil
	}
	return &warm.Failure{Step: env.Details["step"], Index: index, ExitCode: code, TimedOut: env.Details["timed_out"] == "true", Tail: env.Details["output_tail"]}
}

// reserveGolden makes the snapshot's record together with the template's reference to it.
func (e *Engine) reserveGolden(ctx context.Context, t *task, tpl *records.Template) error {
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		tpl, err := e.preparing(ctx, r, t)
		if err != nil {
			return catalog.Commit{}, err
		}
		if tpl.Status.SnapshotUID != "" {
			return catalog.Commit{}, errNothing
		}
		sb, err := e.sandbox(ctx, r, tpl.Tenant, tpl.Builder)
		if err != nil {
			return catalog.Commit{}, err
		}
		if sb.Status.Phase != sandbox.Running {
			return catalog.Commit{}, finally(errs.New(errs.SandboxFailed, "the template's sandbox is %s (%s): it must go on running, so that it can be captured", sb.Status.Phase, sb.Status.Reason).
				With("step", "setup").With("uid", sb.UID))
		}
		w, err := e.snapshotOf(t.op, sb, tpl.Golden, "", map[string]string{TemplateLabel: tpl.UID})
		if err != nil {
			return catalog.Commit{}, err
		}
		tpl.Status.SnapshotUID, tpl.Status.Node = tpl.Golden, sb.Status.Node
		put, err := tpl.Put()
		return catalog.Commit{Puts: append(w.puts, put)}, err
	})
	return err
}

// undoTemplate leaves a Failed record that says why, and nothing else.
func (e *Engine) undoTemplate(ctx context.Context, t *task) error {
	env := t.op.Error
	_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		tpl, err := e.template(ctx, r, t.op.Tenant, t.op.Plan.Target)
		if errs.Has(err, errs.ObjectNotFound) || err == nil && tpl.Status.Phase != warm.Preparing {
			return catalog.Commit{}, errNothing
		}
		if err != nil {
			return catalog.Commit{}, err
		}
		if err := enterTemplate(tpl, warm.Failed); err != nil {
			return catalog.Commit{}, err
		}
		tpl.Status.SnapshotUID, tpl.Status.Reason, tpl.Status.Message = "", string(env.Reason), env.Message
		tpl.Status.Failure = failureOf(env)
		var p puts
		p.add(tpl.Put())
		p.add(e.event(records.TemplateKey(tpl.Tenant, tpl.UID), "Failed", env.Message, true))
		return catalog.Commit{Puts: p.all}, p.err
	})
	if err != nil {
		return err
	}
	if err := e.removeSandbox(ctx, t, t.op.Plan.Copies[0].SandboxUID); err != nil {
		return err
	}
	if err := e.retireSnapshot(ctx, t, t.op.Plan.SnapshotUID); err != nil {
		return err
	}
	return e.finish(ctx, t, env, nil)
}

// retireSnapshot deletes a golden snapshot that its template does not refer to any more, once nothing is restored from it.
func (e *Engine) retireSnapshot(ctx context.Context, t *task, u string) error {
	key := records.SnapshotKey(t.op.Tenant, u)
	for delay := e.cfg.RetryMin; ; {
		_, err := e.commit(ctx, func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
			rec, err := r.Get(ctx, key)
			if err != nil {
				return catalog.Commit{}, err
			}
			snap, err := records.SnapshotOf(rec)
			if err != nil || snap.Status.Phase == snapshot.Deleting {
				return catalog.Commit{}, orNothing(err)
			}
			if err := enterSnapshot(snap, snapshot.Deleting); err != nil {
				return catalog.Commit{}, err
			}
			put, err := snap.Put()
			return catalog.Commit{Puts: []catalog.Put{put}, Checks: []catalog.Check{catalog.Unreferenced(key)}}, err
		})
		switch {
		case errs.Has(err, errs.ObjectNotFound):
			return nil
		case err == nil:
			return e.snapshotAbsent(ctx, t, u, nil)
		case !errs.Has(err, errs.StillReferenced):
			return err
		}
		t.last.Store(errs.From(err))
		if delay = e.pause(ctx, delay); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// DeleteTemplate ends a template that no pool is of, and its golden snapshot.
func (e *Engine) DeleteTemplate(ctx context.Context, c Call, req Delete) (*Operation, error) {
	return e.submit(ctx, c, KindDeleteTemplate, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		rec, err := e.find(ctx, r, "uid", records.TemplateKey(op.Tenant, req.UID))
		if err != nil {
			return writes{}, err
		}
		tpl, err := records.TemplateOf(rec)
		if err != nil {
			return writes{}, err
		}
		var w writes
		if tpl.Status.Phase == warm.Ready { // before, it has a builder at most
			if err := e.unused(ctx, r, rec.Key); err != nil {
				return writes{}, err
			}
			w.checks = []catalog.Check{catalog.Unreferenced(rec.Key)}
		}
		op.Plan.Target, op.Plan.SnapshotUID = tpl.UID, tpl.Golden
		op.Plan.Copies = []Copy{{SandboxUID: tpl.Builder}}
		if err := enterTemplate(tpl, warm.Deleting); err != nil {
			return writes{}, err
		}
		tpl.Status.SnapshotUID = ""
		put, err := tpl.Put()
		w.puts = []catalog.Put{put}
		return w, err
	})
}

func (e *Engine) driveTemplateDeletion(ctx context.Context, t *task) error {
	if err := e.removeSandbox(ctx, t, t.op.Plan.Copies[0].SandboxUID); err != nil {
		return err
	}
	if err := e.retireSnapshot(ctx, t, t.op.Plan.SnapshotUID); err != nil {
		return err
	}
	key := records.TemplateKey(t.op.Tenant, t.op.Plan.Target)
	if err := e.bury(ctx, t, key, func(op *Operation) (catalog.Put, error) { return e.ended(op, nil, nil) }); err != nil {
		return err
	}
	if err := e.reload(ctx, t); err != nil || t.op.State != Pending {
		return err
	}
	return e.finish(ctx, t, nil, nil) // another deletion was quicker
}
