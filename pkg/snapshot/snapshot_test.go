package snapshot

import (
	"testing"

	"github.com/dormouse-run/dormouse/pkg/phase/phasetest"
)

var allowed = map[Phase][]Phase{
	Gone:      {Preparing},
	Preparing: {Ready, Failed, Deleting},
	Ready:     {Deleting},
	Failed:    {Deleting},
	Deleting:  {Deleted},
	Deleted:   {Gone},
}

func TestEveryPairOfPhases(t *testing.T) { phasetest.Table(t, Move, Phases(), allowed) }

func TestWhoOwnsTheArtefact(t *testing.T) {
	for p, owns := range map[Phase]bool{Preparing: true, Ready: true, Deleting: true, Deleted: false, Failed: false, Gone: false} {
		if p.OwnsArtefact() != owns {
			t.Errorf("%q: %v", p, !owns)
		}
	}
}
