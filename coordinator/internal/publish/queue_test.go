package publish_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t testing.TB, o publish.Options) *publish.Queue {
	t.Helper()
	q := publish.New(o)
	q.Start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		q.Close(ctx)
	})
	return q
}

func lead(t testing.TB, s catalog.Store) fence.Owner {
	t.Helper()
	lease, mine, err := s.Lead(t.Context(), catalog.Claim{Holder: "leader", TTL: time.Minute})
	if err != nil || !mine {
		t.Fatalf("Lead: %v, mine %v", err, mine)
	}
	return fence.Owner{Coordinator: lease.Epoch}
}

func inMemory(t testing.TB) (catalog.Store, fence.Owner) {
	t.Helper()
	s := memory.New(memory.Options{})
	t.Cleanup(func() { s.Close() })
	return s, lead(t, s)
}

// fixed builds the same commit every time.
func fixed(c catalog.Commit) publish.Build {
	return func(context.Context, catalog.Reader) (catalog.Commit, error) { return c, nil }
}

// count builds a commit that adds one to the length of a record's body.
func count(owner fence.Owner, key catalog.Key, built *atomic.Int64) publish.Build {
	return func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		built.Add(1)
		r, err := read.Get(ctx, key)
		if err != nil {
			return catalog.Commit{}, err
		}
		revision := r.Revision
		r.Body = append(r.Body, '.')
		return catalog.Commit{Owner: owner, Puts: []catalog.Put{{Record: r, ExpectRevision: revision}}}, nil
	}
}

func must(t testing.TB, q *publish.Queue, c catalog.Commit) catalog.Result {
	t.Helper()
	r, err := q.Publish(t.Context(), fixed(c))
	if err != nil {
		t.Fatalf("Publish: %v", err)
	}
	return r
}

func TestC01_EntryIsReadAfterAdmission(t *testing.T) {
	s, owner := inMemory(t)
	q := start(t, publish.Options{Store: s, Admitted: 1})
	key := catalogtest.Snapshot("p")
	must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(key)}})

	inside, goOn := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // holds the only slot, and changes the entry that the second one will read
		_, err := q.Publish(t.Context(), func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
			close(inside)
			<-goOn
			p := catalogtest.Create(key)
			p.ExpectRevision = 1
			return catalog.Commit{Owner: owner, Puts: []catalog.Put{p}}, nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-inside
	var built atomic.Int64
	wg.Go(func() {
		r, err := q.Publish(t.Context(), count(owner, key, &built))
		if err != nil || r.Revisions[key] != 3 {
			t.Errorf("%+v, %v", r, err)
		}
	})
	metricIs := func() bool { return built.Load() == 0 && waiting(q) == 1 }
	catalogtest.Eventually(t, "the second waits unbuilt", metricIs)
	close(goOn)
	wg.Wait()
	if n := built.Load(); n != 1 {
		t.Errorf("built %d times: it was read before admission", n)
	}
}

func TestC02_RetryBudgetIsBounded(t *testing.T) {
	s, owner := inMemory(t)
	q := start(t, publish.Options{Store: s, Attempts: 3, Pause: time.Microsecond})
	key := catalogtest.Sandbox("s")
	must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(key)}})
	built := 0
	_, err := q.Publish(t.Context(), func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		built++
		p := catalogtest.Create(key)
		p.ExpectRevision = 7
		return catalog.Commit{Owner: owner, Puts: []catalog.Put{p}}, nil
	})
	e := errs.From(err)
	if e.Reason != errs.StaleRevision || e.Retry != errs.AfterBackoff || e.Outcome != errs.NotStarted || e.Details["attempts"] != "3" || built != 3 {
		t.Errorf("%v %s %v, built %d times", e, e.Retry, e.Details, built)
	}
}

func TestC02_OwnerConflictsAreNeverRetried(t *testing.T) {
	s, owner := inMemory(t)
	q := start(t, publish.Options{Store: s})
	key := catalogtest.Sandbox("s")
	must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(key)}})
	for _, o := range []fence.Owner{{Coordinator: owner.Coordinator - 1}, {Coordinator: owner.Coordinator, Node: "n1", Session: 1}} {
		var built atomic.Int64
		r, err := q.Publish(t.Context(), count(o, key, &built))
		if !errs.Has(err, errs.Fenced) || r.Err == nil || built.Load() != 1 {
			t.Errorf("%v, %+v, built %d times", err, r, built.Load())
		}
	}
}

func TestC02_EveryCommitHasItsResult(t *testing.T) {
	s, owner := inMemory(t)
	gate := &gated{Store: s, open: make(chan struct{})}
	q := start(t, publish.Options{Store: gate})
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			o := owner
			if i%3 == 0 {
				o.Coordinator = 99
			}
			key := catalogtest.Sandbox(fmt.Sprint("s", i))
			r, err := q.Publish(t.Context(), fixed(catalog.Commit{Owner: o, Puts: []catalog.Put{catalogtest.Create(key)}}))
			if i%3 == 0 && !errs.Has(err, errs.Fenced) || i%3 != 0 && (err != nil || r.Revisions[key] != 1) {
				t.Errorf("%d: %+v, %v", i, r, err)
			}
		})
	}
	catalogtest.Eventually(t, "a batch is in flight, the rest is queued", func() bool { return gate.commits.Load()+int64(q.Queued()) == 30 })
	close(gate.open)
	wg.Wait()
	if n := gate.calls.Load(); n > 2 {
		t.Errorf("30 commits took %d calls", n)
	}
}

// gated holds every Commit until it is opened.
type gated struct {
	catalog.Store
	open           chan struct{}
	calls, commits atomic.Int64
}

func (g *gated) Commit(ctx context.Context, batch []catalog.Commit) ([]catalog.Result, error) {
	g.calls.Add(1)
	g.commits.Add(int64(len(batch)))
	<-g.open
	return g.Store.Commit(context.WithoutCancel(ctx), batch)
}

func TestC04_ABuildBlocksNobodyElse(t *testing.T) {
	s, owner := inMemory(t)
	q := start(t, publish.Options{Store: s, Admitted: 2})
	inside, goOn := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := q.Publish(t.Context(), func(context.Context, catalog.Reader) (catalog.Commit, error) {
			close(inside)
			<-goOn
			return catalog.Commit{Owner: owner}, nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-inside
	for i := range 20 {
		must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox(fmt.Sprint(i)))}})
	}
	close(goOn)
	wg.Wait()
}

func TestQueueIsBounded(t *testing.T) {
	s, owner := inMemory(t)
	registry := prometheus.NewRegistry()
	q := start(t, publish.Options{Store: s, Admitted: 1, Waiting: 2, Metrics: registry})
	admitted, goOn := make(chan struct{}, 3), make(chan struct{})
	var wg sync.WaitGroup
	for i := range 3 {
		if i == 1 {
			<-admitted // until then the first waits, too
		}
		wg.Go(func() {
			_, err := q.Publish(t.Context(), func(context.Context, catalog.Reader) (catalog.Commit, error) {
				admitted <- struct{}{}
				<-goOn
				return catalog.Commit{Owner: owner}, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	catalogtest.Eventually(t, "two wait", func() bool { return waiting(q) == 2 })
	_, err := q.Publish(t.Context(), fixed(catalog.Commit{Owner: owner}))
	if e := errs.From(err); !errs.Has(err, errs.QueueFull) || e.Details["limit"] != "2" || e.Outcome != errs.NotStarted {
		t.Errorf("a third: %v", err)
	}
	close(goOn)
	wg.Wait()
	families, err := registry.Gather()
	if err != nil || len(families) < 6 {
		t.Errorf("%d metrics, %v", len(families), err)
	}
}

func TestC05_WithdrawnBeforeItIsSent(t *testing.T) {
	s, owner := inMemory(t)
	gate := &gated{Store: s, open: make(chan struct{})}
	q := start(t, publish.Options{Store: gate})
	publication := func(ctx context.Context, uid string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := q.Publish(ctx, fixed(catalog.Commit{
				ID: uid, Tenant: "acme", Owner: owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox(uid))},
			}))
			done <- err
		}()
		return done
	}
	sentCtx, leave := context.WithCancel(t.Context())
	first := publication(sentCtx, "sent")
	catalogtest.Eventually(t, "the first is in flight", func() bool { return gate.calls.Load() == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	second := publication(ctx, "queued")
	cancel()
	if err := <-second; !errs.Has(err, errs.CallCancelled) || !errs.NotStartedFor(err) {
		t.Errorf("withdrawn: %v", err)
	}
	leave()
	err := <-first
	if e := errs.From(err); !errs.Has(err, errs.CallCancelled) || e.Outcome != errs.Unknown || e.OperationID != "sent" {
		t.Errorf("left in flight: %v, %s, %q", err, e.Outcome, e.OperationID)
	}
	close(gate.open)
	catalogtest.Eventually(t, "the first is applied", func() bool {
		_, found, err := s.Receipt(t.Context(), "acme", "sent")
		return err == nil && found
	})
	must(t, q, catalog.Commit{Owner: owner}) // whatever was queued before is over now
	if _, err := s.Get(t.Context(), catalogtest.Sandbox("queued")); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("a withdrawn commit: %v", err)
	}
}

func TestBuildErrorsPassThrough(t *testing.T) {
	s, _ := inMemory(t)
	q := start(t, publish.Options{Store: s})
	mine := errors.New("nothing to do")
	if _, err := q.Publish(t.Context(), func(context.Context, catalog.Reader) (catalog.Commit, error) { return catalog.Commit{}, mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err := q.Publish(ctx, func(ctx context.Context, _ catalog.Reader) (catalog.Commit, error) {
		cancel()
		return catalog.Commit{}, ctx.Err()
	})
	if !errs.NotStartedFor(err) {
		t.Errorf("cancelled in its build: %v", err)
	}
}

func TestClose(t *testing.T) {
	s, owner := inMemory(t)
	gate := &gated{Store: s, open: make(chan struct{})}
	q := publish.New(publish.Options{Store: gate, Admitted: 1})
	q.Start()
	results := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := q.Publish(context.Background(), fixed(catalog.Commit{Owner: owner}))
			results <- err
		}()
	}
	catalogtest.Eventually(t, "one is in flight, one waits", func() bool { return gate.calls.Load() == 1 && waiting(q) == 1 })
	closed := make(chan struct{})
	go func() {
		q.Close(context.Background())
		close(closed)
	}()
	if err := <-results; !errs.Has(err, errs.ShuttingDown) || !errs.NotStartedFor(err) {
		t.Errorf("the one that waited: %v", err)
	}
	if _, err := q.Publish(t.Context(), fixed(catalog.Commit{Owner: owner})); !errs.Has(err, errs.ShuttingDown) {
		t.Errorf("after Close: %v", err)
	}
	close(gate.open)
	if err := <-results; err != nil {
		t.Errorf("the one in flight: %v", err)
	}
	<-closed
	q.Close(context.Background()) // once more is harmless
}

func TestCloseCutsShort(t *testing.T) {
	s, owner := inMemory(t)
	stuck := &stuckStore{Store: s, began: make(chan struct{})}
	q := publish.New(publish.Options{Store: stuck})
	q.Start()
	result := make(chan error, 1)
	go func() {
		_, err := q.Publish(context.Background(), fixed(catalog.Commit{ID: "op", Tenant: "acme", Owner: owner}))
		result <- err
	}()
	<-stuck.began
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	q.Close(ctx)
	if e := errs.From(<-result); e.Outcome != errs.Unknown || e.OperationID != "op" {
		t.Errorf("cut short: %v, %s", e, e.Outcome)
	}
}

// stuckStore never replies to a Commit.
type stuckStore struct {
	catalog.Store
	began chan struct{}
}

func (s *stuckStore) Commit(ctx context.Context, _ []catalog.Commit) ([]catalog.Result, error) {
	close(s.began)
	<-ctx.Done()
	return nil, errs.From(ctx.Err())
}
