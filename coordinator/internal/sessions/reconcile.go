package sessions

import (
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/wait"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// reconcileRetry bounds the delay between attempts to compare.
const reconcileRetry = 5 * time.Second

// reconcile compares once for each session, and looks for orphans then and now and then. Each is tried again until it
// could be done.
func (r *Registry) reconcile(s *session) {
	r.retry(s, "records and inventory were not compared; trying again", r.compare)
	for s.ctx.Err() == nil {
		r.retry(s, "what the node holds is not known, and nothing is removed there; looking again", r.look)
		timer := time.NewTimer(r.cfg.OrphansEvery)
		select {
		case <-timer.C:
		case <-s.again:
		case <-s.ctx.Done():
		}
		timer.Stop()
	}
}

func (r *Registry) retry(s *session, failed string, do func(*session) error) {
	delay := 100 * time.Millisecond
	for s.ctx.Err() == nil {
		err := do(s)
		if err == nil || s.ctx.Err() != nil {
			return
		}
		s.log.Warn(failed, "error", err, "after", delay)
		_ = wait.For(s.ctx, delay)
		delay = min(2*delay, reconcileRetry)
	}
}

// compare reads the records, then the inventory: in this order, since a sandbox is on its node before its
// record says that it runs.
func (r *Registry) compare(s *session) error {
	recorded, err := s.term.work.Placements(s.ctx, s.node)
	if err != nil {
		return err
	}
	there := make(map[catalog.Key]*nodev1.SandboxObservation)
	err = r.inventory(s, func(inv *nodev1.GetInventoryResponse) error {
		for _, o := range inv.GetSandboxes() {
			there[records.SandboxKey(o.GetTenant(), o.GetUid())] = o
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, sb := range recorded {
		if err := r.compareOne(s, sb, there[records.SandboxKey(sb.Tenant, sb.UID)]); err != nil {
			return err
		}
	}
	return nil
}

// inventory gives each page of what the node holds. An error means that it is not known.
func (r *Registry) inventory(s *session, page func(*nodev1.GetInventoryResponse) error) error {
	for after := ""; ; {
		inv, epoch, err := r.cfg.Inventory(s.ctx, s.node, after)
		if err != nil {
			return err
		}
		if epoch != s.epoch {
			return errs.New(errs.Fenced, "another session of node %s began while it was asked", s.node).With("node", s.node)
		}
		if err := page(inv); err != nil {
			return err
		}
		if after = inv.GetNext(); after == "" {
			return nil
		}
	}
}

func (r *Registry) compareOne(s *session, sb *records.Sandbox, there *nodev1.SandboxObservation) error {
	if there != nil {
		o, err := nodeclient.Observation(there)
		if err != nil {
			return err
		}
		o.Session = s.epoch
		return s.term.work.Observe(s.ctx, s.node, o)
	}
	switch sb.Status.Phase {
	case sandbox.Running, sandbox.Paused, sandbox.Hibernating, sandbox.Hibernated, sandbox.Resuming:
		s.log.Error("the node came back without a sandbox", "sandbox", sb.UID, "phase", sb.Status.Phase)
		return s.term.work.Lost(s.ctx, s.node, s.epoch, sb.Tenant, sb.UID, sb.Revision)
	}
	return nil // an operation has it in hand, or it ended
}
