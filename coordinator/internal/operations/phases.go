package operations

import (
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// All phases that the engine commits are set here, by the table of the object's kind. What a node says may come late or be about what has
// ended since: take drops what the table does not have. What the engine decides, it decides by the phase that it has read, so that a move
// which the table does not have is a fault of its own: enter refuses it with INVARIANT_BROKEN, which is final, and nothing is committed.

// enter sets the phase of the object.
func enter[P ~string](key catalog.Key, at *P, to P, table func(from, to P) error) error {
	if err := table(*at, to); err != nil {
		return finally(errs.Wrap(err, errs.InvariantBroken, "%v; %s %s stays as it is. This is a fault of the coordinator: report it with the coordinator's log", err, key.Kind, key.UID).
			With("kind", string(key.Kind)).With("uid", key.UID).With("from", string(*at)).With("to", string(to)))
	}
	*at = to
	return nil
}

// enterSandbox is enter for a sandbox, whose reason and message were those of the phase before.
func enterSandbox(sb *records.Sandbox, to sandbox.Phase) error {
	err := enter(records.SandboxKey(sb.Tenant, sb.UID), &sb.Status.Phase, to, sandbox.Move)
	if err == nil {
		sb.Status.Reason, sb.Status.Message = "", ""
	}
	return err
}

func enterSnapshot(s *records.Snapshot, to snapshot.Phase) error {
	return enter(records.SnapshotKey(s.Tenant, s.UID), &s.Status.Phase, to, snapshot.Move)
}

func enterVolume(v *records.Volume, to volume.Phase) error {
	return enter(records.VolumeKey(v.Tenant, v.UID), &v.Status.Phase, to, volume.Move)
}

func enterTemplate(t *records.Template, to warm.TemplatePhase) error {
	return enter(records.TemplateKey(t.Tenant, t.UID), &t.Status.Phase, to, warm.MoveTemplate)
}

func enterPool(p *records.Pool, to warm.PoolPhase) error {
	return enter(records.PoolKey(p.Tenant, p.UID), &p.Status.Phase, to, warm.MovePool)
}

// leave is the last move of an object, when its tombstone takes the record's place.
func leave(rec catalog.Record) error {
	switch rec.Kind {
	case catalog.KindSnapshot:
		at := snapshot.Phase(rec.Phase)
		return enter(rec.Key, &at, snapshot.Deleted, snapshot.Move)
	case catalog.KindVolume:
		at := volume.Phase(rec.Phase)
		return enter(rec.Key, &at, volume.Deleted, volume.Move)
	case catalog.KindTemplate:
		at := warm.TemplatePhase(rec.Phase)
		return enter(rec.Key, &at, warm.Gone, warm.MoveTemplate)
	case catalog.KindPool:
		at := warm.PoolPhase(rec.Phase)
		return enter(rec.Key, &at, warm.PoolGone, warm.MovePool)
	}
	at := sandbox.Phase(rec.Phase)
	return enter(rec.Key, &at, sandbox.Gone, sandbox.Move)
}

// take changes the phase of a sandbox to what its node says of it, or to what follows if it may have ended since it was read. It tells
// whether the table has the row; otherwise nothing changes.
func take(sb *records.Sandbox, to sandbox.Phase, reason, message string) bool {
	if sandbox.Move(sb.Status.Phase, to) != nil {
		return false
	}
	sb.Status.Phase, sb.Status.Reason, sb.Status.Message = to, reason, message
	return true
}

// takeSnapshot takes over what a node says of the snapshot that it took. Its phase is not the node's to say, and what it refers to is
// what was reserved.
func takeSnapshot(snap *records.Snapshot, got snapshot.Status) {
	was := snap.Status
	snap.Status = got
	snap.Status.Phase, snap.Status.Volumes, snap.Status.Nodes = was.Phase, was.Volumes, []string{snap.SourceNode}
	if got.Image == "" {
		snap.Status.Image = was.Image
	}
}
