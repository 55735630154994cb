package room

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const mib = 1 << 20

// host is a machine with sandboxes that touch memory when told to.
type host struct {
	mu      sync.Mutex
	total   int64
	others  int64 // what is not sandboxes'
	stalled float64
	by      map[string]int64
	broken  error
}

func (h *host) Machine() (Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Machine{Total: h.total, Available: h.total - h.others - h.sum(), Stalled: h.stalled}, h.broken
}

func (h *host) sum() (n int64) {
	for _, u := range h.by {
		n += u
	}
	return n
}

func (h *host) Used() (int64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sum(), nil
}

func (h *host) UsedBy(uid string) (int64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.by[uid], nil
}

func (h *host) touch(uid string, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n == 0 {
		delete(h.by, uid)
		return
	}
	h.by[uid] = n
}

func newHost(total int64) *host { return &host{total: total, by: make(map[string]int64)} }

// refused is an error of the reason, about the resource, with these numbers.
func refused(t *testing.T, err error, reason errs.Reason, resource string, asked, left int64) {
	t.Helper()
	e := errs.From(err)
	if err == nil || e.Reason != reason || e.Code != errs.ResourceExhausted || e.Outcome != errs.NotStarted || e.Details["resource"] != resource ||
		e.Details["asked"] != fmt.Sprint(asked) || e.Details["left"] != fmt.Sprint(left) {
		t.Fatalf("%v (%v), want %s of %s: %d asked, %d left", err, e.Details, reason, resource, asked, left)
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(1000 * mib)
		r := New(Options{Source: h, Reserve: 100 * mib, Sandboxes: 4})
		ctx := t.Context()
		ok(t, r.Enter(ctx, "a", Need{Request: 100 * mib}))
		ok(t, r.Enter(ctx, "a", Need{Request: 100 * mib})) // once
		refused(t, r.Enter(ctx, "b", Need{Request: 801 * mib}), errs.OutOfMemory, "requests", 801*mib, 800*mib)
		// It runs and uses more than it requested: that is real, and so is what another has not touched.
		h.touch("a", 500*mib)
		r.Settle("a")
		ok(t, r.Enter(ctx, "b", Need{Request: 100 * mib, Expect: 300 * mib}))
		time.Sleep(2 * freshest)
		refused(t, r.Enter(ctx, "c", Need{Request: 101 * mib}), errs.OutOfMemory, "memory", 101*mib, 100*mib)
		h.touch("b", 250*mib)
		time.Sleep(2 * freshest)
		refused(t, r.Enter(ctx, "c", Need{Request: 101 * mib}), errs.OutOfMemory, "memory", 101*mib, 100*mib) // 50 of b's are in flight
		r.Settle("b")                                                                                         // and now will not be touched
		ok(t, r.Enter(ctx, "c", Need{Request: 101 * mib}))
		ok(t, r.Enter(ctx, "d", Need{Request: 1}))
		refused(t, r.Enter(ctx, "e", Need{Request: 1}), errs.NodeFull, "sandboxes", 1, 0)
		for _, uid := range []string{"a", "a", "b", "none"} {
			h.touch(uid, 0)
			r.Leave(uid)
		}
		ok(t, r.Enter(ctx, "e", Need{Request: 500 * mib}))
		time.Sleep(2 * freshest)
		if f, err := r.Figures(); err != nil || f.Requested != 601*mib+1 || f.Unclaimed != 601*mib+1 || f.Used != 0 || f.Available != 1000*mib {
			t.Fatalf("%+v, %v", f, err)
		}
	})
}

func TestALimitBelowTheMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(1 << 40)
		r := New(Options{Source: h, Limit: 1000 * mib, Reserve: 100 * mib})
		ok(t, r.Enter(t.Context(), "hog", Need{Request: 10 * mib}))
		h.touch("hog", 700*mib)
		r.Settle("hog")
		time.Sleep(2 * freshest)
		refused(t, r.Enter(t.Context(), "next", Need{Request: 201 * mib}), errs.OutOfMemory, "memory", 201*mib, 200*mib)
		h.touch("hog", 0)
		r.Leave("hog")
		ok(t, r.Enter(t.Context(), "next", Need{Request: 201 * mib}))
	})
}

func TestWaitingInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(1000 * mib)
		r := New(Options{Source: h, Wait: 5 * time.Second})
		ok(t, r.Enter(t.Context(), "a", Need{Request: 600 * mib}))
		var order []string
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, uid := range []string{"large", "small"} {
			size := map[string]int64{"large": 900 * mib, "small": 100 * mib}[uid]
			all.Go(func() {
				if err := r.Enter(t.Context(), uid, Need{Request: size}); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, uid)
			})
			synctest.Wait()
		}
		if f, _ := r.Figures(); f.Waiting != 2 {
			t.Fatalf("%+v: the small one would fit, and passes nobody", f)
		}
		time.Sleep(time.Second)
		r.Leave("a")
		synctest.Wait()
		all.Wait()
		if f, _ := r.Figures(); len(order) != 2 || f.Waiting != 0 {
			t.Fatalf("%v, %+v", order, f)
		}
		began := time.Now()
		refused(t, r.Enter(t.Context(), "late", Need{Request: 1}), errs.OutOfMemory, "requests", 1, 0)
		if waited := time.Since(began); waited != 5*time.Second {
			t.Fatalf("waited %s", waited)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("gone")
		time.AfterFunc(time.Second, func() { cancel(gone) })
		if err := r.Enter(ctx, "late", Need{Request: 1}); !errors.Is(err, gone) {
			t.Fatal(err)
		}
		if f, _ := r.Figures(); f.Waiting != 0 {
			t.Fatalf("%+v", f)
		}
	})
}

func TestNoMoreThanSoManyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{Source: newHost(0), Wait: time.Minute})
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for i := range maxWaiting {
			all.Go(func() { _ = r.Enter(ctx, fmt.Sprint(i), Need{Request: 1}) })
		}
		synctest.Wait()
		refused(t, r.Enter(ctx, "last", Need{Request: 1}), errs.OutOfMemory, "waiting", 1, 0)
		cancel()
		all.Wait()
	})
}

// A burst of restores whose memory is far above what was requested: at no moment is more touched than there is, and all that
// can be there in the end is.
func TestABurstNeverOvercommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const image = 90 * mib
		h := newHost(1000 * mib)
		r := New(Options{Source: h, Reserve: 100 * mib, Wait: 5 * time.Second})
		var all sync.WaitGroup
		var mu sync.Mutex
		in := 0
		for i := range 40 {
			uid := fmt.Sprint(i)
			all.Go(func() {
				if err := r.Enter(t.Context(), uid, Need{Request: 10 * mib, Expect: image + 10*mib}); err != nil {
					if !errs.Has(err, errs.OutOfMemory) {
						t.Error(err)
					}
					return
				}
				for n := int64(1); n <= 9; n++ {
					time.Sleep(50 * time.Millisecond)
					h.touch(uid, n*10*mib)
					if m, _ := h.Machine(); m.Available < 100*mib {
						t.Errorf("only %d left", m.Available)
					}
				}
				r.Settle(uid)
				mu.Lock()
				defer mu.Unlock()
				in++
			})
		}
		all.Wait()
		// 9 of 100 at once; as they settle below what was expected, one more fits: 900 = 9*90 + 90.
		if in < 9 || in > 10 {
			t.Fatalf("%d are in", in)
		}
	})
}

func TestPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(1000 * mib)
		lows := 0
		r := New(Options{Source: h, Reserve: 100 * mib, Low: func(context.Context) { lows++ }})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		is := func(want Level) {
			t.Helper()
			_, changed := r.Pressure()
			before := r.level
			time.Sleep(2 * lookEvery)
			got, _ := r.Pressure()
			if got != want {
				t.Fatalf("%s, want %s", got, want)
			}
			select {
			case <-changed:
				if got == before {
					t.Fatal("told of a change that was none")
				}
			default:
				if got != before {
					t.Fatal("nobody was told")
				}
			}
		}
		synctest.Wait()
		is(None)
		h.others = 750 * mib
		is(None)
		h.others = 801 * mib
		is(Some)
		h.others = 795 * mib // not by so little
		is(Some)
		h.others = 901 * mib
		is(High)
		refused(t, r.Enter(ctx, "x", Need{Request: 1}), errs.OutOfMemory, "memory", 1, 0)
		if f, err := r.Figures(); err != nil || f.Problem() == "" {
			t.Fatalf("%+v, %v", f, err)
		}
		h.others = 895 * mib
		is(High)
		h.others = 850 * mib
		is(Some)
		h.others = 0
		is(None)
		before := lows
		h.stalled = 30
		is(Some)
		h.stalled = 20
		is(Some)
		time.Sleep(3 * lowEvery)
		if lows < before+3 {
			t.Fatalf("given back %d times, was %d", lows, before)
		}
		h.stalled = 1
		is(None)
		h.broken = errs.New(errs.InternalError, "no figures")
		time.Sleep(2 * lookEvery)
		if err := r.Enter(ctx, "x", Need{Request: 1}); !errs.Has(err, errs.InternalError) {
			t.Fatal(err)
		}
		cancel()
		running.Wait()
	})
}

func TestKept(t *testing.T) {
	h := newHost(1000 * mib)
	r := New(Options{Source: h, Reserve: 100 * mib})
	r.Keep("a", Need{Request: 500 * mib})
	r.Keep("b", Need{Request: 500 * mib}) // a fact, although it is too much
	refused(t, r.Enter(t.Context(), "c", Need{Request: 1}), errs.OutOfMemory, "requests", 1, 0)
	r.Leave("a")
	ok(t, r.Enter(t.Context(), "c", Need{Request: 400 * mib}))
}
