package app

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// stepTimes makes the histogram of the runner's steps: by verb, step and outcome, never by id.
func (a *App) stepTimes() func(verb, step string, took time.Duration, err error) {
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "dormouse_agentd_step_seconds", Help: "Time of each step of a start, restore, capture, resume or claim; the wait for a turn is the step queue.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18)}, []string{"verb", "step", "outcome"})
	a.metrics.MustRegister(seconds)
	return func(verb, step string, took time.Duration, err error) {
		outcome := "ok"
		if err != nil {
			outcome = string(errs.ReasonOf(err))
		}
		seconds.WithLabelValues(verb, step, outcome).Observe(took.Seconds())
	}
}

// collector reads the records when it is scraped.
type collector struct {
	state     *nodestate.Store
	boxes     *prometheus.Desc
	snapshots *prometheus.Desc
	bytes     *prometheus.Desc
	parked    *prometheus.Desc
	held      *prometheus.Desc
	session   *prometheus.Desc
	connected func() bool
	// memory is what a sandbox takes of it.
	memory func(uid string) (int64, error)
}

// measure registers what is read at each scrape.
func (a *App) measure(context.Context) error {
	return a.metrics.Register(&collector{
		state:     a.state,
		boxes:     prometheus.NewDesc("dormouse_agentd_sandboxes", "Sandboxes on the node, by phase.", []string{"phase"}, nil),
		snapshots: prometheus.NewDesc("dormouse_agentd_snapshots", "Artefacts on the node, by state.", []string{"state"}, nil),
		bytes:     prometheus.NewDesc("dormouse_agentd_snapshot_bytes", "Bytes of all artefacts.", nil, nil),
		parked:    prometheus.NewDesc("dormouse_agentd_parked_sandboxes", "Sandboxes that stand ready to be claimed.", nil, nil),
		held:      prometheus.NewDesc("dormouse_agentd_parked_bytes", "Memory of the sandboxes that stand ready to be claimed, page cache not counted.", nil, nil),
		session:   prometheus.NewDesc("dormouse_agentd_session", "1 while the node has a session with the coordinator.", nil, nil),
		connected: a.session.Connected,
		memory:    figures{a.groups}.UsedBy,
	})
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.boxes, c.snapshots, c.bytes, c.parked, c.held, c.session} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	connected := 0.0
	if c.connected() {
		connected = 1
	}
	ch <- prometheus.MustNewConstMetric(c.session, prometheus.GaugeValue, connected)
	boxes, err := c.state.Sandboxes()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(c.boxes, err)
		return
	}
	phases := make(map[sandbox.Phase]int)
	var parked, held int64
	for _, b := range boxes {
		phases[b.Phase]++
		if b.Parked && b.Phase == sandbox.Paused {
			parked++
			if used, err := c.memory(b.UID); err == nil { // else it is just going
				held += used
			}
		}
	}
	ch <- prometheus.MustNewConstMetric(c.parked, prometheus.GaugeValue, float64(parked))
	ch <- prometheus.MustNewConstMetric(c.held, prometheus.GaugeValue, float64(held))
	for _, p := range sandbox.Phases() {
		ch <- prometheus.MustNewConstMetric(c.boxes, prometheus.GaugeValue, float64(phases[p]), string(p))
	}
	snaps, err := c.state.Snapshots()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(c.snapshots, err)
		return
	}
	states := make(map[nodestate.SnapshotState]int)
	var bytes int64
	for _, s := range snaps {
		states[s.State]++
		bytes += s.Status.SizeBytes
	}
	for _, st := range []nodestate.SnapshotState{nodestate.SnapshotSaving, nodestate.SnapshotReady, nodestate.SnapshotDeleting} {
		ch <- prometheus.MustNewConstMetric(c.snapshots, prometheus.GaugeValue, float64(states[st]), string(st))
	}
	ch <- prometheus.MustNewConstMetric(c.bytes, prometheus.GaugeValue, float64(bytes))
}
