package robustness

import (
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// suits are the seeds that are tried for each variant: those whose faults meet what it breaks, as far as it takes any.
var suits = map[mutant.Name]func(planned) bool{
	mutant.NoEpochCheck: func(p planned) bool { return p.Kind == "coordinator stopped" && p.Leader },
	mutant.StaleView:    func(p planned) bool { return p.Kind == "server came back with a copy" },
}

// tries is how many seeds have to do to catch a variant.
const tries = 8

// TestTheSuiteFindsBugs: each variant is caught by one of a few seeds, by what clients were told or by the change log. That
// it stands still is not enough.
func TestTheSuiteFindsBugs(t *testing.T) {
	binary := coordinator(t, "mutants")
	for _, variant := range mutant.Names() {
		t.Run(string(variant), func(t *testing.T) {
			tried := 0
			for seed := uint64(1); tried < tries; seed++ {
				if suits := suits[variant]; suits != nil && !slices.ContainsFunc(schedule(seed, faultsOfRun, operations), suits) {
					continue
				}
				tried++
				report, err := Run(t.Context(), Options{Seed: seed, Operations: operations, Faults: faultsOfRun, Binary: binary, Variant: string(variant), Limit: 45 * time.Second})
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if len(report.Wrong) > 0 {
					t.Logf("caught by seed %d, the %d. that was tried:\n%s", seed, tried, report.Wrong[0])
					return
				}
			}
			t.Errorf("not caught by %d seeds", tried)
		})
	}
}

// TestReleasesHaveNoVariants: what this test was built with is what a release is.
func TestReleasesHaveNoVariants(t *testing.T) {
	if mutant.Enabled {
		t.Error("a build without the tag has the variants")
	}
	t.Setenv("DORMOUSE_MUTANT", string(mutant.NoEpochCheck))
	if slices.ContainsFunc(mutant.Names(), mutant.On) {
		t.Error("a variant is on")
	}
}
