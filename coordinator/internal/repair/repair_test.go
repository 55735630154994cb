package repair_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/repair"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// nodes are what the journals and inventories of nodes hold.
type nodes struct {
	journals    map[string][]*nodev1.JournalEntry
	inventories map[string]*nodev1.GetInventoryResponse
}

var errAway = errors.New("the node is away")

func (n *nodes) Journal(_ context.Context, node, after string) (*nodev1.ReadJournalResponse, error) {
	all, ok := n.journals[node]
	if !ok {
		return nil, errAway
	}
	resp := &nodev1.ReadJournalResponse{} // a page of one
	for i, e := range all {
		key := e.GetTenant() + "/" + e.GetKind() + "/" + e.GetUid()
		if after == "" || after < key {
			resp.Entries = []*nodev1.JournalEntry{e}
			if i < len(all)-1 {
				resp.Next = key
			}
			break
		}
	}
	return resp, nil
}

func (n *nodes) Inventory(_ context.Context, node, _ string) (*nodev1.GetInventoryResponse, fence.Epoch, error) {
	inv, ok := n.inventories[node]
	if !ok {
		return nil, 0, errAway
	}
	return inv, 1, nil
}

type world struct {
	*testing.T
	store *memory.Store
	epoch fence.Epoch
	nodes *nodes
	*repair.Repairer
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, store: memory.New(memory.Options{}), nodes: &nodes{journals: map[string][]*nodev1.JournalEntry{}, inventories: map[string]*nodev1.GetInventoryResponse{}}}
	t.Cleanup(func() { _ = w.store.Close() })
	lease, _, err := w.store.Lead(t.Context(), catalog.Claim{Holder: "t", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	w.epoch, w.Repairer = lease.Epoch, &repair.Repairer{Store: w.store, Nodes: w.nodes, Log: slog.New(slog.DiscardHandler)}
	return w
}

func key(kind catalog.Kind, uid string) catalog.Key {
	return catalog.Key{Tenant: "acme", Kind: kind, UID: uid}
}

func (w *world) put(kind catalog.Kind, uid, phase string, refs ...catalog.Ref) {
	w.Helper()
	old, _ := w.store.Get(w.Context(), key(kind, uid))
	w.commit(catalog.Commit{Puts: []catalog.Put{{ExpectRevision: old.Revision,
		Record: catalog.Record{Key: key(kind, uid), Name: uid, Node: "n1", Phase: phase, Refs: refs, Body: []byte("catalog")}}}})
}

func (w *world) commit(c catalog.Commit) {
	w.Helper()
	c.Owner = fence.Owner{Coordinator: w.epoch}
	results, err := w.store.Commit(w.Context(), []catalog.Commit{c})
	if err != nil || results[0].Err != nil {
		w.Fatal(err, results)
	}
}

// lost is a point that the catalog does not have, head one that it has.
func (w *world) lost() *nodev1.CatalogPoint {
	return &nodev1.CatalogPoint{Incarnation: "gone", Seq: 99, Digest: "x"}
}

func (w *world) head() *nodev1.CatalogPoint {
	h, err := w.store.History(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	return &nodev1.CatalogPoint{Incarnation: h.Head.Incarnation, Seq: h.Head.Seq, Digest: h.Head.Digest}
}

func entry(kind catalog.Kind, uid string, revision uint64, at *nodev1.CatalogPoint, refs ...string) *nodev1.JournalEntry {
	e := &nodev1.JournalEntry{Tenant: "acme", Kind: string(kind), Uid: uid, Name: uid, Node: "n1", Phase: "Ready", Revision: revision, Seq: 50, Body: []byte("journal"), Point: at}
	for _, r := range refs {
		e.References = append(e.References, &nodev1.JournalReference{Tenant: "acme", Kind: string(catalog.KindVolume), Uid: r, Mode: string(catalog.Reference)})
	}
	return e
}

func deleted(kind catalog.Kind, uid string, revision uint64, at *nodev1.CatalogPoint) *nodev1.JournalEntry {
	return &nodev1.JournalEntry{Tenant: "acme", Kind: string(kind), Uid: uid, Revision: revision, Seq: 60, Deleted: true, Point: at}
}

func (w *world) survey(all ...repair.Node) *repair.Survey {
	w.Helper()
	if all == nil {
		all = []repair.Node{{Name: "n1", Online: true}}
	}
	s, err := w.Survey(w.Context(), all)
	if err != nil {
		w.Fatal(err)
	}
	return s
}

func texts(found []repair.Finding) []string {
	var all []string
	for _, f := range found {
		all = append(all, fmt.Sprintf("%s %s %d/%d %v", f.Difference, f.Key.UID, f.Catalog, f.Journal, f.Repaired))
	}
	slices.Sort(all)
	return all
}

func (w *world) want(found []repair.Finding, want ...string) {
	w.Helper()
	slices.Sort(want)
	if got := texts(found); !slices.Equal(got, want) {
		w.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestC21RepairPutsBackWhatWasLost(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindVolume, "v-old", "Ready")
	w.put(catalog.KindSandbox, "b-older", "Starting")
	w.put(catalog.KindSandbox, "b-newer", "Starting")
	w.put(catalog.KindSandbox, "b-newer", "Running")
	w.put(catalog.KindSnapshot, "s-undeleted", "Ready", catalog.Ref{Target: key(catalog.KindVolume, "v-old"), Mode: catalog.Reference})
	part, lost := w.head(), w.lost()
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{
		entry(catalog.KindSandbox, "b-gone", 4, part), // deleted since, says the catalog, and it knows
		entry(catalog.KindSandbox, "b-newer", 1, lost),
		entry(catalog.KindSandbox, "b-older", 3, lost),
		entry(catalog.KindSnapshot, "s-lost", 2, lost, "v-lost"),
		deleted(catalog.KindSnapshot, "s-undeleted", 1, lost),
		entry(catalog.KindVolume, "v-lost", 5, lost),
		deleted(catalog.KindVolume, "v-old", 1, lost), // can go only after its snapshot
	}
	s := w.survey()
	w.want(s.Findings, "lost s-lost 0/2 false", "lost v-lost 0/5 false", "older b-older 1/3 false", "undeleted s-undeleted 1/1 false", "undeleted v-old 1/1 false")
	if err := w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "n1"}); err != nil {
		t.Fatal(err)
	}
	if err := w.Repair(t.Context(), w.epoch, s); err != nil {
		t.Fatal(err)
	}
	w.want(s.Findings, "lost s-lost 0/2 true", "lost v-lost 0/5 true", "older b-older 1/3 true", "undeleted s-undeleted 1/1 true", "undeleted v-old 1/1 true")
	for uid, revision := range map[string]uint64{"b-older": 3, "b-newer": 2} {
		if r, err := w.store.Get(t.Context(), key(catalog.KindSandbox, uid)); err != nil || r.Revision != revision {
			t.Errorf("%s: %+v, %v", uid, r, err)
		}
	}
	if h, err := w.store.Referrers(t.Context(), key(catalog.KindVolume, "v-lost"), "", 10); err != nil || h.Count != 1 {
		t.Errorf("what refers to the volume: %+v, %v", h, err)
	}
	// Again there is nothing to do.
	w.want(w.survey().Findings)
}

// What the catalog itself knows to be deleted is not put back, whatever a journal has: uids are never used again.
func TestC21RepairPutsNothingBackThatIsBuried(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindSnapshot, "buried", "Ready")
	w.commit(catalog.Commit{Deletes: []catalog.Delete{{Key: key(catalog.KindSnapshot, "buried"), ExpectRevision: 1, Tombstone: true}}})
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{entry(catalog.KindSnapshot, "buried", 1, w.lost()), entry(catalog.KindSnapshot, "lost", 1, w.lost())}
	w.want(w.survey().Findings, "lost lost 0/1 false")
}

// What concerned no node comes from who led: what lived, what was deleted, and what it knows of without a copy, which is said.
func TestC21RepairPutsBackWhatConcernedNoNode(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindSandbox, "undeleted", "Pending")
	part, lost := journal.PointOf(w.head()), journal.PointOf(w.lost())
	unplaced := func(uid string, at catalog.Point, deleted, bare bool) journal.Entry {
		return journal.Entry{Record: catalog.Record{Key: key(catalog.KindSandbox, uid), Revision: 1, Seq: 50, Phase: "Pending"}, Deleted: deleted, Bare: bare, Point: at}
	}
	w.Unplaced = []journal.Entry{
		unplaced("deleted-since", part, false, false), unplaced("pending", lost, false, false), unplaced("undeleted", lost, true, false),
		unplaced("was-never-here", lost, true, false), unplaced("without-a-copy", lost, false, true), unplaced("got-a-place", lost, false, false),
	}
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{entry(catalog.KindSandbox, "got-a-place", 2, w.lost())}
	s := w.survey()
	if err := w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "n1"}); err != nil {
		t.Fatal(err)
	}
	if err := w.Repair(t.Context(), w.epoch, s); err != nil {
		t.Fatal(err)
	}
	w.want(s.Findings, "lost pending 0/1 true", "undeleted undeleted 1/1 true", "lost without-a-copy 0/1 false", "lost got-a-place 0/2 true")
}

// What cannot be put back is said, and hinders nothing else.
func TestC21RepairReportsObjectByObject(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindVolume, "held", "Ready")
	w.commit(catalog.Commit{Puts: []catalog.Put{{Record: catalog.Record{Key: key(catalog.KindSandbox, "by-someone"), Name: "wanted",
		Refs: []catalog.Ref{{Target: key(catalog.KindVolume, "held"), Mode: catalog.Exclusive}}}}}})
	lost := w.lost()
	named := entry(catalog.KindSandbox, "had-the-name", 2, lost)
	named.Name = "wanted"
	attached := entry(catalog.KindSandbox, "had-the-volume", 2, lost)
	attached.References = []*nodev1.JournalReference{{Tenant: "acme", Kind: "volume", Uid: "held", Mode: string(catalog.Exclusive)}}
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{
		named, attached, entry(catalog.KindSnapshot, "needs-a-volume", 1, lost, "never-seen"), deleted(catalog.KindVolume, "held", 7, lost),
	}
	if err := w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "n1"}); err != nil {
		t.Fatal(err)
	}
	s := w.survey()
	if err := w.Repair(t.Context(), w.epoch, s); err != nil {
		t.Fatal(err)
	}
	w.want(s.Findings, "lost had-the-name 0/2 true", "lost had-the-volume 0/2 false", "lost needs-a-volume 0/1 false", "undeleted held 1/7 false")
	for _, f := range s.Findings {
		if f.Message == "" {
			t.Errorf("nothing is said of %s", f.Key.UID)
		}
	}
	if r, err := w.store.Get(t.Context(), key(catalog.KindSandbox, "had-the-name")); err != nil || r.Name != "" {
		t.Errorf("%+v, %v", r, err)
	}
}

// Among the journals of several nodes the highest revision counts; a node that is away is named.
func TestC21SurveyMergesNodes(t *testing.T) {
	w := newWorld(t)
	lost := w.lost()
	moved := entry(catalog.KindSandbox, "moved", 9, lost)
	moved.Node = "n2"
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{entry(catalog.KindSandbox, "moved", 8, lost)}
	w.nodes.journals["n2"] = []*nodev1.JournalEntry{moved, deleted(catalog.KindSandbox, "z", 1, lost)}
	s := w.survey(repair.Node{Name: "n1", Online: true}, repair.Node{Name: "n2", Online: true}, repair.Node{Name: "n3"}, repair.Node{Name: "n4", Online: true})
	if len(s.Away) != 2 || s.Away["n3"] == "" || s.Away["n4"] == "" || s.Entries != 3 {
		t.Errorf("away %v, %d entries", s.Away, s.Entries)
	}
	w.want(s.Findings, "lost moved 0/9 false", "unknown  0/0 false", "unknown  0/0 false")
	// A journal that has what is not its own is not believed.
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{moved}
	if s := w.survey(repair.Node{Name: "n1", Online: true}); len(s.Away) != 1 || s.Away["n1"] == "" {
		t.Errorf("away %v", s.Away)
	}
}

func TestVerifyComparesArtefacts(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindSandbox, "runs", "Running")
	w.put(catalog.KindSandbox, "lost", "Running")
	w.put(catalog.KindSandbox, "starts", "Starting")
	w.put(catalog.KindSnapshot, "there", "Ready")
	w.put(catalog.KindSnapshot, "deleted", "Ready")
	w.commit(catalog.Commit{Deletes: []catalog.Delete{{Key: key(catalog.KindSnapshot, "deleted"), ExpectRevision: 1, Tombstone: true}}})
	w.nodes.inventories["n1"] = &nodev1.GetInventoryResponse{
		Sandboxes: []*nodev1.SandboxObservation{{Tenant: "acme", Uid: "runs"}},
		Snapshots: []*nodev1.SnapshotObservation{{Tenant: "acme", Uid: "there"}, {Tenant: "acme", Uid: "deleted"}, {Tenant: "acme", Uid: "stray"}},
	}
	var found []repair.Finding
	take := func(f repair.Finding) error { found = append(found, f); return nil }
	n, err := w.Verify(t.Context(), "n1", take)
	if err != nil || n != 4 {
		t.Fatalf("%d records, %v", n, err)
	}
	w.want(found, "missing lost 1/0 false", "unrecorded deleted 0/0 false", "unrecorded stray 0/0 false")
	found = nil
	if _, err := w.Verify(t.Context(), "n9", take); err != nil {
		t.Fatal(err)
	}
	w.want(found, "unknown  0/0 false")
}
