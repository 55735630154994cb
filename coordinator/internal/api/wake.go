package api

import (
	"context"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
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

// awake gives a sandbox that may be asked for its processes, files and ports: as it is, or resumed first where its spec says so. SANDBOX_PAUSED
// where it does not. The resume is the caller's ordinary call ResumeSandbox, made here or at the leader, so that every coordinator can wake;
// calls that come here while it goes on wait for its end too, each within its own deadline.
func (s *Server) awake(ctx context.Context, sb *records.Sandbox) (*records.Sandbox, error) {
	paused := asleep(sb)
	if paused == nil {
		return sb, nil
	}
	if !sb.Spec.WakeOnUse {
		return nil, paused
	}
	return s.woken(ctx, sb)
}

// woken resumes the sandbox.
func (s *Server) woken(ctx context.Context, sb *records.Sandbox) (*records.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	return s.wakes.do(ctx, sb.Tenant+"/"+sb.UID, func(ctx context.Context) (*records.Sandbox, error) { return s.wake(ctx, sb.UID) })
}

// maxRoused bounds how often a call is made again because its sandbox was paused in the moment in which it came to the node.
const maxRoused = 2

// rouse wakes a sandbox whose node refused a call in the round, counted from 1, because it stands still, although its record said that it runs: it was just being
// paused. Nil: it was woken, and the call, which had not begun, may be made again. Otherwise the refusal, or why it cannot be woken.
func (s *Server) rouse(ctx context.Context, u string, round int, refusal error) error {
	if round > maxRoused || !errs.Has(refusal, errs.SandboxPaused) || !errs.NotStartedFor(refusal) {
		return refusal
	}
	rec, err := s.get(ctx, catalog.KindSandbox, "sandbox_uid", u)
	if err != nil {
		return err
	}
	sb, err := records.SandboxOf(rec)
	if err != nil {
		return err
	}
	if !sb.Spec.WakeOnUse {
		return refusal
	}
	// Whatever its record says by now: the node knew better.
	_, err = s.woken(ctx, sb)
	return err
}

func (s *Server) wake(ctx context.Context, u string) (*records.Sandbox, error) {
	req := &dormousev1.ResumeSandboxRequest{Uid: u}
	_, err := s.cfg.Leader.Do(ctx, dormousev1.SandboxService_ResumeSandbox_FullMethodName, req, func() (any, error) {
		return sandboxService{Server: s}.ResumeSandbox(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	rec, err := s.get(ctx, catalog.KindSandbox, "sandbox_uid", u)
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
	wg     sync.WaitGroup
	mu     sync.Mutex
	going  map[string]*waking // by tenant and uid
	closed bool
}

type waking struct {
	cancel context.CancelFunc
	done   chan struct{}
	sb     *records.Sandbox
	err    error
}

func (w *wakes) do(ctx context.Context, key string, wake func(context.Context) (*records.Sandbox, error)) (*records.Sandbox, error) {
	one, err := w.join(ctx, key, wake)
	if err != nil {
		return nil, err
	}
	select {
	case <-one.done:
		return one.sb, one.err
	case <-ctx.Done():
		return nil, errs.From(ctx.Err())
	}
}

// join gives the waking that goes on, or begins it.
func (w *wakes) join(ctx context.Context, key string, wake func(context.Context) (*records.Sandbox, error)) (*waking, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, stopping()
	}
	if one := w.going[key]; one != nil {
		return one, nil
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), wakeTimeout) // others may wait for it when this caller has gone
	one := &waking{cancel: cancel, done: make(chan struct{})}
	if w.going == nil {
		w.going = make(map[string]*waking)
	}
	w.going[key] = one
	w.wg.Go(func() {
		defer cancel()
		one.sb, one.err = wake(work)
		if errs.Has(one.err, errs.CallCancelled) { // by end
			one.err = stopping()
		}
		w.mu.Lock()
		delete(w.going, key)
		w.mu.Unlock()
		close(one.done)
	})
	return one, nil
}

func stopping() error {
	return errs.New(errs.ShuttingDown, "the coordinator is stopping; ask another, or again in a moment")
}

// end waits for what goes on, which it cancels: the resume that was asked for goes on all the same.
func (w *wakes) end() {
	w.mu.Lock()
	w.closed = true
	for _, one := range w.going {
		one.cancel()
	}
	w.mu.Unlock()
	w.wg.Wait()
}
