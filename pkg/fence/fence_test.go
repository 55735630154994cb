package fence

import (
	"math"
	"testing"
)

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		inForce, carried Epoch
		want             Verdict
	}{
		{0, 0, Stale}, {5, 0, Stale}, {0, 1, Newer}, {5, 4, Stale}, {5, 5, Current}, {5, 6, Newer},
		{math.MaxUint64, math.MaxUint64, Current}, {math.MaxUint64, 1, Stale}, {1, math.MaxUint64, Newer},
	} {
		if got := Check(c.inForce, c.carried); got != c.want {
			t.Errorf("Check(%d, %d) = %s, want %s", c.inForce, c.carried, got, c.want)
		}
	}
}

// A lower epoch never becomes the owner again, whatever came in between.
func TestEpochsOnlyGrow(t *testing.T) {
	inForce := Epoch(0)
	for _, carried := range []Epoch{1, 1, 3, 2, 3, 0, 7, 3, 7} {
		before := inForce
		switch Check(inForce, carried) {
		case Newer:
			inForce = carried
		case Current:
			if carried != inForce {
				t.Errorf("%d is the owner while %d is in force", carried, inForce)
			}
		case Stale:
			if carried >= inForce && carried != 0 {
				t.Errorf("%d is stale while %d is in force", carried, inForce)
			}
		}
		if inForce < before {
			t.Errorf("the epoch fell from %d to %d", before, inForce)
		}
	}
	if inForce != 7 {
		t.Errorf("in force: %d", inForce)
	}
}

func TestVerdictNames(t *testing.T) {
	for v, want := range map[Verdict]string{Stale: "stale", Current: "current", Newer: "newer", 9: "Verdict(9)"} {
		if v.String() != want {
			t.Errorf("%d: %s", int(v), v)
		}
	}
}
