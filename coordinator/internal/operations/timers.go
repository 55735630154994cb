package operations

import (
	"context"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Timers of sandboxes: what the term's leader does because time has passed. When it is to happen comes from the records (the time of creation, the
// spec), never from how long a process has been up, so that no restart and no failover moves it. It is done by an ordinary
// operation, with an id of its own; a leader that dies in between is followed by one that finds the sandbox overdue, or the operation Pending.

// timerEvery is how exact they are.
const timerEvery = time.Second

// timer is what is known of a sandbox that has one. Engine.mu guards it.
type timer struct {
	tenant  string
	expires time.Time // zero: never
	idle    time.Duration
	onIdle  sandbox.IdleAction
	phase   sandbox.Phase
	busy    bool // something is being done about it
}

// clock brings the sandbox's timer up to its record. It wants the lock.
func (e *Engine) clock(sb *records.Sandbox) {
	if sb.Spec.Lifetime == 0 && sb.Spec.IdleTimeout == 0 || sb.Status.Phase == sandbox.Deleting {
		delete(e.timers, sb.UID)
		return
	}
	t := e.timers[sb.UID]
	if t == nil {
		t = &timer{tenant: sb.Tenant}
		e.timers[sb.UID] = t
	}
	t.expires, t.idle, t.onIdle, t.phase = time.Time{}, sb.Spec.IdleTimeout, sb.Spec.OnIdle, sb.Status.Phase
	if sb.Spec.Lifetime > 0 {
		t.expires = sb.Created.Add(sb.Spec.Lifetime)
	}
}

// Used takes what a node tells of the use of the sandboxes that are placed on it. The time is by this process's clock: how long ago is what a node says. A sandbox of
// which no node of this term has told is not taken for idle.
func (e *Engine) Used(node string, uses []Use) {
	now := e.cfg.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, u := range uses {
		if _, here := e.placed[node][u.UID]; here {
			e.used[u.UID] = now.Add(-u.UnusedFor)
		}
	}
}

// tick acts on what is overdue until the term ends.
func (e *Engine) tick() {
	every := time.NewTicker(timerEvery)
	defer every.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-every.C:
		}
		for _, do := range e.overdue(e.cfg.Now()) {
			e.wg.Go(do)
		}
	}
}

// overdue gives what is to be done about the sandboxes that have expired or are idle, and takes them in hand.
func (e *Engine) overdue(now time.Time) map[string]func() {
	e.mu.Lock()
	defer e.mu.Unlock()
	due := make(map[string]func())
	for uid, t := range e.timers {
		switch {
		case t.busy || e.stopped:
			continue
		case !t.expires.IsZero() && !now.Before(t.expires):
			due[uid] = func() { e.expire(uid, t) }
		case e.isIdle(uid, t, now):
			was := *t
			due[uid] = func() { e.rest(uid, t, was) }
		default:
			continue
		}
		t.busy = true
	}
	return due
}

// isIdle wants the lock. A paused sandbox stays idle, and goes on to the disk or to its end.
func (e *Engine) isIdle(uid string, t *timer, now time.Time) bool {
	used, known := e.used[uid]
	if t.idle == 0 || !known || now.Sub(used) < t.idle {
		return false
	}
	return t.phase == sandbox.Running || t.phase == sandbox.Paused && (t.onIdle == sandbox.IdleHibernate || t.onIdle == sandbox.IdleDelete)
}

// rest does what is to be done with a sandbox that is not used. The node makes sure that it still is not: what would be deleted is paused
// first, and whoever wants something of it then is told so.
func (e *Engine) rest(uid string, t *timer, was timer) {
	defer e.released(t)
	c, turn := Call{Tenant: was.tenant, RequestID: "idle"}, Turn{UID: uid, IfUnusedFor: was.idle}
	var err error
	switch was.onIdle {
	case sandbox.IdleHibernate:
		_, err = e.HibernateSandbox(e.ctx, c, turn)
	case sandbox.IdleDelete:
		if _, err = e.PauseSandbox(e.ctx, c, turn); err == nil {
			_, err = e.DeleteSandbox(e.ctx, c, Delete{UID: uid})
		}
	default:
		_, err = e.PauseSandbox(e.ctx, c, turn)
	}
	if err == nil || e.ctx.Err() != nil {
		return
	}
	e.log.Info("an idle sandbox was not put to rest; it is looked at again later", "sandbox", uid, "action", was.onIdle, "error", err)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.used[uid] = e.cfg.Now()
}

// expire deletes a sandbox whose lifetime is over.
func (e *Engine) expire(uid string, t *timer) {
	defer e.released(t)
	e.log.Info("the lifetime of a sandbox is over; it is deleted", "sandbox", uid, "tenant", t.tenant)
	_, err := e.DeleteSandbox(e.ctx, Call{Tenant: t.tenant, RequestID: "lifetime"}, Delete{UID: uid})
	if err != nil && e.ctx.Err() == nil && !errs.Has(err, errs.ObjectNotFound) {
		e.log.Warn("a sandbox whose lifetime is over was not deleted; it will be tried again", "sandbox", uid, "error", err)
	}
	if errs.Has(err, errs.ObjectNotFound) {
		e.resync(context.WithoutCancel(e.ctx), t.tenant, uid)
	}
}

func (e *Engine) released(t *timer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	t.busy = false
}
