package redis_test

import (
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// A server that came back older takes no commit from a store that has seen more, not even the first one.
func TestC21_RewoundServerTakesNothing(t *testing.T) {
	server := redistest.Start(t)
	s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f := catalogtest.NewFixture(t, s)
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	f.Must(catalogtest.Create(catalogtest.Sandbox("b")))
	seen := s.Seen()
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	f.Refused(errs.CatalogRewound, catalog.Commit{Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("c"))}})
	related(t, s, seen, catalog.Lost)

	// Another coordinator that has seen nothing leads, and the catalog grows past what was lost: it is still noticed.
	fresh, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	if err := s.Release(t.Context(), "tester", f.Owner.Coordinator); err != nil {
		t.Fatal(err)
	}
	g := catalogtest.NewFixture(t, fresh)
	for _, uid := range []string{"b", "c", "d"} {
		g.Must(catalogtest.Create(catalogtest.Sandbox(uid)))
	}
	if now := fresh.Seen(); now.Seq <= seen.Seq || now.Incarnation != seen.Incarnation {
		t.Fatalf("seen %+v, now %+v", seen, now)
	}
	related(t, fresh, seen, catalog.Lost)
}

// Restarting on all of its data is another generation, and loses nothing.
func TestC15_GenerationCountsServers(t *testing.T) {
	server := redistest.Start(t)
	s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f := catalogtest.NewFixture(t, s)
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	first, over := s.Generation()
	select {
	case <-over:
		t.Fatal("another server was met")
	default:
	}
	server.Kill(t)
	server.Restart(t)
	f.Must(catalogtest.Create(catalogtest.Sandbox("b")))
	select {
	case <-over:
	case <-time.After(time.Minute):
		t.Fatal("the restart was not noticed")
	}
	if second, _ := s.Generation(); second != first+1 {
		t.Errorf("generation %d after %d", second, first)
	}
	related(t, s, s.Seen(), catalog.Part)
}

// A catalog whose server lost everything is another one.
func TestC21_EmptiedServer(t *testing.T) {
	server := redistest.Start(t)
	s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	empty := t.TempDir()
	f := catalogtest.NewFixture(t, s)
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	seen := s.Seen()
	server.Kill(t)
	server.Rewind(t, empty)
	server.Restart(t)
	r := f.One(catalog.Commit{Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("b"))}})
	if r.Err == nil || r.Err.Reason != errs.Fenced {
		t.Errorf("committed: %v", r.Err)
	}
	again, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	related(t, again, seen, catalog.Foreign)
}

// What the change log has forgotten is told by the marks.
func TestMarksOutliveTheLog(t *testing.T) {
	server := redistest.Start(t)
	s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket, Retention: catalog.Retention{Changes: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f := catalogtest.NewFixture(t, s)
	batch := make([]catalog.Commit, 0, catalog.MarkEvery)
	commit := func() catalog.History {
		batch = batch[:0]
		for range catalog.MarkEvery {
			batch = append(batch, catalog.Commit{Owner: f.Owner})
		}
		if _, err := s.Commit(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		h, err := s.History(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	commit()
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	h, err := s.History(t.Context())
	if err != nil || h.Mark.Seq != catalog.MarkEvery {
		t.Fatalf("%+v %v", h, err)
	}
	for range 3 {
		commit()
	}
	related(t, s, h.Head, catalog.Forgotten)
	related(t, s, h.Mark, catalog.Part)
	h.Mark.Digest = h.Head.Digest
	related(t, s, h.Mark, catalog.Lost)
}

func related(t *testing.T, s catalog.Store, p catalog.Point, want catalog.Relation) {
	t.Helper()
	if got, err := s.Compare(t.Context(), p); err != nil || got != want {
		t.Errorf("%+v is %q (%v), want %q", p, got, err, want)
	}
}
