//go:build !race

package model

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

const node = "n1"

// real is a store on which a walk through the model is done again.
type real struct {
	*testing.T
	open   func() catalog.Store
	expire func() // makes leases run out
	server *redistest.Server
	kept   string

	stores map[uint8]catalog.Store // by holder
	seen   map[uint8]History       // what they have seen: a store sees each reply, also one that the model loses
	points map[History]catalog.Point
}

func (w *real) store(holder uint8) catalog.Store {
	if w.stores[holder] == nil {
		w.stores[holder] = w.open()
	}
	return w.stores[holder]
}

func (w *real) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func name(holder uint8) string { return fmt.Sprint("holder-", holder) }

func identity(op Op, attempt uint8) (tenant, id string) {
	if op == Request {
		return "acme", "request"
	}
	return catalog.SystemTenant, fmt.Sprint("~", attempt)
}

func (w *real) commit(c Call, op Op) catalog.Commit {
	tenant, id := identity(op, c.Attempt)
	uid := fmt.Sprint("of-", c.Attempt)
	commit := catalog.Commit{
		ID: id, Tenant: tenant, Digest: "d", Attempt: fmt.Sprint("attempt-", c.Attempt), Transient: op == Report,
		Owner: fence.Owner{Coordinator: fence.Epoch(c.Epoch)},
		Puts:  []catalog.Put{{Record: catalog.Record{Key: catalog.Key{Tenant: "acme", Kind: catalog.KindSandbox, UID: uid}}}},
	}
	if op == Report {
		commit.Owner.Node, commit.Owner.Session = node, fence.Epoch(c.Session)
	}
	return commit
}

func replyOf(r catalog.Result) Reply {
	switch {
	case r.Err == nil && r.Replayed:
		return Replayed
	case r.Err == nil:
		return Applied
	}
	return map[errs.Reason]Reply{errs.Fenced: Fenced, errs.AttemptVoid: Void, errs.CatalogRewound: Rewound}[r.Err.Reason]
}

// errEnough ends a walk where a store has seen a reply that the model's coordinator has not, and it would matter.
var errEnough = errors.New("the store knows more than the model's coordinator")

func (w *real) execute(ctx context.Context, before *State, c Call) error {
	if before.Server.Hist.has(w.seen[c.Holder]) != before.Server.Hist.has(c.Seen) {
		return errEnough
	}
	results, err := w.store(c.Holder).Commit(ctx, []catalog.Commit{w.commit(c, before.Ops[c.Attempt])})
	w.ok(err)
	want := *before
	Rules{}.apply(&want, &c)
	if got := replyOf(results[0]); got != c.Reply {
		return fmt.Errorf("the model's reply is %s, the store's %s (%w)", c.Reply, got, results[0].Err)
	}
	if c.Reply == Applied {
		w.saw(c.Holder, want.Server.Hist)
	}
	return nil
}

func (w *real) saw(holder uint8, h History) {
	w.points[h] = w.store(holder).Seen()
	if h.len() > w.seen[holder].len() {
		w.seen[holder] = h
	}
}

// compare wants the store to say of a point what the model does, and suspends the catalog if it is lost.
func (w *real) compare(ctx context.Context, before *State, holder, epoch uint8, p History) error {
	relation, err := w.store(holder).Compare(ctx, w.points[p])
	w.ok(err)
	if relation.Missing() == before.Server.Hist.has(p) {
		return fmt.Errorf("a point is %s: %v, of %v", relation, p, before.Server.Hist)
	}
	if relation.Missing() {
		if err := w.store(holder).Suspend(ctx, fence.Epoch(epoch), catalog.Suspension{By: name(holder), Witness: w.points[p]}); err != nil && !errs.Has(err, errs.Fenced) {
			return err
		}
	}
	return nil
}

func (w *real) release(ctx context.Context, c *Coordinator) {
	if err := w.store(c.Holder).Release(ctx, name(c.Holder), fence.Epoch(c.Epoch)); err != nil && !errs.Has(err, errs.Fenced) {
		w.Fatal(err)
	}
}

func (w *real) claim(ctx context.Context, c *Coordinator) {
	w.expire()
	for {
		_, won, err := w.store(c.Holder).Lead(ctx, catalog.Claim{Holder: name(c.Holder), TTL: time.Millisecond, Above: fence.Epoch(c.Above)})
		w.ok(err)
		if won {
			return
		}
	}
}

// step does to the store what the action does to the model.
func (w *real) step(ctx context.Context, before, after *State, a Action) error {
	var c Coordinator
	if a.Coordinator > 0 {
		c = before.C[a.Coordinator-1]
	}
	switch a.Name {
	case "Claim", "ClaimReplyLost":
		w.claim(ctx, &c)
	case "Sound":
		return w.compare(ctx, before, c.Holder, c.Epoch, c.Seen)
	case "StandBy":
		if err := w.compare(ctx, before, c.Holder, before.Server.Epoch, c.Seen); err != nil || !before.Server.Hist.has(c.Seen) {
			return err
		}
		return w.history(ctx, before, c.Holder)
	case "Resign":
		w.release(ctx, &c)
	case "Execute", "ExecuteLate":
		for _, call := range before.Calls {
			if call.Attempt == a.Attempt {
				return w.execute(ctx, before, call)
			}
		}
	case "SettleApplied", "SettleVoid", "SettleVoidAndSendAgain", "SettleReplyLost":
		tenant, id := identity(c.Op, c.Attempt)
		_, found, err := w.store(c.Holder).Settle(ctx, tenant, id, fmt.Sprint("attempt-", c.Attempt))
		w.ok(err)
		if want := (Rules{}).receipt(before, c.Attempt) != 0; found != want {
			return fmt.Errorf("a receipt: %t, in the model: %t", found, want)
		}
	case "Dial":
		return w.dial(ctx, before, &c)
	case "Feed":
		if before.Server.Hist.has(c.Seen) {
			return w.history(ctx, before, c.Holder)
		}
	case "CopyDisk":
		w.kept = w.server.Copy(w)
	case "RestartServer", "RestartServerOnOldData":
		w.server.Kill(w)
		if a.Name == "RestartServerOnOldData" {
			w.server.Rewind(w, w.kept)
		}
		w.server.Restart(w)
	case "CrashCoordinator":
		holder := after.C[a.Coordinator-1].Holder
		w.store(holder)
		w.seen[holder] = before.Server.Hist
		w.points[before.Server.Hist] = w.store(holder).Seen()
	}
	return nil
}

func (w *real) history(ctx context.Context, before *State, holder uint8) error {
	if !before.Server.Hist.has(w.seen[holder]) {
		return errEnough
	}
	if before.Server.Suspended {
		return errEnough // a suspension has a place in a real history
	}
	_, err := w.store(holder).History(ctx)
	if err == nil {
		w.saw(holder, before.Server.Hist)
	}
	return err
}

func (w *real) dial(ctx context.Context, before *State, c *Coordinator) error {
	if before.Node.Highest > c.Epoch {
		w.release(ctx, c)
		return nil
	}
	if err := w.compare(ctx, before, c.Holder, c.Epoch, before.Node.Seen); err != nil {
		return err
	}
	if !before.Server.Hist.has(before.Node.Seen) {
		w.release(ctx, c)
		return nil
	}
	want := *before
	session, err := w.store(c.Holder).OpenSession(ctx, fence.Epoch(c.Epoch), node, fence.Epoch(before.Node.Sess))
	if n := (Rules{}).open(&want, c.Epoch, c.Holder, before.Node.Sess); uint8(session) != n || (n == 0) != errs.Has(err, errs.Fenced) {
		return fmt.Errorf("session %d (%w), in the model %d", session, err, n)
	}
	return nil
}

// same compares what the server has with the model.
func (w *real) same(ctx context.Context, s *State) error {
	st, err := w.store(1).Status(ctx)
	w.ok(err)
	session, err := w.store(1).SessionEpoch(ctx, node)
	w.ok(err)
	if uint8(st.Epoch) != s.Server.Epoch || uint8(session) != s.Server.Session || (st.Suspended != nil) != s.Server.Suspended {
		return fmt.Errorf("epoch %d, session %d, suspended %v; the model has %+v", st.Epoch, session, st.Suspended, s.Server)
	}
	if st.Suspended == nil && int(st.Seq) != s.Server.Hist.len() {
		return fmt.Errorf("%d commits; the model has %v", st.Seq, s.Server.Hist)
	}
	return nil
}

// option is an action that the model has in a state.
type option struct {
	a Action
	s State
}

// walk goes through the model as choose says, and through the store with it. It gives the number of steps.
func (w *real) walk(b Bounds, choose func([]option) (option, bool)) int {
	w.Helper()
	w.stores, w.seen, w.points = make(map[uint8]catalog.Store), make(map[uint8]History), map[History]catalog.Point{{}: {}}
	ctx := w.Context()
	s := Begin(b)
	for _, c := range s.C {
		w.store(c.Holder) // as long as there is nothing to see
	}
	var way []Action
	for {
		var all []option
		Rules{}.next(&s, func(a Action, t *State, err error) {
			if err != nil {
				w.Fatalf("%v after %v", err, append(way, a))
			}
			all = append(all, option{a, *t})
		})
		next, ok := choose(all)
		if !ok {
			return len(way)
		}
		way = append(way, next.a)
		err := w.step(ctx, &s, &next.s, next.a)
		if err == nil {
			err = w.same(ctx, &next.s)
		}
		if errors.Is(err, errEnough) {
			return len(way)
		}
		if err != nil {
			w.Fatalf("%v\nafter %v", err, way)
		}
		s = next.s
	}
}

// atRandom makes up to 60 steps.
func atRandom(seed uint64) func([]option) (option, bool) {
	rng := rand.New(rand.NewPCG(seed, 0))
	left := 60
	return func(all []option) (option, bool) {
		if left--; left < 0 || len(all) == 0 {
			return option{}, false
		}
		return all[rng.IntN(len(all))], true
	}
}

// along takes the steps of a trace, as far as the model has them.
func along(trace []Action) func([]option) (option, bool) {
	return func(all []option) (option, bool) {
		for _, o := range all {
			if len(trace) > 0 && o.a == trace[0] {
				trace = trace[1:]
				return o, true
			}
		}
		return option{}, false
	}
}

func (w *real) openRedis(server *redistest.Server, name string) func() catalog.Store {
	return func() catalog.Store {
		s, err := redis.Open(w.Context(), redis.Options{Address: server.Socket, Catalog: name})
		w.ok(err)
		w.Cleanup(func() { w.ok(s.Close()) })
		return s
	}
}

// The stores do what the model does, as far as a walk without faults of the server goes.
func TestReplay(t *testing.T) {
	b := Bounds{Attempts: 4, Epochs: 4, Sessions: 4, Crashes: 2, Cuts: 4}
	server := redistest.Start(t)
	steps := 0
	for seed := range uint64(60) {
		t.Log("seed", seed)
		w := &real{T: t, expire: func() {}}
		w.open = w.openRedis(server, fmt.Sprint("walk-", seed))
		steps += w.walk(b, atRandom(seed))

		now := time.Now()
		one := memory.New(memory.Options{Now: func() time.Time { return now }})
		w = &real{T: t, expire: func() { now = now.Add(time.Second) }, open: func() catalog.Store { return one }}
		steps += w.walk(b, atRandom(seed))
		w.ok(one.Close())
	}
	t.Log(steps, "steps")
	if steps < 2000 {
		t.Error("the walks end early")
	}
}

// The same on servers that are killed, and come back on old data.
func TestReplayOnOldData(t *testing.T) {
	steps := 0
	for seed := range uint64(12) {
		t.Log("seed", seed)
		server := redistest.Start(t)
		w := &real{T: t, expire: func() {}, server: server}
		w.open = w.openRedis(server, "walk")
		steps += w.walk(Bounds{Attempts: 4, Epochs: 4, Sessions: 3, ServerRestarts: 2, Crashes: 1, Cuts: 1}, atRandom(seed))
	}
	t.Log(steps, "steps")
	if steps < 100 {
		t.Error("the walks end early")
	}
}

// What goes wrong under each of the broken rules is tried on a real server, which must do as the true rules say.
func TestReplayCounterexamples(t *testing.T) {
	for _, v := range broken {
		t.Run(v.name, func(t *testing.T) {
			trace := counterexample(v.rules, v.within).Trace
			server := redistest.Start(t)
			w := &real{T: t, expire: func() {}, server: server}
			w.open = w.openRedis(server, "trace")
			want := len(trace)
			if v.shared > 0 {
				want = v.shared
			}
			if n := w.walk(v.within, along(trace)); n < want {
				t.Errorf("only %d steps of %v could be made", n, trace)
			}
		})
	}
}
