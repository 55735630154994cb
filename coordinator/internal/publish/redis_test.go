package publish_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

func waiting(q *publish.Queue) int64 { return q.Waiting() }

func openRedis(t testing.TB, socket string) *redis.Store {
	t.Helper()
	s, err := redis.Open(t.Context(), redis.Options{Address: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func operation(owner fence.Owner, id string, puts ...catalog.Put) catalog.Commit {
	return catalog.Commit{ID: id, Tenant: "acme", Digest: "digest of " + id, Owner: owner, Puts: puts, Result: []byte("result of " + id)}
}

func TestC05_FailureBeforeTheScriptLeavesNothing(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	q := start(t, publish.Options{Store: s})
	owner := lead(t, s)
	must(t, q, operation(owner, "before", catalogtest.Create(catalogtest.Volume("v"))))
	seq, err := s.Seq(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	server.Kill(t)
	c := operation(owner, "op", catalogtest.Create(catalogtest.Snapshot("p"), catalogtest.To(catalogtest.Volume("v"), catalog.Reference)))
	if _, err := q.Publish(t.Context(), fixed(c)); !errs.Has(err, errs.StoreUnavailable) || !errs.NotStartedFor(err) {
		t.Fatalf("with the server gone: %v", err)
	}
	server.Restart(t)
	if now, err := s.Seq(t.Context()); err != nil || now != seq {
		t.Errorf("sequence %d, was %d: %v", now, seq, err)
	}
	if _, found, err := s.Receipt(t.Context(), "acme", "op"); found || err != nil {
		t.Errorf("a receipt of what was not sent: %v", err)
	}
	if h, err := s.Referrers(t.Context(), catalogtest.Volume("v"), "", 0); err != nil || h.Count != 0 {
		t.Errorf("referrers %+v, %v", h, err)
	}
	if r := must(t, q, c); r.Replayed {
		t.Errorf("the operation that was not started: %+v", r)
	}
}

func TestC06_LostReplyIsSettledFromTheReceipt(t *testing.T) {
	for name, c := range map[string]struct {
		fault    fault
		replayed bool // the receipt answered, so it was not sent again
		builds   int64
	}{
		"applied, reply cut":             {cutReply, true, 1},
		"not applied, cut before it":     {cutRequest, false, 2},
		"applied after it was given up?": {holdback, false, 2},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			direct := openRedis(t, server.Socket)
			owner := lead(t, direct)
			p := newProxy(t, server.Socket)
			q := start(t, publish.Options{Store: openRedis(t, p.Socket)})
			// The script must be known, or the fault would strike the call that only finds out that it is not.
			must(t, q, catalog.Commit{Owner: owner})
			if _, _, err := direct.Settle(t.Context(), "acme", "x", "x"); err != nil {
				t.Fatal(err)
			}
			struck := p.arm(c.fault, "op-lost")
			var builds atomic.Int64
			r, err := q.Publish(t.Context(), func(context.Context, catalog.Reader) (catalog.Commit, error) {
				builds.Add(1)
				return operation(owner, "op-lost", catalogtest.Create(catalogtest.Snapshot("p"))), nil
			})
			select {
			case <-struck:
			default:
				t.Fatal("the fault did not strike")
			}
			if err != nil || r.Replayed != c.replayed || r.Revisions[catalogtest.Snapshot("p")] != 1 || string(r.Result) != "result of op-lost" {
				t.Errorf("%+v, %v", r, err)
			}
			if builds.Load() != c.builds {
				t.Errorf("built %d times", builds.Load())
			}
			if c.fault == holdback {
				p.release() // now the server gets what was settled as never applied
			}
			if seq, err := direct.Seq(t.Context()); err != nil || seq != 2 {
				t.Errorf("sequence %d, want 2 (applied exactly once): %v", seq, err)
			}
		})
	}
}

func TestC06_UnsettledIsUnknown(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	owner := lead(t, s)
	p := newProxy(t, server.Socket)
	through := openRedis(t, p.Socket)
	q := start(t, publish.Options{Store: through})
	must(t, q, catalog.Commit{Owner: owner})
	// What is nobody's operation is settled by an ID of the queue's own.
	p.arm(cutReply, "nameless")
	nameless := catalogtest.Sandbox("nameless")
	if r := must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(nameless)}}); !r.Replayed || r.Revisions[nameless] != 1 {
		t.Errorf("without an id: %+v", r)
	}
	// A paused server answers neither the commit nor the question; the caller's budget ends that.
	server.Pause(t)
	q = start(t, publish.Options{Store: through, Reply: 50 * time.Millisecond})
	c := operation(owner, "op", catalogtest.Create(catalogtest.Snapshot("p")))
	err := errs.New(errs.ShuttingDown, "not asked yet").WithOutcome(errs.NotStarted, errs.Never)
	for budget := 200 * time.Millisecond; err.Outcome == errs.NotStarted; budget *= 2 { // until it was enough to send it
		ctx, cancel := context.WithTimeout(t.Context(), budget)
		_, failed := q.Publish(ctx, fixed(c))
		cancel()
		err = errs.From(failed)
	}
	if e := errs.From(err); e.Reason != errs.DeadlineExpired || e.Outcome != errs.Unknown || e.OperationID != "op" {
		t.Errorf("while the server is paused: %v, %s", err, e.Outcome)
	}
	server.Resume(t)
	// The caller asks again with the same operation and learns the truth, whatever it is.
	if r := must(t, q, c); r.Revisions[catalogtest.Snapshot("p")] != 1 {
		t.Errorf("%+v", r)
	}
	if r, err := s.Get(t.Context(), catalogtest.Snapshot("p")); err != nil || r.Revision != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestC09_ManyPublicationsOfOneVolume(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	owner := lead(t, s)
	q := start(t, publish.Options{Store: s, Attempts: 1}) // not one conflict is tolerated
	v := catalogtest.Volume("v")
	must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(v)}})
	const n = 1024
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			key := catalogtest.Snapshot(fmt.Sprintf("p-%04d", i))
			_, err := q.Publish(t.Context(), func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
				if _, err := read.Get(ctx, v); err != nil {
					return catalog.Commit{}, err
				}
				c := operation(owner, key.UID, catalogtest.Create(key, catalogtest.To(v, catalog.Reference)))
				c.Checks = []catalog.Check{catalog.InPhase(v, "Ready")}
				return c, nil
			})
			if err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if h, err := s.Referrers(t.Context(), v, "", 0); err != nil || h.Count != n {
		t.Errorf("%d references, %v", h.Count, err)
	}
}

func TestContendedRecordLosesNoUpdate(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	owner := lead(t, s)
	q := start(t, publish.Options{Store: s, Attempts: 100})
	key := catalogtest.Sandbox("s")
	must(t, q, catalog.Commit{Owner: owner, Puts: []catalog.Put{{Record: catalog.Record{Key: key}}}})
	const n = 32
	var built atomic.Int64
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if _, err := q.Publish(t.Context(), count(owner, key, &built)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if r, err := s.Get(t.Context(), key); err != nil || len(r.Body) != n || r.Revision != n+1 {
		t.Errorf("%d of %d updates, revision %d, %v", len(r.Body), n, r.Revision, err)
	}
}

// TestC24_ReplayAfterRestarts kills the server, and takes a new coordinator with a new epoch.
func TestC24_ReplayAfterRestarts(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	owner := lead(t, s)
	op := publish.Operation{Tenant: "acme", ID: "op-1", Digest: "d", Minted: time.Now()}
	snapshot := func(owner fence.Owner, uid string) publish.Build {
		return func(context.Context, catalog.Reader) (catalog.Commit, error) {
			p := catalogtest.Create(catalogtest.Snapshot(uid))
			p.Record.Name = "nightly"
			return catalog.Commit{Owner: owner, Puts: []catalog.Put{p}, Result: []byte(uid)}, nil
		}
	}
	first, err := start(t, publish.Options{Store: s}).PublishOperation(t.Context(), op, snapshot(owner, "p-1"))
	if err != nil || first.Replayed {
		t.Fatalf("%+v, %v", first, err)
	}
	server.Kill(t)
	server.Restart(t)
	if err := s.Release(t.Context(), "leader", owner.Coordinator); err != nil {
		t.Fatal(err)
	}
	next := openRedis(t, server.Socket)
	lease, mine, err := next.Lead(t.Context(), catalog.Claim{Holder: "second", TTL: time.Minute})
	if err != nil || !mine {
		t.Fatalf("%v %v", mine, err)
	}
	q := start(t, publish.Options{Store: next})
	owner = fence.Owner{Coordinator: lease.Epoch}
	again, err := q.PublishOperation(t.Context(), op, snapshot(owner, "p-2"))
	if err != nil || !again.Replayed || string(again.Result) != "p-1" || again.Seq != first.Seq || again.Revisions[catalogtest.Snapshot("p-1")] != 1 {
		t.Errorf("replayed: %+v, %v", again, err)
	}
	if _, err := next.Get(t.Context(), catalogtest.Snapshot("p-2")); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("a second snapshot: %v", err)
	}
	// C25, also after the restart.
	op.Digest = "another"
	if _, err := q.PublishOperation(t.Context(), op, snapshot(owner, "p-3")); !errs.Has(err, errs.OperationBodyMismatch) || !errs.NotStartedFor(err) {
		t.Errorf("another body: %v", err)
	}
	// A build that looks at the world sees its own twin's work; it must still get the twin's answer.
	op = publish.Operation{Tenant: "acme", ID: "op-2", Digest: "d"}
	r, err := q.PublishOperation(t.Context(), op, func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		c := operation(owner, "op-2", catalogtest.Create(catalogtest.Snapshot("twin")))
		c.Digest = "d"
		if _, err := next.Commit(ctx, []catalog.Commit{c}); err != nil {
			return catalog.Commit{}, err
		}
		return catalog.Commit{}, catalog.Refusal(errs.NameTaken, "name", "twin", "uid", "twin")
	})
	if err != nil || !r.Replayed || string(r.Result) != "result of op-2" {
		t.Errorf("the twin: %+v, %v", r, err)
	}
}

func TestC26C27_ReferencesAndUIDsSurviveASIGKILL(t *testing.T) {
	server := redistest.Start(t)
	s := openRedis(t, server.Socket)
	owner := lead(t, s)
	q := start(t, publish.Options{Store: s})
	named := func(uid string) catalog.Put {
		p := catalogtest.Create(catalogtest.Volume(uid))
		p.Record.Name = "data"
		return p
	}
	must(t, q, operation(owner, "create", named("v-1")))
	must(t, q, operation(owner, "publish", catalogtest.Create(catalogtest.Snapshot("p"), catalogtest.To(catalogtest.Volume("v-1"), catalog.Reference))))
	server.Kill(t)
	server.Restart(t)

	remove := operation(owner, "delete")
	remove.Deletes = []catalog.Delete{{Key: catalogtest.Volume("v-1"), ExpectRevision: 1, Tombstone: true}}
	_, err := q.Publish(t.Context(), fixed(remove))
	if e := errs.From(err); e.Reason != errs.StillReferenced || e.Details["references"] != "p" || e.Details["count"] != "1" {
		t.Fatalf("delete of a referenced volume: %v", err)
	}
	free := operation(owner, "free")
	free.Deletes = []catalog.Delete{{Key: catalogtest.Snapshot("p"), ExpectRevision: 1}}
	must(t, q, free)
	must(t, q, remove)
	must(t, q, operation(owner, "recreate", named("v-2")))
	server.Kill(t)
	server.Restart(t)

	attach := operation(owner, "attach", catalogtest.Create(catalogtest.Sandbox("s"), catalogtest.To(catalogtest.Volume("v-1"), catalog.Exclusive)))
	attach.Checks = []catalog.Check{catalog.Named(catalogtest.Volume("v-1"), "data")}
	_, err = q.Publish(t.Context(), fixed(attach))
	if e := errs.From(err); e.Reason != errs.StaleUID || e.Details["current_uid"] != "v-2" || e.Code != errs.Conflict || e.Retry != errs.Never || e.Outcome != errs.NotStarted {
		t.Errorf("attach by a stale uid: %v", err)
	}
	if h, err := s.Referrers(t.Context(), catalogtest.Volume("v-2"), "", 0); err != nil || h.Count != 0 {
		t.Errorf("the new volume is occupied: %+v, %v", h, err)
	}
}
