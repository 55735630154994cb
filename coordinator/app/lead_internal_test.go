package app

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// leases is a store that is asked for the lease, and nothing else.
type leases struct {
	catalog.Store
	began time.Time
	asked []time.Duration // when, since it began
	// answer says how a claim ends. It may wait for the claim's context.
	answer func(ctx context.Context, n int) (fence.Epoch, error)
}

func (l *leases) Lead(ctx context.Context, c catalog.Claim) (catalog.Lease, bool, error) {
	l.asked = append(l.asked, time.Since(l.began))
	epoch, err := l.answer(ctx, len(l.asked))
	return catalog.Lease{Holder: c.Holder, Epoch: epoch, Left: c.TTL}, err == nil, err
}

// renewing runs renew, with a clock of its own, until it ends or the time is up. It gives when the store was asked, how long
// renew went on, and why it ended.
func renewing(t *testing.T, ttl, upTo time.Duration, answer func(ctx context.Context, n int) (fence.Epoch, error)) (asked []time.Duration, ran time.Duration, err error) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{began: time.Now(), answer: answer}
		a := &App{store: l, holder: "me", log: slog.New(slog.DiscardHandler)}
		a.cfg.Lease.TTL = ttl
		ctx, cancel := context.WithTimeoutCause(t.Context(), upTo, errs.New(errs.ShuttingDown, "the test ends"))
		defer cancel()
		err = a.renew(ctx, 7, time.Now())
		asked, ran = l.asked, time.Since(l.began)
	})
	return asked, ran, err
}

const testTTL = 30 * time.Second

func within(d, least, most time.Duration) bool { return least <= d && d <= most }

func TestLeaseIsRenewedInTime(t *testing.T) {
	asked, ran, err := renewing(t, testTTL, 10*testTTL, func(context.Context, int) (fence.Epoch, error) { return 7, nil })
	if !errs.Has(err, errs.ShuttingDown) || ran != 10*testTTL {
		t.Fatalf("it ended after %s: %v", ran, err)
	}
	for i, at := range asked {
		if i > 0 && at-asked[i-1] > testTTL/3 {
			t.Errorf("nothing was asked between %s and %s", asked[i-1], at)
		}
	}
}

// A store that fails for most of the lease's life costs no term: once it answers, the lease is soon whole again, so that
// it may fail again at once.
func TestLeaseIsTriedAgainSoon(t *testing.T) {
	down := errs.New(errs.StoreUnavailable, "down")
	var back []int
	asked, ran, err := renewing(t, testTTL, 10*testTTL, func(_ context.Context, n int) (fence.Epoch, error) {
		if n%18 != 0 { // of tries ttl/30 apart
			return 0, down
		}
		back = append(back, n-1)
		return 7, nil
	})
	if !errs.Has(err, errs.ShuttingDown) {
		t.Fatalf("it ended after %s: %v", ran, err)
	}
	if len(back) < 10 {
		t.Fatalf("the store answered %d times in %s", len(back), ran)
	}
	for i := 1; i < len(asked); i++ {
		gap := asked[i] - asked[i-1]
		if want := testTTL / 30; !slices.Contains(back, i-1) && !within(gap, want/2, 2*want) {
			t.Errorf("after a failure at %s the store was asked again after %s, not about %s", asked[i-1], gap, want)
		}
	}
}

// A lease that cannot be renewed ends by the holder's clock before it does by the store's, whether the store says so or says
// nothing.
func TestLeaseEndsBeforeAnotherMayLead(t *testing.T) {
	for name, answer := range map[string]func(ctx context.Context) error{
		"refuses": func(context.Context) error { return errors.New("refused") },
		"hangs":   func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		_, ran, err := renewing(t, testTTL, 10*testTTL, func(ctx context.Context, n int) (fence.Epoch, error) {
			if n <= 2 {
				return 7, nil
			}
			return 0, answer(ctx)
		})
		// Renewed last at half a life.
		if last := testTTL / 2; !errs.Has(err, errs.NoLeader) || !within(ran, last+testTTL/2, last+testTTL-1) {
			t.Errorf("%s: it ended after %s: %v", name, ran, err)
		}
	}
}

func TestLeaseOfAnotherEndsTheTerm(t *testing.T) {
	_, ran, err := renewing(t, testTTL, 10*testTTL, func(context.Context, int) (fence.Epoch, error) { return 8, nil })
	if !errs.Has(err, errs.NoLeader) || ran > testTTL/2 {
		t.Errorf("it ended after %s: %v", ran, err)
	}
}

// Under the default settings a standby leads in less than ten seconds: the lease of one that is not heard any more lives for at most its
// TTL, and a standby asks at least each longest nap. What is left is for reading the catalog, and for nodes to dial.
func TestC22TakeoverIsBoundedByTheSettings(t *testing.T) {
	ttl := DefaultConfig().Lease.TTL
	bound := ttl + 2*min(ttl/6, longestNap/2)
	t.Logf("leases live %s, a standby asks each %s at the latest: it has the lease within %s", ttl, 2*min(ttl/6, longestNap/2), bound)
	if bound > 7*time.Second {
		t.Errorf("the lease may take %s of 10s", bound)
	}
}
