package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
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
type Row struct {
	What    string  `json:"what"`
	Product string  `json:"product"`
	Bare    string  `json:"bare,omitempty"`
	Value   float64 `json:"value"` // what the target is about
	Unit    string  `json:"unit"`  // of Value; "x" for a ratio
	AtMost  float64 `json:"at_most,omitempty"`
	AtLeast float64 `json:"at_least,omitempty"`
}

// Met tells whether the target is reached; a row without one is information.
func (r Row) Met() bool {
	return (r.AtMost == 0 || r.Value <= r.AtMost) && (r.AtLeast == 0 || r.Value >= r.AtLeast)
}

func (r Row) target() string {
	switch {
	case r.AtMost > 0:
		return fmt.Sprintf("at most %g %s", r.AtMost, r.Unit)
	case r.AtLeast > 0:
		return fmt.Sprintf("at least %g %s", r.AtLeast, r.Unit)
	}
	return ""
}

func (r Row) verdict() string {
	switch {
	case r.target() == "":
		return ""
	case r.Met():
		return "met"
	}
	return "**missed**"
}

func (r Row) line() string {
	return fmt.Sprintf("| %s | %s | %s | %.2f %s | %s | %s |", r.What, r.Product, r.Bare, r.Value, r.Unit, r.target(), r.verdict())
}

// Result is what one benchmark found.
type Result struct {
	Name  string    `json:"name"`
	When  time.Time `json:"when"`
	Host  string    `json:"host"`
	Load  string    `json:"load"` // the machine's load average before and after
	Rows  []Row     `json:"rows"`
	Notes []string  `json:"notes,omitempty"`
}

const tableHead = "| what | Dormouse | bare | figure | target | |\n|---|---|---|---|---|---|\n"

// String is the result as Markdown.
func (r Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n%s, %s; load average %s.\n\n%s", r.Name, r.When.Format("2006-01-02 15:04 MST"), r.Host, r.Load, tableHead)
	for _, row := range r.Rows {
		b.WriteString(row.line() + "\n")
	}
	for _, n := range r.Notes {
		b.WriteString("\n" + n + "\n")
	}
	return b.String()
}

// names in the order of the report.
var names = []string{"start", "checkpoint", "restore", "memory", "image", "catalog", "exec", "files", "lifecycle", "network"}

const head = `# Figures

Made by ` + "`make bench`" + ` (each section by ` + "`make bench-NAME`" + `) and not edited by hand. A time is
"median / 95th percentile". Bare is runsc alone, called in turn with the product in the same run: same
bundle, image, guest init and spec, ready network namespace; see ` + "`test/bench`" + `. Absolute values are of
the machine named; the ratios are what is compared.

`

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
	text := head
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
		text += one.String() + "\n"
	}
	return os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(text), 0o644)
}
