package volume

import (
	"errors"
	"slices"
	"testing"
)

// allowed is the table, written a second time: a change must be made twice.
var allowed = map[Phase][]Phase{
	Gone:     {Creating},
	Creating: {Ready, Failed, Deleting},
	Ready:    {Deleting},
	Failed:   {Deleting},
	Deleting: {Deleted},
	Deleted:  {Gone},
}

func TestEveryPairOfPhases(t *testing.T) {
	all := append(Phases(), Gone, Phase("Lost"))
	for _, from := range all {
		for _, to := range all {
			want := slices.Contains(allowed[from], to)
			if got := CanMove(from, to); got != want {
				t.Errorf("CanMove(%q, %q) = %v, want %v", from, to, got, want)
			}
			err := Move(from, to)
			if (err == nil) != (want || from == to) {
				t.Errorf("Move(%q, %q) = %v", from, to, err)
			}
			var refused *TransitionError
			if err != nil && (!errors.As(err, &refused) || refused.From != from || refused.To != to || err.Error() == "") {
				t.Errorf("Move(%q, %q) gave %v", from, to, err)
			}
		}
	}
}
