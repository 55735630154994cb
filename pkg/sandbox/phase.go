// Package sandbox has what a sandbox is: its spec, its observed status and the table of phases it
// can move through. It is pure: no I/O, no clock.
package sandbox

import "github.com/dormouse-run/dormouse/pkg/phase"

// Phase is where a sandbox stands.
type Phase string

// The phases. Capture in progress is a condition, not a phase.
const (
	Pending     Phase = "Pending"     // accepted and durable, not yet placed
	Starting    Phase = "Starting"    // placed; its node prepares, starts or restores it
	Running     Phase = "Running"     // guest init answers and the handle is durable
	Paused      Phase = "Paused"      // frozen in memory
	Hibernating Phase = "Hibernating" // being captured, then ended
	Hibernated  Phase = "Hibernated"  // only a snapshot holds it
	Resuming    Phase = "Resuming"    // coming back from Paused or Hibernated
	Stopped     Phase = "Stopped"     // its command ended: there is an exit code
	Failed      Phase = "Failed"      // it will not run again: there is a reason
	Deleting    Phase = "Deleting"    // the intent to delete is durable; still owns what it has
	Gone        Phase = ""            // before the first record and after the last
)

// Phases lists all but Gone, in the order of life.
func Phases() []Phase {
	return []Phase{Pending, Starting, Running, Paused, Hibernating, Hibernated, Resuming, Stopped, Failed, Deleting}
}

// moves is the whole table: any pair that is not a row is refused. A move to the same phase is
// not a transition and needs no row. Who follows a node may see its latest phase without the one before, so that the
// ways to Hibernated and back are there without the middle, too.
var moves = phase.NewTable("sandbox", map[Phase][]Phase{
	Gone:        {Pending},
	Pending:     {Starting, Failed, Deleting},
	Starting:    {Running, Paused, Stopped, Failed, Deleting}, // Paused: restored to stand still
	Running:     {Paused, Hibernating, Hibernated, Stopped, Failed, Deleting},
	Paused:      {Resuming, Running, Hibernating, Hibernated, Stopped, Failed, Deleting},
	Hibernating: {Hibernated, Running, Paused, Stopped, Failed, Deleting},
	Hibernated:  {Resuming, Running, Failed, Deleting},
	Resuming:    {Running, Paused, Hibernated, Stopped, Failed, Deleting},
	Stopped:     {Deleting},
	Failed:      {Deleting},
	Deleting:    {Gone},
})

// Move checks a transition; staying where it is counts as allowed.
func Move(from, to Phase) error { return moves.Move(from, to) }

// Terminal tells whether the phase has no process and never will have one again.
func (p Phase) Terminal() bool { return p == Stopped || p == Failed || p == Gone }

// OnNode tells whether a node may hold processes or memory of a sandbox in this phase.
func (p Phase) OnNode() bool {
	switch p {
	case Starting, Running, Paused, Hibernating, Resuming, Deleting:
		return true
	}
	return false
}
