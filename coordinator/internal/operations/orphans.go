package operations

import (
	"context"
	"math"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Verdict is what the catalog says of something that a node holds.
type Verdict string

// The verdicts. The zero Verdict is no verdict, and nothing may be done on it.
const (
	// Owned has a record, in whatever phase: what is Deleting still owns its artefact. Or it had one when the node was read.
	Owned Verdict = "owned"
	// Deleted has a tombstone: uids are never used again, so it stays deleted.
	Deleted Verdict = "deleted"
	// Unproven has neither. It may be lost, or its tombstone is forgotten.
	Unproven Verdict = "unproven"
)

// Moment is the newest commit, for Judge: to be asked for before a node is read.
func (e *Engine) Moment(ctx context.Context) (seq uint64, err error) {
	st, err := e.cfg.Catalog.Status(ctx)
	if err == nil && st.Suspended != nil {
		err = catalog.Refusal(errs.CatalogRewound)
	}
	return st.Seq, err
}

// Judge tells of up to catalog.MaxPage keys, which a node had after the moment, what the catalog says. All of it, or an error: a catalog that
// cannot be read, or is suspended because it lost something, says nothing. What was deleted after the moment may have been there when the node was read, and gone
// in its turn since: it was owned then, and if it is still there the next look finds it.
func (e *Engine) Judge(ctx context.Context, moment uint64, keys []catalog.Key) (map[catalog.Key]Verdict, error) {
	living, err := e.cfg.Catalog.Living(ctx, keys)
	if err != nil {
		return nil, err
	}
	verdicts := make(map[catalog.Key]Verdict, len(keys))
	for _, key := range keys {
		if living[key] {
			verdicts[key] = Owned
			continue
		}
		tomb, err := e.cfg.Catalog.Tombstone(ctx, key)
		switch {
		case err == nil && tomb.Seq > moment:
			verdicts[key] = Owned
		case err == nil:
			verdicts[key] = Deleted
		case errs.Has(err, errs.ObjectNotFound):
			verdicts[key] = Unproven
		default:
			return nil, err
		}
	}
	if len(living) == len(keys) {
		return verdicts, nil
	}
	if _, err := e.Moment(ctx); err != nil {
		return nil, err
	}
	return verdicts, nil
}

// Confirms tells whether the catalog's history has a point of which a node says that something was deleted by then, and
// still no record is there.
func (e *Engine) Confirms(ctx context.Context, key catalog.Key, p catalog.Point) (bool, error) {
	relation, err := e.cfg.Catalog.Compare(ctx, p)
	if err != nil || relation != catalog.Part {
		return false, err
	}
	verdicts, err := e.Judge(ctx, math.MaxUint64, []catalog.Key{key})
	return err == nil && verdicts[key] != Owned, err
}

// Why an orphan is dropped, as its event says.
const (
	WasDeleted  = "it was deleted"
	WasGivenUp  = "a repair of the catalog went on without it, and an operator dropped it"
	WasAccepted = "nothing proves that it was deleted, and an operator accepted its loss"
)

// DropOrphan has a node remove what it still holds although it was deleted for certain, or an operator gave it up, in its turn like any deletion,
// and says so, and why, by an event. The node refuses it (FENCED) in another session than the one in force.
func (e *Engine) DropOrphan(ctx context.Context, node string, key catalog.Key, why string) (session fence.Epoch, err error) {
	leave, err := e.turns.take(ctx, node, key.Tenant)
	if err != nil {
		return 0, err
	}
	defer leave()
	// A new id each time: the answer to an earlier removal says nothing of what is there now.
	c := Command{ID: "orphan/" + uid.New(), Tenant: key.Tenant}
	fault.At("orphan.remove.before")
	switch key.Kind {
	case catalog.KindSandbox:
		session, err = e.cfg.Agents.DeleteSandbox(ctx, node, c, key.UID)
	case catalog.KindSnapshot:
		session, err = e.cfg.Agents.DeleteSnapshot(ctx, node, c, key.UID)
	default:
		session, err = e.cfg.Agents.DeleteVolume(ctx, node, c, key.UID)
	}
	if err != nil {
		return session, err
	}
	fault.At("orphan.remove.after")
	_, err = e.publish(ctx, func(context.Context, catalog.Reader) (catalog.Commit, error) {
		ev, err := e.event(key, "OrphanRemoved", why+"; node "+node+" still held it", true)
		return catalog.Commit{Puts: []catalog.Put{ev}}, err
	})
	if err != nil {
		e.log.Warn("the removal of an orphan has no event", "node", node, "kind", key.Kind, "uid", key.UID, "error", err)
	}
	fault.At("orphan.event.after")
	return session, nil
}
