package checkpoint

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// mute is a channel whose guest does not obey. It tells when it is asked the second time.
type mute struct {
	Channel
	asked chan struct{}
}

func (m *mute) Quiesce(ctx context.Context) error {
	m.asked <- struct{}{}
	<-ctx.Done()
	return errs.Wrap(ctx.Err(), errs.GuestSilent, "silent")
}

// obedient is a channel whose guest obeys.
type obedient struct{ Channel }

func (obedient) Quiesce(context.Context) error { return nil }

// TestSilentGuestHoldsNoSlot: while a guest that does not obey is waited for, others are captured.
func TestSilentGuestHoldsNoSlot(t *testing.T) {
	c := NewCapturer(nil, 1, false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m := &mute{asked: make(chan struct{}, 2)}
	silent := make(chan error, 1)
	waiting, giveUp := context.WithCancel(ctx)
	go func() {
		_, _, err := c.quiet(waiting, m, new(time.Duration))
		silent <- err
	}()
	<-m.asked // in the slot
	leave, asked, err := c.quiet(ctx, obedient{}, new(time.Duration))
	if err != nil || !asked {
		t.Fatalf("the next one: %v", err)
	}
	<-m.asked // outside
	leave()
	giveUp()
	if err := <-silent; !errs.Has(err, errs.GuestSilent) {
		t.Fatalf("the silent one: %v", err)
	}
	if len(c.slots) != 0 {
		t.Fatal("a slot is kept")
	}
}
