// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestPlans(t *testing.T) {
	names := PlanNames()
	if len(names) < 3 {
		t.Fatalf("plans: %v", names)
	}
	for _, name := range names {
		p, err := ReadPlan(name)
		if err != nil || p.Name != name {
			t.Errorf("plan %s: %+v, %v", name, p, err)
		}
	}
	file := filepath.Join(t.TempDir(), "own.yaml")
	if err := os.WriteFile(file, []byte("name: own\nsubjects: 3\nfile_mib: 1\nstep_timeout: 90s\npace: 2.5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := ReadPlan(file)
	want := Plan{Name: "own", Subjects: 3, FileMiB: 1, Rounds: 1, Clients: 1, Nodes: 1, StepTimeout: Duration(90 * time.Second), Pace: 2.5}
	if err != nil || p != want {
		t.Errorf("own plan: %+v, %v", p, err)
	}
	for text, says := range map[string]string{
		"name: x\nsubject: 3\n":                                    "field subject not found",
		"name: x\nsubjects: 0\nfile_mib: 1\n":                      "subjects is 0",
		"name: x\nsubjects: 1\nfile_mib: 1\nrounds: 0\n":           "rounds is 0",
		"subjects: 1\nfile_mib: 1\n":                               "no name",
		"name: x\nsubjects: 1\nfile_mib: 1\nfloor: 3\n":            "floor",
		"name: x\nsubjects: 1\nfile_mib: 1\nstep_timeout: fast\n":  "fast",
		"name: x\nsubjects: 1\nfile_mib: 1\nstep_timeout: 1ms\n":   "step_timeout",
		"name: x\nsubjects: 1\nfile_mib: 1\npace: -1\n":            "pace",
		"name: x\nsubjects: 5000\nfile_mib: 1\nclients: 100\n":     "clients is 100",
		"name: x\nsubjects: 1\nfile_mib: 1\nheap_mib: 100000000\n": "heap_mib",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPlan(file); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v; it should say %q", text, err, says)
		}
	}
	if _, err := ReadPlan("no-such-plan"); err == nil || !strings.Contains(err.Error(), "smoke") {
		t.Errorf("an unknown plan: %v; it should name those that there are", err)
	}
}

func TestDistributionTakesWhatWasMeasured(t *testing.T) {
	var all []float64
	for i := 100; i > 0; i-- {
		all = append(all, float64(i))
	}
	if got, want := distribution(all), (Distribution{P50: 50, P95: 95, P99: 99, Max: 100}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got, want := distribution([]float64{7}), (Distribution{7, 7, 7, 7}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := distribution(nil); got != (Distribution{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

// fullSummary is one of a run in which nothing failed.
func fullSummary() Summary {
	s := Summary{Identity: Identity{Plan: Plan{Name: "x", Subjects: 2, HeapMiB: 1, FileMiB: 1, Rounds: 2, Clients: 1}}}
	for _, c := range phases(s.Plan) {
		s.Phases = append(s.Phases, PhaseSummary{Phase: c.Phase, Round: c.Round, Done: 2, Rate: 1, TookMS: 2000})
	}
	return s
}

func TestSummaryTellsWhatFailed(t *testing.T) {
	if why := fullSummary().Failed(); len(why) != 0 {
		t.Fatalf("a run without a failure: %v", why)
	}
	if text := fullSummary().String(); !strings.Contains(text, "tested waterline: 2 subjects; 4 checkpoints, 4 restores, 4 proofs") || strings.Contains(text, "maximum") {
		t.Errorf("the summary says:\n%s", text)
	}
	for what, change := range map[string]func(*Summary){
		"interrupted":       func(s *Summary) { s.Interrupted = true },
		"phases were run":   func(s *Summary) { s.Phases = s.Phases[:3] },
		"1 failed":          func(s *Summary) { s.Phases[2].Failed = 1 },
		"1 of 2 done":       func(s *Summary) { s.Phases[5].Done = 1 },
		"killed for memory": func(s *Summary) { s.OOMKills = 1 },
		"lost updates":      func(s *Summary) { s.Lost = []string{"a snapshot"} },
		"cleanup debt":      func(s *Summary) { s.Debt = []string{"a sandbox"} },
	} {
		s := fullSummary()
		change(&s)
		if why := strings.Join(s.Failed(), "; "); !strings.Contains(why, what) {
			t.Errorf("want %q in %q", what, why)
		}
		if strings.Contains(s.String(), "waterline") {
			t.Errorf("%s: a run that failed is called a waterline", what)
		}
	}
}

func TestCompare(t *testing.T) {
	a, b := fullSummary(), fullSummary()
	b.Phases[2].Rate, b.Plan.Seed = 3, 9
	text := Compare(a, b)
	for _, want := range []string{"3.0/s", "3.00", "the plans differ"} {
		if !strings.Contains(text, want) {
			t.Errorf("want %q in\n%s", want, text)
		}
	}
}

func TestReportStandsAlone(t *testing.T) {
	dir := t.TempDir()
	s := fullSummary()
	s.steps = []Event{{Phase: Checkpoint, Call: 12, At: time.Now()}, {Phase: Checkpoint, Call: 20, At: time.Now()}}
	s.samples = []Sample{{At: time.Now(), Resident: map[string]int64{"redis": 1 << 20}}, {At: time.Now(), Resident: map[string]int64{"redis": 2 << 20}}}
	s.Failures = []Event{{What: "step", Phase: Restore, Error: "<script>"}}
	if err := writeReport(dir, s); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	if strings.Count(text, "<svg") != 3 || strings.Contains(text, "<script") || strings.Contains(text, "src=") || strings.Contains(text, "<link") {
		t.Error("the page has no three pictures, or needs something else")
	}
	if back, err := ReadSummary(dir); err != nil || len(back.Phases) != len(s.Phases) {
		t.Errorf("the summary that was written: %+v, %v", back, err)
	}
}
