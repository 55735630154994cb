package volume

import (
	"testing"

	"github.com/dormouse-run/dormouse/pkg/phase/phasetest"
)

var allowed = map[Phase][]Phase{
	Gone:     {Creating},
	Creating: {Ready, Failed, Deleting},
	Ready:    {Deleting},
	Failed:   {Deleting},
	Deleting: {Deleted},
	Deleted:  {Gone},
}

func TestEveryPairOfPhases(t *testing.T) { phasetest.Table(t, Move, Phases(), allowed) }
