// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package report has what benchmarks, load runs and the fault run tell their results with: figures beside their targets, a file
// for programs and a page for people, and copies of both that say nothing of the machine they were made on.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"strings"
)

// Figure is something that was measured, beside what it is compared with and what it should be. Without a target it is information.
type Figure struct {
	What    string  `json:"what"`
	Product string  `json:"product"`
	Bare    string  `json:"bare,omitempty"`
	Value   float64 `json:"value"` // what the target is about
	Unit    string  `json:"unit"`  // of Value; "x" for a ratio
	AtMost  float64 `json:"at_most,omitempty"`
	AtLeast float64 `json:"at_least,omitempty"`
}

// Met tells whether the target is reached, if there is one.
func (f Figure) Met() bool {
	return (f.AtMost == 0 || f.Value <= f.AtMost) && (f.AtLeast == 0 || f.Value >= f.AtLeast)
}

// Target in words; empty without one.
func (f Figure) Target() string {
	switch {
	case f.AtMost > 0:
		return fmt.Sprintf("at most %g %s", f.AtMost, f.Unit)
	case f.AtLeast > 0:
		return fmt.Sprintf("at least %g %s", f.AtLeast, f.Unit)
	}
	return ""
}

// Verdict is met, missed or, without a target, empty.
func (f Figure) Verdict() string {
	switch {
	case f.Target() == "":
		return ""
	case f.Met():
		return "met"
	}
	return "missed"
}

// Measured is the value with its unit.
func (f Figure) Measured() string { return fmt.Sprintf("%.2f %s", f.Value, f.Unit) }

// String is the figure on one line.
func (f Figure) String() string {
	text := fmt.Sprintf("%s: %s", f.What, f.Product)
	if f.Bare != "" {
		text += ", bare " + f.Bare
	}
	if m := f.Measured(); m != f.Product {
		text += ": " + m
	}
	if t := f.Target(); t != "" {
		text += fmt.Sprintf(" (%s: %s)", t, f.Verdict())
	}
	return text
}

// style is that of every page.
const style = `<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; font-variant-numeric: tabular-nums; }
table.numbers th, table.numbers td { text-align: right; }
table.numbers th:first-child, table.numbers td:first-child { text-align: left; }
.bad { color: #a00; font-weight: bold; }
.good { color: #060; font-weight: bold; }
svg { max-width: 100%; height: auto; }
code { background: #f4f4f4; }
</style>`

// parts may be used by every page: "style", and "figures" with a list of them.
const parts = `{{define "style"}}` + style + `{{end}}{{define "figures"}}<table>
<tr><th></th><th>what</th><th>Dormouse</th><th>bare</th><th>figure</th><th>target</th></tr>
{{range .}}<tr><td>{{if eq .Verdict "met"}}<span class="good">met</span>{{else if .Verdict}}<span class="bad">missed</span>{{end}}</td><td>{{.What}}</td><td>{{.Product}}</td><td>{{.Bare}}</td><td>{{.Measured}}</td><td>{{.Target}}</td></tr>
{{end}}</table>{{end}}`

// Page makes the page of a kind of report out of its template.
func Page(text string, functions template.FuncMap) *template.Template {
	t := template.Must(template.New("report").Funcs(functions).Parse(parts))
	return template.Must(t.Parse(text))
}

// WriteJSON writes a file for programs.
func WriteJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o600)
}

// Write writes name.json and report.html into a folder, which it makes. The page needs nothing else.
func Write(dir, name string, v any, page *template.Template, shown any) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := WriteJSON(filepath.Join(dir, name+".json"), v); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "report.html"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(page.Execute(f, shown), f.Close())
}

// Table is figures as Markdown.
func Table(figures []Figure) string {
	var b strings.Builder
	b.WriteString("| what | Dormouse | bare | figure | target | |\n|---|---|---|---|---|---|\n")
	for _, f := range figures {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", f.What, f.Product, f.Bare, f.Measured(), f.Target(), f.Verdict())
	}
	return b.String()
}
