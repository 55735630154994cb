package robustness

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Report of a run.
type Report struct {
	Seed    uint64
	Variant string `json:",omitempty"`
	Took    time.Duration
	// Operations recorded, and the steps that they were for the checker.
	Operations, Steps int
	// Outcomes by kind.
	Outcomes map[Kind]map[Outcome]int
	// Reasons of refusals and failures.
	Reasons map[string]int
	Plan    []planned
	Faults  []struck
	// Wrong is everything that was found; a run without is good.
	Wrong []string
	// Stuck says what did not come about within minutes, in a run that is not good either.
	Stuck string `json:",omitempty"`

	records []*Record
}

func newReport(o Options, records []*Record, faults []struck) *Report {
	r := &Report{Seed: o.Seed, Variant: o.Variant, Outcomes: make(map[Kind]map[Outcome]int), Reasons: make(map[string]int), Faults: faults, records: records}
	for _, rec := range records {
		if rec.Outcome != NotStarted { // what was not even begun proves little
			r.Operations++
		}
		if r.Outcomes[rec.Kind] == nil {
			r.Outcomes[rec.Kind] = make(map[Outcome]int)
		}
		r.Outcomes[rec.Kind][rec.Outcome]++
		if rec.Reason != "" {
			r.Reasons[rec.Reason]++
		}
	}
	return r
}

// Save writes the report, and the history of a run that found something, into the folder.
func (r *Report) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	data, err := json.MarshalIndent(r, "", "\t")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "report.json"), data, 0o644)
	}
	if err != nil || r.Good() {
		return err
	}
	var b strings.Builder
	for _, rec := range r.records {
		fmt.Fprintln(&b, rec)
	}
	return os.WriteFile(filepath.Join(dir, "history.txt"), []byte(b.String()), 0o644)
}

// Summary is the report for people.
func (r *Report) Summary() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d operations, %d steps, %s", r.Seed, r.Operations, r.Steps, r.Took.Round(time.Millisecond))
	if r.Variant != "" {
		fmt.Fprintf(&b, ", variant %s", r.Variant)
	}
	b.WriteString("\n")
	for _, k := range slices.Sorted(maps.Keys(r.Outcomes)) {
		fmt.Fprintf(&b, "  %-18s", k)
		for _, o := range slices.Sorted(maps.Keys(r.Outcomes[k])) {
			fmt.Fprintf(&b, " %s %d", o, r.Outcomes[k][o])
		}
		b.WriteString("\n")
	}
	for _, f := range r.Faults {
		fmt.Fprintf(&b, "  at %-8s %-40s longest without a success %s\n", f.Begin.Round(time.Millisecond), f.Kind, f.Outage.Round(time.Millisecond))
	}
	for _, w := range r.Wrong {
		fmt.Fprintf(&b, "  WRONG: %s\n", w)
	}
	if r.Stuck != "" {
		fmt.Fprintf(&b, "  STUCK: %s\n", r.Stuck)
	}
	return b.String()
}

// Good tells whether the run found nothing.
func (r *Report) Good() bool { return len(r.Wrong) == 0 && r.Stuck == "" }

// Outages gives the longest time without a success of each kind of fault.
func Outages(all []*Report) string {
	longest := make(map[string]time.Duration)
	for _, r := range all {
		for _, f := range r.Faults {
			longest[f.Kind] = max(longest[f.Kind], f.Outage)
		}
	}
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(longest)) {
		fmt.Fprintf(&b, "  %-40s %s\n", kind, longest[kind].Round(time.Millisecond))
	}
	return b.String()
}
