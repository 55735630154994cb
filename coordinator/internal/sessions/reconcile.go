package sessions

import (
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// reconcileRetry bounds the delay between attempts to compare.
const reconcileRetry = 5 * time.Second

// reconcile compares once for each session, and tries again until it could.
func (r *Registry) reconcile(s *session) {
	delay := 100 * time.Millisecond
	for s.ctx.Err() == nil {
		err := r.compare(s)
		if err == nil || s.ctx.Err() != nil {
			return
		}
		s.log.Warn("records and inventory were not compared; trying again", "error", err, "after", delay)
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-s.ctx.Done():
			timer.Stop()
		}
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
	inv, epoch, err := r.cfg.Inventory(s.ctx, s.node)
	if err != nil {
		return err
	}
	if epoch != s.epoch {
		return nil // a newer session compares
	}
	there := make(map[catalog.Key]*nodev1.SandboxObservation, len(inv.GetSandboxes()))
	for _, o := range inv.GetSandboxes() {
		there[records.SandboxKey(o.GetTenant(), o.GetUid())] = o
	}
	for _, sb := range recorded {
		key := records.SandboxKey(sb.Tenant, sb.UID)
		if err := r.compareOne(s, sb, there[key]); err != nil {
			return err
		}
		delete(there, key)
	}
	for key := range there {
		if err := r.unrecorded(s, key); err != nil {
			return err
		}
	}
	for _, o := range inv.GetSnapshots() {
		if err := r.unrecorded(s, records.SnapshotKey(o.GetTenant(), o.GetUid())); err != nil {
			return err
		}
	}
	for _, o := range inv.GetVolumes() {
		if err := r.unrecorded(s, records.VolumeKey(o.GetTenant(), o.GetUid())); err != nil {
			return err
		}
	}
	return nil
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

// unrecorded removes what its tombstone proves to be deleted. Anything else is left alone:
// the absence of a record alone proves nothing.
func (r *Registry) unrecorded(s *session, key catalog.Key) error {
	if err := key.Validate(); err != nil {
		s.log.Warn("the node holds something with a malformed name", "key", key.String(), "error", err)
		return nil
	}
	orphan, err := s.term.work.Orphaned(s.ctx, key)
	if err != nil || !orphan {
		return err
	}
	s.log.Warn("the node still holds what was deleted; it is told to remove it", "kind", key.Kind, "uid", key.UID)
	_, err = s.term.work.DropOrphan(s.ctx, s.node, key)
	return err
}
