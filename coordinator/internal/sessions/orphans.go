package sessions

import (
	"context"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// Orphans: what a node holds although no record names it. Why it is so: docs/adr/0044-deletion.md.
//
// A thing that a node holds is, by what is known of it,
//
//	owned      a record names it, in whatever phase
//	deleted    the catalog has its tombstone: it is removed
//	traced     no tombstone any more, but the node's own journal says that it was deleted, at a point of the history that the
//	           catalog has: it is removed when two looks of one session found it so, at least OrphanGrace apart
//	unproven   neither: it is left alone, counted and shown. What a repair of the catalog gave up is such a thing: an operator drops or adopts it
//
// A look reads the inventory before the records, since a record is made before what it names. What is deleted while it reads is owned still: its
// operation removes it. One that could not read the inventory or the
// catalog ends there, and nothing more is removed: what cannot be read is never empty. A journal that cannot be read proves nothing in that look,
// which comes again; what has a tombstone goes all the same. What is
// removed is removed by the node itself, which writes down its intent first; a crash between any two steps leaves the rest to the
// next look.

const (
	// maxTraces bounds how much one look asks of a node's journal.
	maxTraces = 500
	// dropTime bounds the removal of one orphan, with the wait for its turn.
	dropTime = 5 * time.Minute
	// namedHeld is how many of those that are left alone the log names.
	namedHeld = 5
)

// look is one look at what a node holds.
type look struct {
	moment               uint64 // when it began
	removed, held, asked int
	names                []string
	suspects             map[catalog.Key]time.Time
	unread               error // of the node's journal
}

func (l *look) leave(name string) {
	if l.held++; len(l.names) < namedHeld {
		l.names = append(l.names, name)
	}
}

// look looks once for orphans of the session's node.
func (r *Registry) look(s *session) error {
	l := look{suspects: make(map[catalog.Key]time.Time)}
	var err error
	if l.moment, err = s.term.work.Moment(s.ctx); err == nil {
		err = r.inventory(s, func(inv *nodev1.GetInventoryResponse) error { return r.sift(s, inv, &l) })
	}
	if err == nil {
		err = l.unread
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	s.suspects = l.suspects
	r.removed.Add(int64(l.removed))
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[s.node]
	if n == nil || n.session != s {
		return err
	}
	if n.unread = err != nil; n.unread {
		return err
	}
	if l.held > 0 && l.held != n.held {
		s.log.Warn("the node holds what no record names and nothing proves to be deleted; it is left alone: see \"dormouse admin catalog verify\"", "count", l.held, "first", l.names)
	}
	n.held = l.held
	return nil
}

// sift takes one page of the inventory.
func (r *Registry) sift(s *session, inv *nodev1.GetInventoryResponse, l *look) error {
	for _, id := range inv.GetUnownedArtefacts() {
		l.leave(id)
	}
	var keys []catalog.Key
	add := func(k catalog.Key) {
		if err := k.Validate(); err != nil { // of a node whose records were lost
			l.leave(k.UID)
			return
		}
		keys = append(keys, k)
	}
	for _, o := range inv.GetSandboxes() {
		add(records.SandboxKey(o.GetTenant(), o.GetUid()))
	}
	for _, o := range inv.GetSnapshots() {
		add(records.SnapshotKey(o.GetTenant(), o.GetUid()))
	}
	for _, o := range inv.GetVolumes() {
		add(records.VolumeKey(o.GetTenant(), o.GetUid()))
	}
	for chunk := range slices.Chunk(keys, catalog.MaxPage) {
		verdicts, err := s.term.work.Judge(s.ctx, l.moment, chunk)
		if err != nil {
			return err
		}
		for _, key := range chunk {
			if err := r.settle(s, key, verdicts[key], l); err != nil {
				return err
			}
		}
	}
	return nil
}

// settle does what the verdict demands.
func (r *Registry) settle(s *session, key catalog.Key, v operations.Verdict, l *look) error {
	deleted := v == operations.Deleted
	if v == operations.Unproven {
		deleted = r.proven(s, key, l)
	}
	switch {
	case v == operations.Owned:
		return nil
	case !deleted:
		l.leave(key.UID)
		return nil
	}
	fault.At("orphan.proof.after")
	s.log.Warn("the node still holds what was deleted; it is told to remove it", "kind", key.Kind, "uid", key.UID)
	ctx, cancel := context.WithTimeout(s.ctx, dropTime)
	defer cancel()
	_, err := s.term.work.DropOrphan(ctx, s.node, key, operations.WasDeleted)
	switch {
	case err == nil:
		l.removed++
	case s.ctx.Err() != nil || errs.Has(err, errs.NodeAway) || errs.Has(err, errs.Fenced):
		return err
	default: // it alone
		s.log.Warn("an orphan was not removed; the next look tries again", "kind", key.Kind, "uid", key.UID, "error", err)
		l.leave(key.UID)
	}
	return nil
}

// proven is traced, but what cannot be read proves nothing, and is not asked for again in this look: what has another proof goes on.
func (r *Registry) proven(s *session, key catalog.Key, l *look) bool {
	if l.unread != nil {
		return false
	}
	deleted, err := r.traced(s, key, l)
	l.unread = err
	return deleted && err == nil
}

// traced tells whether the node's journal proves that something was deleted, and it was seen so for long enough.
func (r *Registry) traced(s *session, key catalog.Key, l *look) (bool, error) {
	if l.asked >= maxTraces {
		return false, nil
	}
	l.asked++
	e, err := r.cfg.Trace(s.ctx, s.node, key.String())
	if err != nil || !e.GetDeleted() || e.GetGivenUp() {
		return false, err
	}
	confirmed, err := s.term.work.Confirms(s.ctx, key, journal.PointOf(e.GetPoint()))
	if err != nil || !confirmed {
		return false, err
	}
	first, before := s.suspects[key]
	if !before {
		first = time.Now()
	}
	l.suspects[key] = first
	if !before {
		fault.At("orphan.suspect.after")
	}
	return before && time.Since(first) >= r.cfg.OrphanGrace, nil
}

// LookAgain has the node looked at soon for what no record names.
func (r *Registry) LookAgain(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sessionOf(node); s != nil {
		select {
		case s.again <- struct{}{}:
		default: // it will be
		}
	}
}

// Orphans tells how many were removed in this term, how many online nodes hold that are left alone, and how many of these
// nodes could not be read.
func (r *Registry) Orphans() (removed int64, held, unread int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.nodes {
		if n.session != nil {
			held += n.held
			if n.unread {
				unread++
			}
		}
	}
	return r.removed.Load(), held, unread
}
