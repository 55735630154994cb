// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/dormouse-run/dormouse/test/report"
)

//go:embed report.html.tmpl
var reportText string

var reportPage = report.Page(reportText, template.FuncMap{
	"ms": ms, "size": size, "throughput": PhaseSummary.throughput,
	"seconds": func(v float64) string { return fmt.Sprintf("%.1f s", v/1000) },
})

// writeReport writes summary.json and report.html into the folder of the run. The page needs nothing else.
func writeReport(dir string, s Summary) error {
	page := struct {
		Summary
		Why    []string
		Charts []template.HTML
	}{Summary: s, Why: s.Failed()}
	for _, draw := range []func(Summary) (*plot.Plot, error){shares, timeline, memoryOverTime} {
		p, err := draw(s)
		if err != nil {
			return fmt.Errorf("draw the report: %w", err)
		}
		svg, err := picture(p)
		if err != nil {
			return fmt.Errorf("draw the report: %w", err)
		}
		page.Charts = append(page.Charts, svg)
	}
	return report.Write(dir, "summary", s, reportPage, page)
}

// Publish keeps the summary where others see it: as NAME.json and NAME.md.
func (s Summary) Publish(name string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s: %d subjects of %d MiB heap and %d MiB file\n\n", s.Plan.Name, s.Plan.Subjects, s.Plan.HeapMiB, s.Plan.FileMiB)
	fmt.Fprintf(&b, "%s, %d rounds, %s in all. ", report.Day(s.Began), s.Plan.Rounds, s.Duration())
	if why := s.Failed(); len(why) > 0 {
		fmt.Fprintf(&b, "**It failed**: %s.\n", strings.Join(why, "; "))
	} else {
		b.WriteString("A tested waterline: every step of every subject succeeded, and nothing was left. It is not a maximum.\n")
	}
	if len(s.Figures) > 0 {
		b.WriteString("\n" + report.Table(s.Figures))
	}
	b.WriteString("\n```\n" + s.String() + "```\n")
	return report.Publish(filepath.Dir(name), filepath.Base(name), s, b.String())
}

func picture(p *plot.Plot) (template.HTML, error) {
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	canvas := vgsvg.New(24*vg.Centimeter, 10*vg.Centimeter)
	p.Draw(draw.New(canvas))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return "", err
	}
	_, svg, found := bytes.Cut(b.Bytes(), []byte("<svg"))
	if !found {
		return "", errors.New("the picture has no svg element")
	}
	return template.HTML("<svg" + string(svg)), nil //nolint:gosec // made here, of numbers and of names of phases
}

// charted are the phases that the charts show.
var charted = []Phase{Create, Checkpoint, Restore, Prove}

// stepsOf gives the steps of a phase that succeeded.
func (s Summary) stepsOf(p Phase) []Event {
	var all []Event
	for _, e := range s.steps {
		if e.Phase == p && e.Error == "" {
			all = append(all, e)
		}
	}
	return all
}

// shares is how many of the steps of each phase were done within a time.
func shares(s Summary) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = "share of the subjects that were done within a time", "seconds from the call", "%"
	for i, phase := range charted {
		all := s.stepsOf(phase)
		slices.SortFunc(all, func(a, b Event) int { return cmp.Compare(a.Call, b.Call) })
		points := make(plotter.XYs, len(all))
		for j, e := range all {
			points[j] = plotter.XY{X: e.Call / 1000, Y: 100 * float64(j+1) / float64(len(all))}
		}
		if err := addLine(p, string(phase), i, points); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// timeline is when each step ended, and how long it had taken.
func timeline(s Summary) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = "each step: when it ended, and how long it took", "seconds from the beginning of the run", "seconds"
	for i, phase := range charted {
		all := s.stepsOf(phase)
		if len(all) == 0 {
			continue
		}
		points := make(plotter.XYs, len(all))
		for j, e := range all {
			points[j] = plotter.XY{X: e.At.Sub(s.Began).Seconds(), Y: e.Call / 1000}
		}
		dots, err := plotter.NewScatter(points)
		if err != nil {
			return nil, err
		}
		dots.Color, dots.Shape, dots.Radius = plotutil.Color(i), draw.CircleGlyph{}, vg.Points(1)
		p.Add(dots)
		p.Legend.Add(string(phase), dots)
	}
	return p, nil
}

// memoryOverTime is what each part took.
func memoryOverTime(s Summary) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = "memory", "seconds from the beginning of the run", "GiB"
	series := map[string]plotter.XYs{}
	for _, l := range s.samples {
		at := l.At.Sub(s.Began).Seconds()
		for name, n := range l.Resident {
			series[name] = append(series[name], plotter.XY{X: at, Y: float64(n) / (1 << 30)})
		}
		series["available"] = append(series["available"], plotter.XY{X: at, Y: float64(l.Available) / (1 << 30)})
	}
	for i, name := range slices.Sorted(maps.Keys(series)) {
		if err := addLine(p, name, i, series[name]); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func addLine(p *plot.Plot, name string, i int, points plotter.XYs) error {
	if len(points) == 0 {
		return nil
	}
	line, err := plotter.NewLine(points)
	if err != nil {
		return err
	}
	line.Color = plotutil.Color(i)
	p.Add(line)
	p.Legend.Add(name, line)
	return nil
}

// Duration of the run's phases.
func (s Summary) Duration() time.Duration {
	var all float64
	for _, p := range s.Phases {
		all += p.TookMS
	}
	return time.Duration(all * float64(time.Millisecond)).Round(time.Second)
}
