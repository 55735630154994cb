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
