package journal_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// slow is a catalog whose answers take a while: what is read of a record is held back until then returns, once.
type slow struct {
	*memory.Store

	mu   sync.Mutex
	key  catalog.Key
	then func()
}

func (s *slow) hold(key catalog.Key, then func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.key, s.then = key, then
}

func (s *slow) read(key catalog.Key) {
	s.mu.Lock()
	then := s.then
	if then == nil || key != s.key {
		s.mu.Unlock()
		return
	}
	s.then = nil
	s.mu.Unlock()
	then()
}

func (s *slow) GetMany(ctx context.Context, keys []catalog.Key) (map[catalog.Key]catalog.Record, error) {
	found, err := s.Store.GetMany(ctx, keys)
	for k := range found {
		s.read(k)
	}
	return found, err
}

func (s *slow) List(ctx context.Context, q catalog.Query) (catalog.Page, error) {
	page, err := s.Store.List(ctx, q)
	for _, r := range page.Records {
		s.read(r.Key)
	}
	return page, err
}

// A record that is deleted between its reading and the point that its message gets is not said to live at that point: a catalog that came back from in
// between has the deletion and not the point, and would be given the record back.
func TestC21NothingLivesAtAPointAtWhichItIsDeleted(t *testing.T) {
	for _, whole := range []bool{true, false} {
		t.Run(map[bool]string{true: "whole", false: "tail"}[whole], func(t *testing.T) {
			w := newWorld(t, catalog.Retention{})
			store := &slow{Store: w.store}
			m := journal.New(journal.Options{Catalog: store, Pause: time.Millisecond, Idle: 5 * time.Millisecond, OnLost: func(p catalog.Point) { t.Errorf("%v was lost", p) }})
			ctx, cancel := context.WithCancel(context.Background())
			var group sync.WaitGroup
			defer group.Wait()
			defer cancel()
			group.Go(func() { m.Run(ctx) })
			key := catalog.Key{Tenant: "acme", Kind: catalog.KindSnapshot, UID: "s"}
			var buried uint64
			committed := make(chan struct{})
			bury := func() {
				<-committed // the world is used by one at a time
				w.commit(catalog.Commit{Deletes: []catalog.Delete{{Key: key, ExpectRevision: 1}}})
				buried = w.head
				for m.Unplaced().To.Seq < buried && ctx.Err() == nil {
					<-time.After(time.Millisecond)
				}
			}
			put := func() {
				store.hold(key, bury)
				w.commit(catalog.Commit{Puts: []catalog.Put{{Record: catalog.Record{Key: key, Node: "n1", Phase: "Ready"}}}})
				close(committed)
			}
			if whole {
				put()
			}
			told, lied := make(chan struct{}), make(chan catalog.Point, 100)
			saidOnce := sync.OnceFunc(func() { close(told) })
			begun := make(chan struct{})
			began := sync.OnceFunc(func() { close(begun) })
			var feed *journal.Feed
			ready := make(chan struct{})
			feed = m.Feed("n1", func(j *nodev1.Journal) error {
				<-ready
				for _, e := range j.GetEntries() {
					switch p := journal.PointOf(j.GetPoint()); {
					case e.GetUid() == key.UID && !e.GetDeleted():
						lied <- p
					case e.GetUid() == key.UID:
						saidOnce()
					}
				}
				feed.Acked(j.GetId())
				if j.GetComplete() != nil {
					began()
				}
				return nil
			})
			close(ready)
			group.Go(func() { _ = feed.Run(ctx, catalog.Point{}) })
			<-begun
			if !whole {
				put()
			}
			<-told
			select {
			case p := <-lied:
				t.Errorf("the record was deleted by commit %d and is said to live at %v", buried, p)
			default:
			}
		})
	}
}
