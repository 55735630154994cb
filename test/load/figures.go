// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/test/report"
)

// DiskFloor is what a disk and bare runsc do with as many sandboxes as a batch of checkpoints has. Rates are in MB (10^6 bytes) a second.
type DiskFloor struct {
	// Bytes of all images together.
	Bytes int64 `json:"bytes"`
	// DD is "dd oflag=direct bs=1M" of as many bytes, once for each time it ran.
	DD []float64 `json:"dd"`
	// Crowd is all "runsc checkpoint" with default flags at once, until they are on the disk, as the product's are; CrowdSaid until the commands have ended.
	Crowd     float64 `json:"crowd"`
	CrowdSaid float64 `json:"crowd_said"`
	// Best is pause, checkpoint with direct writes, and resume, Width at a time, until they are on the disk: the best of some widths.
	Best  float64 `json:"best"`
	Width int     `json:"width"`
	// Digest is reading the images from the disk and digesting them, a core each. It is no part of a checkpoint.
	Digest float64 `json:"digest"`
}

func megabytes(v float64) string { return fmt.Sprintf("%.0f MB/s", v) }

// middle of some values.
func middle(all []float64) float64 { return distribution(all).P50 }

// figures are what was measured, beside the targets.
func (s Summary) figures() []report.Figure {
	var all []report.Figure
	for _, f := range s.Floor {
		all = append(all, report.Figure{What: f.What + fmt.Sprintf(", all rounds; bare runsc, %d at a time, as many resident", f.Width),
			Product: fmt.Sprintf("%.1f/s", f.Product), Bare: fmt.Sprintf("%.1f/s", f.Bare), Value: f.Ratio(), Unit: "x", AtLeast: f.Target})
	}
	all = append(all, s.diskFigures()...)
	all = append(all, s.waits()...)
	t := s.Plan.Targets
	if t.GetP99 > 0 {
		worst := s.worst(func(p PhaseSummary) float64 { return p.Get.P99 })
		all = append(all, report.Figure{What: "reading a sandbox meanwhile, p99 of the worst phase", Product: ms(worst), Value: worst, Unit: "ms", AtMost: inMS(t.GetP99)})
	}
	if p := s.Publications; p.Count > 0 {
		f := report.Figure{What: fmt.Sprintf("snapshots Ready in the catalog within %s of their node's report", time.Duration(p.Limit)), Product: fmt.Sprintf("%.2f %% of %d", 100*p.Share, p.Count), Value: 100 * p.Share, Unit: "%"}
		if t.PublishP99 == p.Limit {
			f.AtLeast = 99
		}
		all = append(all, f)
	}
	for _, m := range []struct {
		part string
		most float64
	}{{"coordinator", t.CoordinatorMiB}, {"redis", t.RedisMiB}} {
		if m.most > 0 && s.Peak[m.part] > 0 {
			all = append(all, report.Figure{What: m.part + ", the most memory", Product: size(s.Peak[m.part]), Value: float64(s.Peak[m.part]) / mib, Unit: "MiB", AtMost: m.most})
		}
	}
	return all
}

// worst of all phases.
func (s Summary) worst(of func(PhaseSummary) float64) float64 {
	var most float64
	for _, p := range s.Phases {
		most = max(most, of(p))
	}
	return most
}

func inMS(d Duration) float64 { return milliseconds(time.Duration(d)) }

// waits are the figures of freezes and restores. The worst round counts.
func (s Summary) waits() []report.Figure {
	t := s.Plan.Targets
	var all []report.Figure
	add := func(what string, value float64, most Duration) {
		if most > 0 && value > 0 {
			all = append(all, report.Figure{What: what, Product: ms(value), Value: value, Unit: "ms", AtMost: inMS(most)})
		}
	}
	of := func(phase Phase, get func(PhaseSummary) float64) float64 {
		return s.worst(func(p PhaseSummary) float64 {
			if p.Phase != phase {
				return 0
			}
			return get(p)
		})
	}
	at := fmt.Sprintf("%d at once", s.Plan.Subjects)
	add("freeze of a sandbox that is checkpointed, "+at+", p50", of(Checkpoint, func(p PhaseSummary) float64 { return p.Freeze.P50 }), t.FreezeP50)
	add("the same, p99", of(Checkpoint, func(p PhaseSummary) float64 { return p.Freeze.P99 }), t.FreezeP99)
	add("restore, "+at+": the node's work, p50", of(Restore, func(p PhaseSummary) float64 { return p.Service.P50 }), t.RestoreP50)
	add("the same as its caller sees it, but for the wait for a turn, p50", of(Restore, func(p PhaseSummary) float64 { return p.Apart.P50 }), t.RestoreP50)
	if wait := of(Restore, func(p PhaseSummary) float64 { return p.Queue.P50 }); t.RestoreP50 > 0 {
		all = append(all, report.Figure{What: "the wait for a turn, p50", Product: ms(wait), Value: wait, Unit: "ms"})
	}
	return all
}

// diskFigures are those of the throughput of checkpoints. All rounds count as one.
func (s Summary) diskFigures() []report.Figure {
	d := s.Disk
	if d == nil {
		return nil
	}
	var bytes, took float64
	for _, p := range s.Phases {
		if p.Phase == Checkpoint {
			bytes, took = bytes+float64(p.Bytes), took+p.TookMS
		}
	}
	product := bytes / 1e3 / took
	row := func(what string, bare, least float64) report.Figure {
		return report.Figure{What: what, Product: megabytes(product), Bare: megabytes(bare), Value: product / bare, Unit: "x", AtLeast: least}
	}
	return []report.Figure{
		row(fmt.Sprintf("checkpoints, save + sync throughput; bare: `dd oflag=direct bs=1M` of as many bytes, the median of %d", len(d.DD)), middle(slices.Clone(d.DD)), s.Plan.Targets.DiskRate),
		row(fmt.Sprintf("the same; bare: %d default `runsc checkpoint` at once, until they are on the disk", s.Plan.Subjects), d.Crowd, s.Plan.Targets.CrowdRate),
		row("the same; bare: until these commands have ended", d.CrowdSaid, 0),
		row(fmt.Sprintf("the same; bare: pause, checkpoint -direct, resume, %d at a time, until they are on the disk", d.Width), d.Best, 0),
		{What: "digests, which are no part of a checkpoint: reading and digesting the same files", Product: megabytes(d.Digest), Value: float64(d.Bytes) / 1e6 / d.Digest, Unit: "s"},
	}
}
