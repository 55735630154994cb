package sessions_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

func (w *world) head() *nodev1.CatalogPoint {
	w.Helper()
	h, err := w.store.History(w.Context())
	w.ok(err)
	return &nodev1.CatalogPoint{Incarnation: h.Head.Incarnation, Seq: h.Head.Seq, Digest: h.Head.Digest}
}

func (w *world) events(reason string) (found []string) {
	w.Helper()
	page, err := w.store.List(w.Context(), catalog.Query{Kind: catalog.KindEvent, PageSize: catalog.MaxPage})
	w.ok(err)
	for _, r := range page.Records {
		ev, err := records.EventOf(r)
		w.ok(err)
		if ev.Reason == reason {
			found = append(found, ev.ObjectUID)
		}
	}
	return found
}

// What a node holds is removed for a tombstone, or for a trace of its deletion in the node's own journal that the catalog's
// history confirms and that a second look finds again. Everything else is left alone and counted, on whichever page it is.
func TestOrphansAreRemovedWithProofOnly(t *testing.T) {
	w := newWorldWith(t, time.Millisecond)
	first := w.begin()
	box := w.sandbox()
	owned, buried := w.snapshot(box), w.buried(box)
	w.leave(first)
	traced, foreign, living, unproven, nameless, givenUp := uid.New(), uid.New(), uid.New(), uid.New(), uid.New(), uid.New()
	key := func(u string) string { return records.SnapshotKey(tenant, u).String() }
	w.mu.Lock()
	w.traces = map[string]*nodev1.JournalEntry{
		key(traced):  {Deleted: true, Point: w.head()},
		key(foreign): {Deleted: true, Point: &nodev1.CatalogPoint{Incarnation: "another", Seq: 3, Digest: "x"}},
		key(living):  {Point: w.head()},
		key(givenUp): {Deleted: true, GivenUp: true, Point: w.head()}, // by a repair, which deleted nothing
		key(owned):   {Deleted: true, Point: w.head()},                // a record counts more
	}
	w.second = there(buried, living, unproven, givenUp)
	w.second.UnownedArtefacts = []string{uid.New()}
	w.mu.Unlock()
	inv := there(owned, traced, foreign, nameless)
	inv.Snapshots[3].Tenant = ""
	inv.Sandboxes = append(inv.Sandboxes, running(box, 1))
	w.holds(inv, nil)
	w.open()
	w.eventually("those with a proof are removed, the others are counted", func() bool {
		removed, held, unread := w.registry.Orphans()
		return removed == 2 && held == 6 && unread == 0
	})
	told := w.agents.forget()
	if len(told) != 2 || told[0] != buried || told[1] != traced { // the trace is believed at the second look only
		t.Errorf("the node was told to delete %v, want %s and then %s", told, buried, traced)
	}
	if said := w.events("OrphanRemoved"); len(said) != 2 {
		t.Errorf("events of %v", said)
	}
	if rec := w.record(records.SnapshotKey(tenant, owned)); rec.Phase != "Ready" {
		t.Errorf("what has a record is %s", rec.Phase)
	}
}

// A journal that cannot be read proves nothing, and keeps nothing else from being removed, whatever comes first.
func TestUnreadableJournalProvesNothing(t *testing.T) {
	w := newWorldWith(t, time.Millisecond)
	first := w.begin()
	buried := w.buried(w.sandbox())
	w.leave(first)
	traced := uid.New()
	w.mu.Lock()
	w.traces = map[string]*nodev1.JournalEntry{records.SnapshotKey(tenant, traced).String(): {Deleted: true, Point: w.head()}}
	w.torn = errors.New("torn")
	w.mu.Unlock()
	w.holds(there(traced, uid.New(), buried), nil)
	w.open()
	w.eventually("the one with a tombstone is removed, and the journal missed", func() bool {
		removed, _, unread := w.registry.Orphans()
		return removed > 0 && unread == 1
	})
	if told := w.agents.forget(); slices.ContainsFunc(told, func(u string) bool { return u != buried }) {
		t.Errorf("the node was told to delete %v", told)
	}
	w.mu.Lock()
	w.torn = nil
	w.mu.Unlock()
	w.eventually("the other one follows", func() bool {
		_, _, unread := w.registry.Orphans()
		return w.agents.has(traced) && unread == 0
	})
}

// A catalog that is suspended proves nothing: it lost something, and nobody knows what.
func TestSuspendedCatalogProvesNothing(t *testing.T) {
	w := newWorldWith(t, time.Millisecond)
	first := w.begin()
	box := w.sandbox()
	orphan := w.buried(box)
	_, err := w.engine.DeleteSandbox(t.Context(), w.call(), operations.Delete{UID: box})
	w.ok(err)
	_ = w.agents.forget()
	w.leave(first)
	w.ok(w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "the test", Witness: catalog.Point{Incarnation: "x", Seq: 1 << 20, Digest: "y"}}))
	w.holds(there(orphan), nil)
	w.open()
	w.eventually("it says that it does not know", func() bool { _, _, unread := w.registry.Orphans(); return unread == 1 })
	if told := w.agents.forget(); len(told) > 0 {
		t.Errorf("the node was told to delete %v", told)
	}
	w.ok(w.store.Resume(t.Context(), w.epoch))
	w.eventually("it is removed afterwards", func() bool { return w.agents.has(orphan) })
	w.eventually("and known", func() bool { _, _, unread := w.registry.Orphans(); return unread == 0 })
}
