package operations_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// The first artefact that refers to a volume, the volume's deletion and its attachment elsewhere are
// published at once, while the sandbox that holds it goes. They serialise (package doc, Order):
// none waits for another for ever, the volume either goes or is attached, and nothing refers to
// what is gone.
func TestC03ArtefactAndVolumePublicationSerialise(t *testing.T) {
	for name, c := range map[string]struct {
		seeds uint64
		open  func(*testing.T) catalog.Store
	}{
		"memory": {400, func(*testing.T) catalog.Store { return memory.New(memory.Options{}) }},
		"redis": {30, func(t *testing.T) catalog.Store {
			s, err := redis.Open(t.Context(), redis.Options{Address: redistest.Start(t).Socket})
			return must(s, err)(t)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorldOn(t, c.open(t))
			e := w.lead()
			defer e.stop()
			won := make(map[string]int)
			for seed := range c.seeds {
				won[w.race(t, e, seed)]++
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
			w.agree(e)
			t.Logf("won: %v", won)
			if len(won) < 2 {
				t.Errorf("every seed played the same way: %v", won)
			}
		})
	}
}

// race plays one interleaving and says who won.
func (w *world) race(t *testing.T, e *term, seed uint64) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // a deadlock ends here
	defer cancel()
	v := madeVolume(t, e, "")
	box := madeSandbox(t, e, v)
	rng := rand.New(rand.NewPCG(seed, 0))
	var mu sync.Mutex
	jitter := func() {
		mu.Lock()
		n := rng.IntN(40)
		mu.Unlock()
		for range n {
			runtime.Gosched()
		}
	}
	w.setJitter(jitter)
	defer w.setJitter(nil)

	const checkpoint, release, remove, attach = 0, 1, 2, 3
	var ops [4]*operations.Operation
	var failed [4]error
	runs := [4]func() (*operations.Operation, error){
		checkpoint: func() (*operations.Operation, error) {
			return e.CheckpointSandbox(ctx, call(""), operations.CheckpointSandbox{UID: box})
		},
		release: func() (*operations.Operation, error) {
			return e.DeleteSandbox(ctx, call(""), operations.Delete{UID: box})
		},
		remove: unlessHeldBy(ctx, box, func() (*operations.Operation, error) {
			return e.DeleteVolume(ctx, call(""), operations.Delete{UID: v})
		}),
		attach: unlessHeldBy(ctx, box, func() (*operations.Operation, error) { return create("", v)(ctx, e, call("")) }),
	}
	mu.Lock()
	order := rng.Perm(len(runs))
	mu.Unlock()
	var all sync.WaitGroup
	for _, i := range order {
		all.Go(func() { ops[i], failed[i] = runs[i]() })
		jitter()
	}
	all.Wait()
	w.setJitter(nil)

	if failed[release] != nil {
		t.Errorf("releasing the volume: %v", failed[release])
	}
	refused(t, "checkpoint", failed[checkpoint], errs.WrongPhase, errs.StaleUID, errs.ObjectNotFound)
	refused(t, "remove", failed[remove], errs.StillReferenced, errs.AlreadyAttached)
	refused(t, "attach", failed[attach], errs.WrongPhase, errs.StaleUID, errs.ObjectNotFound)
	if (failed[remove] == nil) == (failed[attach] == nil) {
		t.Errorf("remove: %v, attach: %v; want exactly one of them", failed[remove], failed[attach])
	}
	if failed[checkpoint] == nil && failed[remove] == nil {
		t.Error("an artefact refers to a volume that was deleted")
	}
	w.nothingDangles(t)

	// What is left goes in the one order that there is.
	who := ""
	if failed[attach] == nil {
		who += "attach "
		must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: ops[attach].Plan.Copies[0].SandboxUID}))(t)
	}
	if failed[checkpoint] == nil {
		who += "checkpoint "
		must(e.DeleteSnapshot(ctx, call(""), operations.Delete{UID: ops[checkpoint].Plan.SnapshotUID}))(t)
	}
	if failed[remove] == nil {
		return who + "remove"
	}
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: v}))(t)
	return who
}

// unlessHeldBy tries again for as long as it is the holder that is in the way.
func unlessHeldBy(ctx context.Context, holder string, run func() (*operations.Operation, error)) func() (*operations.Operation, error) {
	return func() (*operations.Operation, error) {
		for {
			op, err := run()
			if !errs.Has(err, errs.AlreadyAttached) || errs.From(err).Details["holder"] != holder || ctx.Err() != nil {
				return op, err
			}
		}
	}
}

func refused(t *testing.T, what string, err error, reasons ...errs.Reason) {
	t.Helper()
	if err == nil {
		return
	}
	for _, r := range reasons {
		if errs.Has(err, r) {
			return
		}
	}
	t.Errorf("%s: %v, want one of %v", what, err, reasons)
}

func (w *world) setJitter(jitter func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.jitter = jitter
}

// nothingDangles checks that all that is referred to lives.
func (w *world) nothingDangles(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	for _, kind := range []catalog.Kind{catalog.KindSandbox, catalog.KindSnapshot, catalog.KindVolume} {
		for _, r := range must(w.store.List(ctx, catalog.Query{Kind: kind, PageSize: catalog.MaxPage}))(t).Records {
			for _, ref := range r.Refs {
				if _, err := w.store.Get(ctx, ref.Target); err != nil {
					t.Error(fmt.Errorf("%s refers to %s: %w", r.Key, ref.Target, err))
				}
			}
		}
	}
	volumes := must(w.store.List(ctx, catalog.Query{Kind: catalog.KindVolume, PageSize: catalog.MaxPage}))(t)
	for _, v := range volumes.Records {
		holders := must(w.store.Referrers(ctx, records.VolumeKey(tenant, v.UID), "", 100))(t)
		attached := 0
		for _, h := range holders.Holders {
			if h.Mode.Attaches() {
				attached++
			}
		}
		if attached > 1 {
			t.Errorf("volume %s is attached to %v", v.UID, holders.Holders)
		}
	}
}
