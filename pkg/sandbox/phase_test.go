package sandbox

import (
	"testing"

	"github.com/dormouse-run/dormouse/pkg/phase/phasetest"
)

// allowed is the table of the API page.
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

func TestEveryPairOfPhases(t *testing.T) { phasetest.Table(t, Move, Phases(), allowed) }

func TestPhasesLeadToAnEnd(t *testing.T) {
	for _, p := range Phases() {
		if p != Deleting && Move(p, Deleting) != nil {
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
