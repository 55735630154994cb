package journal_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node keeps what it is sent, as agentd does.
type node struct {
	t    *testing.T
	name string

	mu       sync.Mutex
	entries  map[catalog.Key]journal.Entry
	complete catalog.Point
	wholes   int
}

// session feeds the node until stop is called.
func (n *node) session(m *journal.Mirror) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var feed *journal.Feed
	ready := make(chan struct{})
	feed = m.Feed(n.name, func(j *nodev1.Journal) error {
		<-ready
		n.keep(j)
		feed.Acked(j.GetId())
		return nil
	})
	close(ready)
	n.mu.Lock()
	has := n.complete
	n.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := feed.Run(ctx, has); ctx.Err() == nil {
			n.t.Errorf("the feed of %s ended: %v", n.name, err)
		}
	}()
	return func() { cancel(); <-done }
}

func (n *node) keep(j *nodev1.Journal) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if j.GetWholeBegins() {
		n.wholes++
	}
	for _, p := range j.GetEntries() {
		p.Point = j.GetPoint()
		e, err := journal.EntryOf(n.name, p)
		if err != nil {
			n.t.Error(err)
			continue
		}
		if e.Record.Seq > e.Point.Seq {
			n.t.Errorf("%s is of commit %d, its point is %d", e.Record.Key, e.Record.Seq, e.Point.Seq)
		}
		if old, ok := n.entries[e.Record.Key]; ok && old.Record.Revision > e.Record.Revision {
			n.t.Errorf("%s went from revision %d to %d", e.Record.Key, old.Record.Revision, e.Record.Revision)
		}
		n.entries[e.Record.Key] = e
	}
	if c := journal.PointOf(j.GetComplete()); !c.IsZero() {
		n.complete = c
	}
}

type world struct {
	*testing.T
	store *memory.Store
	epoch fence.Epoch
	head  uint64

	living []catalog.Key
}

func newWorld(t *testing.T, r catalog.Retention) *world {
	w := &world{T: t, store: memory.New(memory.Options{Retention: r})}
	lease, _, err := w.store.Lead(t.Context(), catalog.Claim{Holder: "t", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	w.epoch = lease.Epoch
	t.Cleanup(func() { _ = w.store.Close() })
	return w
}

func (w *world) mirror() *journal.Mirror {
	m := journal.New(journal.Options{Catalog: w.store, Pause: time.Millisecond, Idle: 5 * time.Millisecond,
		OnLost: func(p catalog.Point) { w.Errorf("%v was lost", p) }})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	w.Cleanup(func() { cancel(); <-done })
	return m
}

func (w *world) commit(c catalog.Commit) {
	w.Helper()
	c.Owner = fence.Owner{Coordinator: w.epoch}
	results, err := w.store.Commit(context.Background(), []catalog.Commit{c})
	if err != nil || results[0].Err != nil {
		w.Fatal(err, results)
	}
	w.head = results[0].Seq
}

// change makes, changes, moves or deletes a record of one of two nodes, or of none.
func (w *world) change(r *rand.Rand) {
	w.Helper()
	on := []string{"n1", "n2", ""}[r.IntN(3)]
	slot := r.IntN(40)
	if slot >= len(w.living) { // uids are never used again
		k := catalog.Key{Tenant: "acme", Kind: catalog.KindSandbox, UID: fmt.Sprintf("s-%05d", w.head)}
		w.commit(catalog.Commit{Puts: []catalog.Put{{Record: catalog.Record{Key: k, Node: on, Phase: "Running"}}}})
		w.living = append(w.living, k)
		return
	}
	rec, err := w.store.Get(context.Background(), w.living[slot])
	if err != nil {
		w.Fatal(err)
	}
	if r.IntN(4) == 0 {
		w.commit(catalog.Commit{Deletes: []catalog.Delete{{Key: rec.Key, ExpectRevision: rec.Revision}}})
		w.living = slices.Delete(w.living, slot, slot+1)
		return
	}
	if r.IntN(3) > 0 { // else it moves
		on = rec.Node
	}
	w.commit(catalog.Commit{Puts: []catalog.Put{{Record: catalog.Record{Key: rec.Key, Node: on, Phase: "Running", Body: []byte(fmt.Sprint(w.head))}, ExpectRevision: rec.Revision}}})
}

// same waits until the node has exactly what the catalog has of it.
func (w *world) same(n *node) {
	w.Helper()
	deadline := time.After(time.Minute)
	for {
		n.mu.Lock()
		reached := n.complete.Seq >= w.head
		n.mu.Unlock()
		if reached {
			break
		}
		select {
		case <-deadline:
			w.Fatalf("%s has the catalog up to %v, not %d", n.name, n.complete, w.head)
		case <-time.After(time.Millisecond):
		}
	}
	page, err := w.store.List(context.Background(), catalog.Query{Kind: catalog.KindSandbox, Node: n.name, PageSize: catalog.MaxPage})
	if err != nil || page.Next != "" {
		w.Fatal(err, page.Next)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	living := 0
	for _, e := range n.entries {
		if !e.Deleted {
			living++
		}
	}
	if living < len(page.Records) { // what moved away may stay
		w.Errorf("%s has %d records, the catalog %d", n.name, living, len(page.Records))
	}
	for _, rec := range page.Records {
		e, ok := n.entries[rec.Key]
		if !ok || e.Deleted || e.Record.Revision != rec.Revision || string(e.Record.Body) != string(rec.Body) {
			w.Errorf("%s has %+v of %+v", n.name, e, rec)
		}
	}
}

// Nodes come and go while the catalog changes; what they keep is what the catalog has of them.
func TestC21JournalsFollow(t *testing.T) {
	for _, retention := range []int64{0, 7} { // with 7 the log is too short, and the whole is sent
		t.Run(fmt.Sprint("log of ", retention), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t, catalog.Retention{Changes: retention})
			nodes := []*node{{t: t, name: "n1", entries: map[catalog.Key]journal.Entry{}}, {t: t, name: "n2", entries: map[catalog.Key]journal.Entry{}}}
			for range 3 {
				m := w.mirror()
				for range 4 {
					for range 30 {
						w.change(r)
					}
					stops := []func(){nodes[0].session(m), nodes[1].session(m)}
					for range 30 {
						w.change(r)
					}
					for _, n := range nodes {
						w.same(n)
					}
					for _, stop := range stops {
						stop()
					}
				}
			}
			for _, n := range nodes {
				if n.wholes == 0 || retention == 0 && n.wholes != 1 {
					t.Errorf("%s was sent the whole %d times", n.name, n.wholes)
				}
			}
		})
	}
}
