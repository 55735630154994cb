package bench

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/test/report"
)

// Sample is a list of measured values.
type Sample []float64

func (s *Sample) add(d time.Duration) { *s = append(*s, float64(d.Microseconds())/1000) }

// at gives the value below which the share q of the sample lies, 0 of none.
func (s Sample) at(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Median of the sample.
func (s Sample) Median() float64 { return s.at(0.5) }

// Row is one line of the table.
type Row = report.Figure

// Result is what one benchmark found.
type Result struct {
	Name string    `json:"name"`
	When time.Time `json:"when"`
	Host string    `json:"host"`
	Load string    `json:"load"` // the machine's load average before and after
	// Commit that was measured; Took is how many seconds it was.
	Commit string   `json:"commit,omitempty"`
	Took   float64  `json:"took_s,omitempty"`
	Rows   []Row    `json:"rows"`
	Notes  []string `json:"notes,omitempty"`
}

// String is the result as Markdown.
func (r Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n%s, %s, commit %s, %.0f s; load average %s.\n\n%s", r.Name, r.When.Format("2006-01-02 15:04 MST"), r.Host, short(r.Commit), r.Took, r.Load, report.Table(r.Rows))
	for _, n := range r.Notes {
		b.WriteString("\n" + n + "\n")
	}
	return b.String()
}

// short is a commit as people write it.
func short(commit string) string {
	if commit == "" {
		return "unknown"
	}
	return commit[:min(len(commit), 12)]
}

// names in the order of the report.
var names = []string{"start", "checkpoint", "restore", "memory", "image", "catalog", "deletion", "exec", "files", "lifecycle", "network", "warm", "load-node", "load-fleet"}

const head = `# Figures

Made by ` + "`make bench`" + ` (each benchmark by ` + "`make bench-NAME`" + `) and not edited by hand. A time is
"median / 95th percentile". Bare is runsc alone, called in turn with the product in the same run: same
bundle, image, guest init and spec, ready network namespace; see ` + "`test/bench`" + `. Absolute values are of
the machine named; the ratios are what is compared.

`

const tableHead = `| benchmark | what | Dormouse | bare | figure | target | | date | commit |
|---|---|---|---|---|---|---|---|---|
`

// line of the table of all benchmarks.
func line(r Result, f Row) string {
	verdict := f.Verdict()
	if verdict == "missed" {
		verdict = "**missed**"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", r.Name, f.What, f.Product, f.Bare, f.Measured(), f.Target(), verdict, report.Day(r.When), short(r.Commit))
}

// page is the table of all results and what a reader has to know of them.
func page(all []Result) string {
	var table, notes strings.Builder
	hosts := make(map[string]bool)
	var took float64
	met, missed := 0, 0
	for _, r := range all {
		hosts[r.Host] = true
		took += r.Took
		for _, f := range r.Rows {
			table.WriteString(line(r, f))
			switch f.Verdict() {
			case "met":
				met++
			case "missed":
				missed++
			}
		}
		fmt.Fprintf(&notes, "- %s: %.0f s, load average %s.", r.Name, r.Took, r.Load)
		for _, n := range r.Notes {
			notes.WriteString(" " + strings.TrimSpace(n))
		}
		notes.WriteString("\n")
	}
	return fmt.Sprintf("%sMachine: %s. %d targets met, %d missed; %.1f minutes of measuring in all.\n\n%s%s\n%s", head,
		strings.Join(slices.Sorted(maps.Keys(hosts)), "; "), met, missed, took/60, tableHead, table.String(), notes.String())
}

// save keeps a result and writes the report of all that there are.
func save(dir string, r Result) error {
	results := filepath.Join(dir, "results")
	if err := os.MkdirAll(results, 0o755); err != nil {
		return err
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(results, r.Name+".json"), append(data, '\n'), 0o644); err != nil {
		return err
	}
	var all []Result
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(results, name+".json"))
		if os.IsNotExist(err) {
			continue
		}
		var one Result
		if err == nil {
			err = json.Unmarshal(data, &one)
		}
		if err != nil {
			return fmt.Errorf("result of %s: %w", name, err)
		}
		all = append(all, one)
	}
	return os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(page(all)), 0o644)
}
