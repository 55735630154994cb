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

// Line is the report in one line.
func (r *Report) Line() string {
	kinds := make([]string, 0, len(r.Faults))
	for _, f := range r.Faults {
		kinds = append(kinds, f.Kind)
	}
	return fmt.Sprintf("seed %d: %d operations, %d steps, %s: %s", r.Seed, r.Operations, r.Steps, r.Took.Round(time.Millisecond), strings.Join(kinds, "; "))
}

// What is told of a run that found something, so that it is whole where an output is cut: so many lines, none longer.
const troubleLines, troubleWidth = 40, 400

// Trouble says what was planned, what was done, and what was wrong, in few lines.
func (r *Report) Trouble() string {
	var all []string
	add := func(text string) {
		for line := range strings.Lines(text) {
			if line = strings.TrimRight(line, " \n"); line != "" {
				all = append(all, line[:min(len(line), troubleWidth)])
			}
		}
	}
	add(fmt.Sprintf("SEED %d FOUND SOMETHING: %d operations, %s %s", r.Seed, r.Operations, r.Took.Round(time.Millisecond), r.Variant))
	for i, p := range r.Plan {
		line := fmt.Sprintf("  after %d operations %s, leader %v, node %d, %s, %d bytes", p.After, p.Kind, p.Leader, p.Node, p.Hold.Round(time.Millisecond), p.Bytes)
		if i < len(r.Faults) {
			line += fmt.Sprintf(": at %s, healed at %s", r.Faults[i].Begin.Round(time.Millisecond), r.Faults[i].Healed.Round(time.Millisecond))
		}
		add(line)
	}
	if r.Stuck != "" {
		add("  STUCK: " + r.Stuck)
	}
	for i, w := range r.Wrong { // each gets its share
		rest := (troubleLines - len(all)) / (len(r.Wrong) - i)
		if rest < 1 {
			break
		}
		before := len(all)
		add("  WRONG: " + w)
		all = all[:min(len(all), before+rest)]
	}
	return strings.Join(all[:min(len(all), troubleLines)], "\n")
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
