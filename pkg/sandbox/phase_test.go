package sandbox

import (
	"errors"
	"slices"
	"testing"
)

// allowed is the table of the API page, written a second time: a change must be made twice.
var allowed = map[Phase][]Phase{
	Gone:        {Pending},
	Pending:     {Starting, Failed, Deleting},
	Starting:    {Running, Paused, Stopped, Failed, Deleting},
	Running:     {Paused, Hibernating, Hibernated, Stopped, Failed, Deleting},
	Paused:      {Running, Resuming, Hibernating, Hibernated, Stopped, Failed, Deleting},
	Hibernating: {Running, Paused, Hibernated, Stopped, Failed, Deleting},
	Hibernated:  {Resuming, Running, Failed, Deleting},
	Resuming:    {Running, Paused, Hibernated, Stopped, Failed, Deleting},
	Stopped:     {Deleting},
	Failed:      {Deleting},
	Deleting:    {Gone},
}

func TestEveryPairOfPhases(t *testing.T) {
	all := append(Phases(), Gone, Phase("Dreaming"))
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

func TestPhasesLeadToAnEnd(t *testing.T) {
	for _, p := range Phases() {
		if p != Deleting && !CanMove(p, Deleting) {
			t.Errorf("%q cannot be deleted", p)
		}
		if p.Terminal() && p.OnNode() {
			t.Errorf("%q has no process and may have one", p)
		}
	}
	if !Gone.Terminal() || Gone.OnNode() || !Deleting.OnNode() || Hibernated.OnNode() || Hibernated.Terminal() {
		t.Error("what is gone, being deleted or hibernated is mixed up")
	}
}
