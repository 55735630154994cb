// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package faultrun

import (
	_ "embed"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/test/report"
)

// Check is a requirement and how it came out.
type Check struct {
	ID string `json:"id"`
	// What had to hold, and Found what was seen.
	What   string `json:"what"`
	Found  string `json:"found"`
	Passed bool   `json:"passed"`
}

// Attempt is a call that failed, whether or not it was tried again.
type Attempt struct {
	At      time.Time `json:"at"`
	Step    string    `json:"step"`
	Method  string    `json:"method"`
	Reason  string    `json:"reason"`
	Outcome string    `json:"outcome"`
	Error   string    `json:"error"`
}

// Fault is something that the run did to the cluster.
type Fault struct {
	At   time.Time `json:"at"`
	What string    `json:"what"`
	Took float64   `json:"took_ms"`
}

// Report is what came of a run.
type Report struct {
	Began    time.Time `json:"began"`
	TookMS   float64   `json:"took_ms"`
	Subjects int       `json:"subjects"`
	Nodes    int       `json:"nodes"`
	HeapMiB  int       `json:"heap_mib"`
	FileMiB  int       `json:"file_mib"`
	Checks   []Check   `json:"checks"`
	Faults   []Fault   `json:"faults"`
	Attempts []Attempt `json:"attempts"`
	// LongestGap is the longest time in which a source on a surviving node was not reached.
	LongestGapMS float64           `json:"longest_gap_ms"`
	Executables  map[string]string `json:"executables"`
}

// Passed tells whether all checks held.
func (r *Report) Passed() bool {
	for _, c := range r.Checks {
		if !c.Passed {
			return false
		}
	}
	return len(r.Checks) > 0
}

// String is the report for people.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "fault run: %d subjects of %d MiB heap + %d MiB file with a volume each, %d nodes, %.0f s\n", r.Subjects, r.HeapMiB, r.FileMiB, r.Nodes, r.TookMS/1000)
	for _, c := range r.Checks {
		word := "ok    "
		if !c.Passed {
			word = "FAILED"
		}
		fmt.Fprintf(&b, "%s %-5s %s: %s\n", word, c.ID, c.What, c.Found)
	}
	fmt.Fprintf(&b, "failed calls, those included that were tried again: %d; the longest time in which a surviving source was not reached: %.0f ms\n", len(r.Attempts), r.LongestGapMS)
	return b.String()
}

//go:embed report.html.tmpl
var pageText string

var page = report.Page(pageText, nil)

// Write writes report.json and report.html into a folder, which it makes.
func (r *Report) Write(dir string) error { return report.Write(dir, "report", r, page, r) }

// Publish keeps the report where others see it: as NAME.json and NAME.md.
func (r *Report) Publish(name string) error {
	var b strings.Builder
	word := "passed"
	if !r.Passed() {
		word = "**failed**"
	}
	fmt.Fprintf(&b, "# The fault run: %s\n\n%s. %d subjects of %d MiB heap and %d MiB file with a volume each, on %d nodes, %.0f s.\n\n", word, report.Day(r.Began), r.Subjects,
		r.HeapMiB, r.FileMiB, r.Nodes, r.TookMS/1000)
	b.WriteString("| | | what had to hold | what was found |\n|---|---|---|---|\n")
	for _, c := range r.Checks {
		verdict := "ok"
		if !c.Passed {
			verdict = "failed"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", verdict, c.ID, c.What, strings.ReplaceAll(c.Found, "|", "/"))
	}
	fmt.Fprintf(&b, "\nCalls that failed, those included that were tried again: %d. The longest time in which a source on a surviving node was not reached: %.0f ms.\n",
		len(r.Attempts), r.LongestGapMS)
	return report.Publish(filepath.Dir(name), filepath.Base(name), r, b.String())
}

// Read reads the report of a run's folder.
func Read(dir string) (*Report, error) {
	r := &Report{}
	return r, report.ReadJSON(filepath.Join(dir, "report.json"), r)
}
