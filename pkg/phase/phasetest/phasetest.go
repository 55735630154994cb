// Package phasetest compares a table of phases with what a test says it is.
package phasetest

import (
	"errors"
	"slices"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/phase"
)

// Table checks move with every pair of phases, of the empty one and of one that no kind has. The test writes the table a second time: a
// change must be made twice.
func Table[P ~string](t *testing.T, move func(from, to P) error, phases []P, allowed map[P][]P) {
	t.Helper()
	all := append(slices.Clone(phases), "", "Dreaming")
	for from := range allowed {
		if !slices.Contains(all, from) {
			t.Errorf("%q is in the table, but is no phase", from)
		}
	}
	for _, from := range all {
		for _, to := range all {
			err := move(from, to)
			if want := from == to || slices.Contains(allowed[from], to); (err == nil) != want {
				t.Errorf("from %q to %q: %v, allowed %v", from, to, err, want)
			}
			var refused *phase.TransitionError
			if err != nil && (!errors.As(err, &refused) || refused.Kind == "" || refused.From != string(from) || refused.To != string(to) || err.Error() == "") {
				t.Errorf("from %q to %q: %v", from, to, err)
			}
		}
	}
}
