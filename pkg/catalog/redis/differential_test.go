package redis_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// TestStoresAgree applies the same random batches to both stores and wants the same refusals, results
// and, in the end, records, references and changes. A failure prints its seed.
func TestStoresAgree(t *testing.T) { redistest.Each(t, storesAgree) }

func storesAgree(t *testing.T, p redistest.Program) {
	t.Parallel()
	server := p.Start(t)
	for _, seed := range []uint64{1, 2, 3, 4} {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			real := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Catalog: fmt.Sprint("seed-", seed)}))
			model := catalogtest.NewFixture(t, memory.New(memory.Options{}))
			g := generator{Rand: rand.New(rand.NewPCG(seed, 0)), owner: real.Owner, revisions: make(map[catalog.Key]uint64)}
			opts := cmp.Options{
				cmpopts.EquateEmpty(), cmpopts.IgnoreFields(catalog.Record{}, "Created", "Updated"), cmpopts.IgnoreFields(catalog.Change{}, "Digest"),
				cmp.Transformer("refusal", func(e *errs.Error) string {
					if e == nil {
						return ""
					}
					return fmt.Sprint(e, e.Details)
				}),
			}
			applied := 0
			for n := range 400 {
				batch := g.batch()
				want, err := model.Commit(t.Context(), batch)
				if err != nil {
					t.Fatal(err)
				}
				got, err := real.Commit(t.Context(), batch)
				if err != nil {
					t.Fatal(err)
				}
				for i := range want {
					if want[i].Err == nil {
						applied++
						g.learn(&batch[i], want[i])
					}
				}
				if d := cmp.Diff(want, got, opts); d != "" {
					t.Fatalf("batch %d (-memory +redis):\n%s\n%+v", n, d, batch)
				}
			}
			if applied < 200 {
				t.Errorf("only %d commits were applied: the generator is too wild", applied)
			}
			compareState(t, model, real, opts)
		})
	}
}

func compareState(t *testing.T, model, real *catalogtest.Fixture, opts cmp.Options) {
	t.Helper()
	for _, kind := range []catalog.Kind{catalog.KindSandbox, catalog.KindVolume, catalog.KindSnapshot} {
		for _, q := range []catalog.Query{{Kind: kind}, {Kind: kind, Node: "n1"}, {Kind: kind, Phases: []string{"A"}}} {
			want, err := model.List(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			got, err := real.List(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want.Records, got.Records, opts); d != "" {
				t.Errorf("list %+v (-memory +redis):\n%s", q, d)
			}
			for _, r := range want.Records {
				wantRefs, err := model.Referrers(t.Context(), r.Key, "", 0)
				if err != nil {
					t.Fatal(err)
				}
				gotRefs, err := real.Referrers(t.Context(), r.Key, "", 0)
				if d := cmp.Diff(wantRefs, gotRefs, opts); d != "" || err != nil {
					t.Errorf("referrers of %s (-memory +redis), %v:\n%s", r.Key, err, d)
				}
			}
		}
	}
	want, err := model.Changes(t.Context(), 0, 500, 0)
	if err != nil {
		t.Fatal(err)
	}
	got, err := real.Changes(t.Context(), 0, 500, 0)
	if d := cmp.Diff(want, got, opts); d != "" || err != nil {
		t.Errorf("changes (-memory +redis), %v:\n%s", err, d)
	}
}

// generator makes commits over a few keys, so that they often conflict, mostly of the right revision.
type generator struct {
	*rand.Rand
	owner     fence.Owner
	revisions map[catalog.Key]uint64
	ops       int
}

func (g *generator) learn(c *catalog.Commit, r catalog.Result) {
	if r.Replayed {
		return
	}
	for k, v := range r.Revisions {
		g.revisions[k] = v
	}
	for _, d := range c.Deletes {
		delete(g.revisions, d.Key)
	}
}

func (g *generator) key() catalog.Key {
	kinds := []catalog.Kind{catalog.KindSandbox, catalog.KindVolume, catalog.KindSnapshot}
	return catalog.Key{Tenant: "acme", Kind: kinds[g.IntN(3)], UID: fmt.Sprint("u", g.IntN(8))}
}

func (g *generator) revision(k catalog.Key) uint64 {
	if g.IntN(8) == 0 {
		return uint64(1 + g.IntN(3))
	}
	return g.revisions[k]
}

func (g *generator) record(k catalog.Key) catalog.Record {
	r := catalog.Record{
		Key: k, Name: []string{"", "", "", "x", "y", "z", "w"}[g.IntN(7)], Phase: []string{"A", "B"}[g.IntN(2)],
		Node: []string{"", "n1", "n2"}[g.IntN(3)], Identity: []string{"i1", "i2"}[g.IntN(20)/19],
		Sealed: g.IntN(40) == 0, Body: []byte(fmt.Sprint(g.IntN(100))),
	}
	for range g.IntN(3) {
		modes := []catalog.RefMode{catalog.Reference, catalog.Shared, catalog.Exclusive}
		if k := g.key(); g.revisions[k] > 0 || g.IntN(8) == 0 {
			r.Refs = append(r.Refs, catalogtest.To(k, modes[g.IntN(3)]))
		}
	}
	return r
}

func (g *generator) check() catalog.Check {
	k := g.key()
	switch g.IntN(5) {
	case 0:
		return catalog.InPhase(k, "A", "B")
	case 1:
		return catalog.HasIdentity(k, "i1")
	case 2:
		return catalog.Named(k, "x")
	case 3:
		return catalog.Unreferenced(k)
	}
	return catalog.AtRevision(k, g.revision(k))
}

func (g *generator) batch() []catalog.Commit {
	batch := make([]catalog.Commit, 1+g.IntN(4))
	for i := range batch {
		c := catalog.Commit{Owner: g.owner}
		if g.IntN(3) == 0 {
			g.ops++
			c.Tenant, c.ID, c.Digest = "acme", fmt.Sprint("op", g.ops/2), fmt.Sprint(g.IntN(10)/9)
			c.Result = []byte(fmt.Sprint("r", g.ops))
		}
		if g.IntN(20) == 0 {
			c.Owner.Coordinator++
		}
		if g.IntN(4) == 0 {
			c.Checks = append(c.Checks, g.check())
		}
		for range 1 + g.IntN(2) {
			k := g.key()
			c.Puts = append(c.Puts, catalog.Put{Record: g.record(k), ExpectRevision: g.revision(k)})
		}
		if g.IntN(3) == 0 {
			k := g.key()
			c.Puts, c.Deletes = c.Puts[:g.IntN(2)], append(c.Deletes, catalog.Delete{Key: k, ExpectRevision: max(g.revision(k), 1), Tombstone: true})
		}
		batch[i] = c
	}
	return batch
}
