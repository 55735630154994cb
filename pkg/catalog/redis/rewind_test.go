package redis_test

import (
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// A server that came back older takes no commit from a store that has seen more, not even the first one.
func TestC21_RewoundServerTakesNothing(t *testing.T) { redistest.Each(t, rewoundServerTakesNothing) }

func rewoundServerTakesNothing(t *testing.T, p redistest.Program) {
	server := p.Start(t)
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
func TestC15_GenerationCountsServers(t *testing.T) { redistest.Each(t, generationCountsServers) }

func generationCountsServers(t *testing.T, p redistest.Program) {
	server := p.Start(t)
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
func TestC21_EmptiedServer(t *testing.T) { redistest.Each(t, emptiedServer) }

func emptiedServer(t *testing.T, p redistest.Program) {
	server := p.Start(t)
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
func TestMarksOutliveTheLog(t *testing.T) { redistest.Each(t, marksOutliveTheLog) }

func marksOutliveTheLog(t *testing.T, p redistest.Program) {
	server := p.Start(t)
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

// An epoch that the server lost and granted anew belongs to whom it was granted to last, though both know it by the same number.
func TestC22_EpochGrantedTwice(t *testing.T) { redistest.Each(t, epochGrantedTwice) }

func epochGrantedTwice(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	first := open(t, redis.Options{Address: server.Socket})
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	lead := func(s *redis.Store, holder string) fence.Owner {
		lease, won, err := s.Lead(t.Context(), catalog.Claim{Holder: holder, TTL: time.Hour})
		if err != nil || !won {
			t.Fatal(lease, won, err)
		}
		return fence.Owner{Coordinator: lease.Epoch}
	}
	was := lead(first, "first")
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	second := open(t, redis.Options{Address: server.Socket})
	is := lead(second, "second")
	if is != was {
		t.Fatalf("the epochs are %v and %v; the test wants the same", was, is)
	}
	commit := func(s *redis.Store, uid string) *errs.Error {
		results, err := s.Commit(t.Context(), []catalog.Commit{{Owner: is, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox(uid))}}})
		if err != nil {
			t.Fatal(err)
		}
		return results[0].Err
	}
	if e := commit(first, "a"); !errs.Has(e, errs.Fenced) || !strings.Contains(e.Error(), "second") {
		t.Errorf("who has lost the epoch: %v", e)
	}
	if _, err := first.OpenSession(t.Context(), is.Coordinator, "n1", 0); !errs.Has(err, errs.Fenced) {
		t.Errorf("a session from who has lost the epoch: %v", err)
	}
	if e := commit(second, "b"); e != nil {
		t.Errorf("who has it: %v", e)
	}
}

// What a store has seen stays what it has seen, also when the server has grown past that since it came back older.
func TestC21_WitnessRemembers(t *testing.T) { redistest.Each(t, witnessRemembers) }

func witnessRemembers(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	f.Must(catalogtest.Create(catalogtest.Sandbox("lost")))
	seen := f.Seen()
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	other := open(t, redis.Options{Address: server.Socket})
	for _, uid := range []string{"a", "b", "c"} {
		results, err := other.Commit(t.Context(), []catalog.Commit{{Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox(uid))}}})
		if err != nil || results[0].Err != nil {
			t.Fatal(results, err)
		}
	}
	if h, err := f.History(t.Context()); err != nil || h.Head.Seq <= seen.Seq || f.Seen() != seen {
		t.Errorf("at %v (%v) the witness of %v has seen %v", h.Head, err, seen, f.Seen())
	}
	if relation, err := f.Compare(t.Context(), f.Seen()); err != nil || relation != catalog.Lost {
		t.Errorf("%s, %v", relation, err)
	}
	results, err := f.Commit(t.Context(), []catalog.Commit{{Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("d"))}}})
	if err != nil || !errs.Has(results[0].Err, errs.CatalogRewound) {
		t.Errorf("its commit: %v, %v", results, err)
	}
}

// A server that comes back older once more, in the middle of a repair, is not taken into service: what was put back is not there.
func TestC17_ResumeWantsWhatWasPutBack(t *testing.T) { redistest.Each(t, resumeWantsWhatWasPutBack) }

func resumeWantsWhatWasPutBack(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	f.Must(catalogtest.Create(catalogtest.Sandbox("there")))
	head := f.Seen()
	lost := catalog.Point{Incarnation: head.Incarnation, Seq: head.Seq + 5, Digest: "of what was lost"}
	if err := f.Suspend(t.Context(), f.Owner.Coordinator, catalog.Suspension{By: "n1", Witness: lost}); err != nil {
		t.Fatal(err)
	}
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	results, err := f.Commit(t.Context(), []catalog.Commit{{Repair: true, Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("put-back"))}}})
	if err != nil || results[0].Err != nil {
		t.Fatal(results, err)
	}
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	if err := f.Resume(t.Context(), f.Owner.Coordinator); !errs.Has(err, errs.CatalogRewound) {
		t.Errorf("without what was put back: %v", err)
	}
	if st, err := f.Status(t.Context()); err != nil || st.Suspended == nil {
		t.Errorf("%+v, %v", st, err)
	}
	// The repair begins again.
	results, err = f.Commit(t.Context(), []catalog.Commit{{Repair: true, Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("put-back"))}}})
	if err != nil || results[0].Err != nil {
		t.Fatal(results, err)
	}
	if err := f.Resume(t.Context(), f.Owner.Coordinator); err != nil {
		t.Error(err)
	}
	if st, err := f.Status(t.Context()); err != nil || st.Suspended != nil {
		t.Errorf("%+v, %v", st, err)
	}
}
