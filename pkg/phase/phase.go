// Package phase has the table of the phases that objects of one kind go through. It is pure: no I/O, no clock, the standard
// library only.
package phase

import (
	"fmt"
	"slices"
)

// Table has a row for each move that there is: any other is refused. The empty phase is before the first record and after the last.
type Table[P ~string] struct {
	kind  string
	moves map[P][]P
}

// NewTable makes the table of a kind of objects. It is not changed afterwards.
func NewTable[P ~string](kind string, moves map[P][]P) Table[P] { return Table[P]{kind, moves} }

// Move checks a transition; staying where it is counts as allowed. The error is a *TransitionError.
func (t Table[P]) Move(from, to P) error {
	if from == to || slices.Contains(t.moves[from], to) {
		return nil
	}
	return &TransitionError{Kind: t.kind, From: string(from), To: string(to)}
}

// TransitionError is a move that the table of the kind does not have.
type TransitionError struct{ Kind, From, To string }

func (e *TransitionError) Error() string {
	return fmt.Sprintf("a %s cannot go from %q to %q", e.Kind, e.From, e.To)
}
