package api

import (
	"context"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// asleep is SANDBOX_PAUSED for a sandbox that is paused or hibernated, or on the way there or back.
func asleep(sb *records.Sandbox) error {
	switch sb.Status.Phase {
	case sandbox.Paused, sandbox.Hibernating, sandbox.Hibernated, sandbox.Resuming:
		return errs.New(errs.SandboxPaused, "sandbox %s is %s: resume it first", sb.UID, sb.Status.Phase).With("uid", sb.UID).With("phase", string(sb.Status.Phase))
	}
	return nil
}

// wakeTimeout bounds the wait of a call that has no deadline.
const wakeTimeout = 2 * time.Minute

// awake gives a sandbox that may be asked for its processes, files and ports: as it is, or resumed first where its spec says so. The resume is an
// ordinary operation; calls that come while it goes on wait for its end too, each within its own deadline. SANDBOX_PAUSED
// where the spec does not say so.
func (s *Server) awake(ctx context.Context, sb *records.Sandbox) (*records.Sandbox, error) {
	paused := asleep(sb)
	if paused == nil {
		return sb, nil
	}
	if !sb.Spec.WakeOnUse {
		return nil, paused
	}
	resume := s.resume
	if e, err := s.cfg.Engine(); err == nil {
		resume = func(ctx context.Context, sb *records.Sandbox) (*records.Sandbox, error) { return wake(ctx, sb, e) }
	} else if s.cfg.Leader == nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	return s.wakes.do(ctx, sb, resume)
}

// resume has the leader wake a sandbox, in the name of the caller, so that a stream that another coordinator passes on wakes it too.
func (s *Server) resume(ctx context.Context, sb *records.Sandbox) (*records.Sandbox, error) {
	req := &dormousev1.ResumeSandboxRequest{OperationId: uid.New(), Uid: sb.UID}
	if err := s.cfg.Leader.Ask(ctx, dormousev1.SandboxService_ResumeSandbox_FullMethodName, req, &dormousev1.ResumeSandboxResponse{}); err != nil {
		return nil, err
	}
	rec, err := s.cfg.Store.Get(ctx, records.SandboxKey(sb.Tenant, sb.UID))
	if err != nil {
		return nil, err
	}
	now, err := records.SandboxOf(rec)
	if err != nil {
		return nil, err
	}
	return now, asleep(now)
}

// wakes joins the calls that want the same sandbox.
type wakes struct {
	wg    sync.WaitGroup // ends with the calls' bound
	mu    sync.Mutex
	going map[string]*waking // by tenant and uid
}

type waking struct {
	done chan struct{}
	sb   *records.Sandbox
	err  error
}

func (w *wakes) do(ctx context.Context, sb *records.Sandbox, resume func(context.Context, *records.Sandbox) (*records.Sandbox, error)) (*records.Sandbox, error) {
	key := sb.Tenant + "/" + sb.UID
	w.mu.Lock()
	one := w.going[key]
	if one == nil {
		one = &waking{done: make(chan struct{})}
		if w.going == nil {
			w.going = make(map[string]*waking)
		}
		w.going[key] = one
		work := context.WithoutCancel(ctx) // others may wait for it when this caller has gone
		w.wg.Go(func() {
			work, cancel := context.WithTimeout(work, wakeTimeout)
			defer cancel()
			one.sb, one.err = resume(work, sb)
			w.mu.Lock()
			delete(w.going, key)
			w.mu.Unlock()
			close(one.done)
		})
	}
	w.mu.Unlock()
	select {
	case <-one.done:
		return one.sb, one.err
	case <-ctx.Done():
		return nil, errs.From(ctx.Err())
	}
}

func wake(ctx context.Context, sb *records.Sandbox, e *operations.Engine) (*records.Sandbox, error) {
	op, err := e.ResumeSandbox(ctx, operations.Call{Tenant: sb.Tenant, RequestID: obs.RequestID(ctx)}, operations.Turn{UID: sb.UID})
	if err != nil {
		return nil, err
	}
	now, err := e.Changed(ctx, op)
	if err != nil {
		return nil, err
	}
	return now, asleep(now)
}
