package uid

import (
	"strings"
	"testing"
	"time"
)

func TestNewIsAUID(t *testing.T) {
	before := time.Now().Add(-time.Millisecond)
	u := New()
	if err := Check(u); err != nil {
		t.Fatal(err)
	}
	at, err := Time(u)
	if err != nil || at.Before(before.Truncate(time.Millisecond)) || at.After(time.Now().Add(time.Second)) {
		t.Fatalf("Time(%s) = %v, %v", u, at, err)
	}
}

func TestOrder(t *testing.T) {
	last := New()
	for range 1000 {
		u := New()
		if u <= last {
			t.Fatalf("%s came after %s", u, last)
		}
		last = u
	}
}

func TestRefused(t *testing.T) {
	for _, s := range []string{"", "x", strings.ToUpper(New()), "f47ac10b-58cc-4372-a567-0e02b2c3d479", New() + "0", "{" + New()[:34] + "}"} {
		if Check(s) == nil {
			t.Errorf("%q was taken for a uid", s)
		}
	}
}

// A clock that is set back a little makes no uid out of order; one that is set back by an hour is followed,
// or the uids were of the future, which no coordinator takes.
func TestClockSetBack(t *testing.T) {
	clock := time.Now()
	m := maker{now: func() time.Time { return clock }}
	first := m.next()
	clock = clock.Add(-time.Second)
	if u := m.next(); u <= first {
		t.Errorf("%s came after %s", u, first)
	}
	clock = clock.Add(-time.Hour)
	made := map[string]bool{}
	last := ""
	for range 5000 { // more than the ticks of a millisecond
		u := m.next()
		at, err := Time(u)
		if ahead := at.Sub(clock); err != nil || ahead < -time.Millisecond || ahead > time.Second {
			t.Fatalf("%s is of %s after the clock (%v)", u, ahead, err)
		}
		if made[u] || u <= last {
			t.Fatalf("%s came after %s", u, last)
		}
		made[u], last = true, u
	}
	clock = clock.Add(2 * time.Hour)
	if at, err := Time(m.next()); err != nil || !at.Equal(clock.Truncate(time.Millisecond)) {
		t.Errorf("set forward, the time is %v, not %v (%v)", at, clock, err)
	}
}
