// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dormouse-run/dormouse/test/report"
)

// Distribution of times in milliseconds.
type Distribution struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// distribution takes the nearest rank, so that each figure is one that was measured.
func distribution(all []float64) Distribution {
	if len(all) == 0 {
		return Distribution{}
	}
	sorted := slices.Sorted(slices.Values(all))
	at := func(q float64) float64 { return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)] }
	return Distribution{P50: at(0.50), P95: at(0.95), P99: at(0.99), Max: sorted[len(sorted)-1]}
}

// PhaseSummary is what came of a phase.
type PhaseSummary struct {
	Phase  Phase     `json:"phase"`
	Round  int       `json:"round"`
	Began  time.Time `json:"began"`
	TookMS float64   `json:"took_ms"`
	Done   int       `json:"done"`
	Failed int       `json:"failed"`
	// Rate is how many were done in a second.
	Rate   float64      `json:"rate"`
	Call   Distribution `json:"call_ms"`
	Wall   Distribution `json:"wall_ms"`
	Freeze Distribution `json:"freeze_ms,omitzero"`
	// Queue is the wait for a turn on the node, Service the node's work, and Apart all that a call took but for its wait.
	Queue   Distribution `json:"queue_ms,omitzero"`
	Service Distribution `json:"service_ms,omitzero"`
	Apart   Distribution `json:"apart_ms,omitzero"`
	// Get is what reading a sandbox took meanwhile.
	Get   Distribution `json:"get_ms,omitzero"`
	Bytes int64        `json:"bytes,omitempty"`
}

// String is the phase on one line.
func (p PhaseSummary) String() string {
	text := fmt.Sprintf("%s round %d: %d done, %d failed in %s (%.1f/s), p50 %s, p95 %s, p99 %s, max %s", p.Phase, p.Round, p.Done, p.Failed,
		ms(p.TookMS), p.Rate, ms(p.Call.P50), ms(p.Call.P95), ms(p.Call.P99), ms(p.Call.Max))
	if p.Bytes > 0 {
		text += fmt.Sprintf("; %.0f MB/s, freeze p50 %s, p99 %s", p.throughput(), ms(p.Freeze.P50), ms(p.Freeze.P99))
	}
	return text
}

// throughput in MB (10^6 bytes) a second.
func (p PhaseSummary) throughput() float64 { return float64(p.Bytes) / 1e3 / p.TookMS }

// FloorRow is a rate of the product beside that of bare runsc at its best width.
type FloorRow struct {
	What    string  `json:"what"`
	Product float64 `json:"product"`
	Bare    float64 `json:"bare"`
	Width   int     `json:"width"`
	Target  float64 `json:"target"`
}

// Ratio of the two.
func (f FloorRow) Ratio() float64 { return f.Product / f.Bare }

// String is the row on one line.
func (f FloorRow) String() string {
	return fmt.Sprintf("%s: %.1f/s, bare runsc %.1f/s (%d at a time): %.2f x (at least %.2f)", f.What, f.Product, f.Bare, f.Width, f.Ratio(), f.Target)
}

// Publications are the snapshots of a run, from their node's report until they were Ready in the catalog.
type Publications struct {
	Count uint64   `json:"count"`
	Limit Duration `json:"limit"`
	Share float64  `json:"share"` // of those that took no longer than Limit
}

// Summary of a run.
type Summary struct {
	Identity
	Interrupted bool           `json:"interrupted"`
	Phases      []PhaseSummary `json:"phases"`
	// Failures are the first of the events that failed; Attempts counts the failed tries of calls by phase and reason.
	Failures []Event        `json:"failures"`
	Attempts map[string]int `json:"attempts"`
	// Peak is the most that each part took, in bytes; Least what the kernel could still give at the worst moment.
	Peak     map[string]int64 `json:"peak"`
	Least    int64            `json:"least_available"`
	Tasks    int              `json:"most_tasks"`
	OOMKills int64            `json:"oom_kills"`
	// Executables are the digests of what ran.
	Executables map[string]string `json:"executables"`
	// Lost is what was acknowledged and was not there after the last round.
	Lost         []string     `json:"lost"`
	Debt         []string     `json:"debt"`
	Floor        []FloorRow   `json:"floor"`
	Disk         *DiskFloor   `json:"disk,omitempty"`
	Publications Publications `json:"publications,omitzero"`
	// Figures are what was measured beside the plan's targets.
	Figures []report.Figure `json:"figures"`

	samples []Sample
	steps   []Event
}

func (r *Recorder) summary() Summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Summary{Identity: r.who, Phases: r.all, Failures: r.fails, Attempts: r.tries, Peak: map[string]int64{}, Executables: r.parts, Lost: r.lost, Debt: r.debt, Publications: r.published,
		Floor: r.floor, Disk: r.disk, samples: r.looked, steps: r.steps}
	for i, l := range r.looked {
		for name, n := range l.Resident {
			s.Peak[name] = max(s.Peak[name], n)
		}
		if i == 0 || l.Available < s.Least {
			s.Least = l.Available
		}
		s.Tasks, s.OOMKills = max(s.Tasks, l.Tasks), l.OOMKills-r.oomAt
	}
	s.Figures = s.figures()
	return s
}

// Failed says why the run does not count as passed; empty if it does.
func (s Summary) Failed() []string {
	var why []string
	if s.Interrupted {
		why = append(why, "the run was interrupted")
	}
	want := len(phases(s.Plan))
	if len(s.Phases) != want {
		why = append(why, fmt.Sprintf("%d of %d phases were run", len(s.Phases), want))
	}
	for _, p := range s.Phases {
		if p.Failed > 0 || p.Done != s.Plan.Subjects {
			why = append(why, fmt.Sprintf("%s, round %d: %d of %d done, %d failed", p.Phase, p.Round, p.Done, s.Plan.Subjects, p.Failed))
		}
	}
	if s.OOMKills > 0 {
		why = append(why, fmt.Sprintf("%d processes were killed for memory", s.OOMKills))
	}
	if len(s.Lost) > 0 {
		why = append(why, fmt.Sprintf("lost updates: %d", len(s.Lost)))
	}
	if len(s.Debt) > 0 {
		why = append(why, fmt.Sprintf("cleanup debt: %d", len(s.Debt)))
	}
	return why
}

// Count is how many steps of a kind were done in all rounds.
func (s Summary) Count(p Phase) (done int) {
	for _, x := range s.Phases {
		if x.Phase == p {
			done += x.Done
		}
	}
	return done
}

// ms writes a time of so many milliseconds.
func ms(v float64) string {
	switch {
	case v >= 10_000:
		return fmt.Sprintf("%.1f s", v/1000)
	case v >= 1000:
		return fmt.Sprintf("%.2f s", v/1000)
	}
	return fmt.Sprintf("%.0f ms", v)
}

// String is the summary for people.
func (s Summary) String() string {
	var b strings.Builder
	p := s.Plan
	fmt.Fprintf(&b, "%s: %d subjects of %d MiB heap + %d MiB file, %d rounds, %d clients, seed %d\n\n", p.Name, p.Subjects, p.HeapMiB, p.FileMiB, p.Rounds, p.Clients, p.Seed)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "phase\tround\tdone\tfailed\twall\trate\tp50\tp95\tp99\tmax\tGet p99\t")
	for _, x := range s.Phases {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%.1f/s\t%s\t%s\t%s\t%s\t%s\t\n", x.Phase, x.Round, x.Done, x.Failed, ms(x.TookMS), x.Rate, ms(x.Call.P50), ms(x.Call.P95), ms(x.Call.P99), ms(x.Call.Max), ms(x.Get.P99))
	}
	_ = t.Flush() // to memory
	for _, x := range s.Phases {
		if x.Bytes > 0 {
			fmt.Fprintf(&b, "checkpoint, round %d: %.0f MB/s, freeze p50 %s, p99 %s\n", x.Round, x.throughput(), ms(x.Freeze.P50), ms(x.Freeze.P99))
		}
	}
	for _, x := range s.Phases {
		if x.Service.Max > 0 {
			fmt.Fprintf(&b, "%s, round %d: waited for its turn p50 %s, p99 %s; worked at p50 %s, p99 %s; all but the wait p50 %s, p99 %s\n", x.Phase, x.Round,
				ms(x.Queue.P50), ms(x.Queue.P99), ms(x.Service.P50), ms(x.Service.P99), ms(x.Apart.P50), ms(x.Apart.P99))
		}
	}
	for _, f := range s.Figures {
		fmt.Fprintln(&b, f)
	}
	if len(s.Peak) > 0 {
		fmt.Fprintf(&b, "most memory: %s at the least; %d threads; killed for memory: %d\n", memory(Sample{Resident: s.Peak, Available: s.Least}), s.Tasks, s.OOMKills)
	}
	for what, n := range s.Attempts {
		fmt.Fprintf(&b, "failed tries of calls, %s: %d\n", what, n)
	}
	fmt.Fprintf(&b, "lost updates: %d; cleanup debt: %d\n", len(s.Lost), len(s.Debt))
	for _, d := range append(s.Lost, s.Debt...) {
		fmt.Fprintf(&b, "  %s\n", d)
	}
	why := s.Failed()
	for _, w := range why {
		fmt.Fprintf(&b, "FAILED: %s\n", w)
	}
	for _, e := range s.Failures {
		if e.What == "step" {
			fmt.Fprintf(&b, "  subject %d, %s round %d: %s\n", e.Subject, e.Phase, e.Round, e.Error)
		}
	}
	if len(why) == 0 {
		fmt.Fprintf(&b, "tested waterline: %d subjects; %d checkpoints, %d restores, %d proofs, no failure\n", p.Subjects, s.Count(Checkpoint), s.Count(Restore), s.Count(Prove))
	}
	return b.String()
}
