package robustness

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// hunts are the runs in which each variant is looked for: with the fault that brings about what it breaks, amid what clients do by chance. A variant may
// leave an operation without an answer, which is not waited for.
var hunts = map[mutant.Name]Options{
	mutant.NoEpochCheck:     {Only: "commit of a leader late", Faults: 1, Operations: 100, Patience: 3 * time.Second},
	mutant.BlindRetry:       {Only: "reply to a commit lost", Faults: 2, Operations: 100, Patience: 3 * time.Second},
	mutant.StaleView:        {Only: "server came back with a copy", Faults: 1, Operations: 300, Patience: 3 * time.Second, FaultPatience: time.Minute},
	mutant.UnreportedLoss:   {Only: "server came back with an old dump, a node away", Faults: 1, Operations: 300, Patience: 3 * time.Second, FaultPatience: 2 * time.Minute},
	mutant.Resurrection:     {Only: "server came back with an old dump, a node away", Faults: 2, Operations: 400, Patience: 3 * time.Second, FaultPatience: 2 * time.Minute},
	mutant.NoTombstone:      {Only: "name of a deleted volume given again", Faults: 1, Operations: 300, Patience: 3 * time.Second},
	mutant.DroppedReference: {Only: "first attempts of commits lost", Faults: 1, Operations: 300, Patience: 3 * time.Second},
}

// tries is how many seeds have to do to catch a variant. The first does, unless something else goes wrong.
const tries = 8

// TestTheSuiteFindsBugs: each variant is caught by one of a few seeds, by what clients were told or by the change log. That
// it stands still is not enough, nor that its history takes too long to check.
func TestTheSuiteFindsBugs(t *testing.T) {
	binary, first, all := coordinator(t, "mutants"), number(t, "FIRST", 1), number(t, "ALL", 0)
	for _, variant := range mutant.Names() {
		t.Run(string(variant), func(t *testing.T) {
			o, caught := hunts[variant], 0
			o.Binary, o.Variant, o.CheckLimit, o.Enough = binary, string(variant), 15*time.Second, all == 0
			for n := range cmp.Or(all, tries) {
				o.Seed = uint64(first + n)
				report, err := Run(t.Context(), o)
				if err != nil {
					t.Fatalf("seed %d: %v", o.Seed, err)
				}
				t.Logf("seed %d found %d bugs in %s %s", o.Seed, len(report.Wrong), report.Took.Round(time.Millisecond), report.Stuck)
				wrong := slices.DeleteFunc(report.Wrong, func(w string) bool { return strings.Contains(w, uncheckable) })
				if len(wrong) > 0 {
					caught++
				}
				if all == 0 && caught > 0 {
					t.Logf("caught by seed %d, the %d. that was tried:\n%s", o.Seed, n+1, wrong[0][:min(len(wrong[0]), troubleWidth)])
					return
				}
			}
			if all == 0 {
				t.Errorf("not caught by %d seeds", tries)
			}
			t.Logf("%d of %d seeds caught it", caught, all)
		})
	}
}

// TestAimedFaultsFindNothing: with the same faults, what is released is caught at nothing.
func TestAimedFaultsFindNothing(t *testing.T) {
	binary := coordinator(t, "")
	for _, f := range aimed {
		t.Run(f.kind, func(t *testing.T) {
			report, err := Run(t.Context(), Options{Seed: 1, Operations: 200, Faults: 2, Only: f.kind, Binary: binary})
			if err != nil {
				t.Fatal(err)
			}
			if !report.Good() || len(report.Faults) != 2 {
				t.Error(report.Trouble())
			}
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
