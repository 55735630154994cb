package app

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

type metrics struct {
	leading, suspended   prometheus.Gauge
	generations, repairs prometheus.Counter
	renewals             *prometheus.CounterVec

	ended   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	ready   prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		leading: prometheus.NewGauge(prometheus.GaugeOpts{Name: "dormouse_coordinator_leading", Help: "1 while this coordinator leads."}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dormouse_operations_ended_total",
			Help: "Operations that ended, by kind and reason of failure (empty: succeeded)."}, []string{"kind", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dormouse_operation_seconds",
			Help: "Time from acceptance to the end of operations that succeeded, by kind.", Buckets: prometheus.ExponentialBuckets(0.005, 2, 16)}, []string{"kind"}),
	}
	m.ready = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dormouse_snapshot_publish_seconds",
		Help:    "Time from a node's report that a snapshot's artefact is there until the snapshot was Ready in the catalog.",
		Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60}})
	m.suspended = prometheus.NewGauge(prometheus.GaugeOpts{Name: "dormouse_catalog_suspended", Help: "1 while this coordinator leads and the catalog takes no writes."})
	m.generations = prometheus.NewCounter(prometheus.CounterOpts{Name: "dormouse_catalog_servers_replaced_total", Help: "Times that the catalog's server was another process than before."})
	m.repairs = prometheus.NewCounter(prometheus.CounterOpts{Name: "dormouse_catalog_repairs_total", Help: "Times that the catalog was rebuilt from the nodes' journals."})
	m.renewals = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dormouse_catalog_log_rewrites_total",
		Help: "Times that this coordinator had a started server write its log anew before it wrote to it, by outcome: done or failed."}, []string{"outcome"})
	r.MustRegister(m.suspended, m.generations, m.repairs, m.renewals, m.leading, m.ended, m.seconds, m.ready)
	return m
}

func (m *metrics) operation(kind operations.Kind, reason errs.Reason, took time.Duration) {
	m.ended.WithLabelValues(string(kind), string(reason)).Inc()
	if reason == "" {
		m.seconds.WithLabelValues(string(kind)).Observe(took.Seconds())
	}
}

func (m *metrics) renewed(err error) {
	outcome := "done"
	if err != nil {
		outcome = "failed"
	}
	m.renewals.WithLabelValues(outcome).Inc()
}

// catalog tells of the catalog when it is asked; what the store itself knows is asked of it, within statusTime.
func (m *metrics) catalog(r prometheus.Registerer, a *App) { r.MustRegister(&catalogCollector{a}) }

// statusTime bounds what one scrape waits for the store.
const statusTime = 2 * time.Second

var (
	seqDesc      = prometheus.NewDesc("dormouse_catalog_sequence", "Commits in the catalog's history.", nil, nil)
	tombDesc     = prometheus.NewDesc("dormouse_catalog_tombstones", "Traces of what was deleted.", nil, nil)
	lagDesc      = prometheus.NewDesc("dormouse_catalog_journal_lag_commits", "How many commits the journal of the node that is furthest behind lacks, of those online.", nil, nil)
	pendingDesc  = prometheus.NewDesc("dormouse_catalog_deletions_pending", "Deletions that were accepted and have not ended, by kind of object.", []string{"kind"}, nil)
	activeDesc   = prometheus.NewDesc("dormouse_catalog_deletions_active", "Of the pending deletions, those in their turn at a node.", []string{"kind"}, nil)
	oldestDesc   = prometheus.NewDesc("dormouse_catalog_deletions_oldest_seconds", "Age of the oldest pending deletion; 0 without one.", []string{"kind"}, nil)
	heldDesc     = prometheus.NewDesc("dormouse_catalog_orphans_held", "What nodes hold that no record names, and that nothing proves to be deleted.", nil, nil)
	removedDesc  = prometheus.NewDesc("dormouse_catalog_orphans_removed", "Orphans that were removed since this coordinator began to lead.", nil, nil)
	unreadDesc   = prometheus.NewDesc("dormouse_catalog_orphans_unread_nodes", "Nodes whose last look for orphans failed.", nil, nil)
	catalogDescs = []*prometheus.Desc{seqDesc, tombDesc, lagDesc, pendingDesc, activeDesc, oldestDesc, heldDesc, removedDesc, unreadDesc}
)

// catalogCollector has figures on the leader only: others would show old ones.
type catalogCollector struct{ *App }

func (c *catalogCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range catalogDescs {
		descs <- d
	}
}

func (c *catalogCollector) Collect(metrics chan<- prometheus.Metric) {
	e := c.engine.Load()
	if e == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, d := range e.Deletions() {
		gauge(pendingDesc, float64(d.Pending), string(d.Kind))
		gauge(activeDesc, float64(d.Active), string(d.Kind))
		age := 0.0
		if !d.Oldest.IsZero() {
			age = max(time.Since(d.Oldest).Seconds(), 0)
		}
		gauge(oldestDesc, age, string(d.Kind))
	}
	removed, held, unread := c.registry.Orphans()
	gauge(removedDesc, float64(removed))
	gauge(heldDesc, float64(held))
	gauge(unreadDesc, float64(unread))
	ctx, cancel := context.WithTimeout(context.Background(), statusTime)
	defer cancel()
	st, err := c.store.Status(ctx)
	if err != nil {
		return // the store is away: readiness says so
	}
	gauge(seqDesc, float64(st.Seq))
	gauge(tombDesc, float64(st.Tombstones))
	lag := uint64(0)
	for _, v := range c.registry.Views() {
		switch {
		case !v.Online:
		case v.Journal.Incarnation != st.Incarnation:
			lag = max(lag, st.Seq)
		case v.Journal.Seq < st.Seq:
			lag = max(lag, st.Seq-v.Journal.Seq)
		}
	}
	gauge(lagDesc, float64(lag))
}

// nodes counts nodes when it is asked.
func (m *metrics) nodes(r prometheus.Registerer, registry *sessions.Registry) {
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dormouse_nodes_online", Help: "Nodes with a session."}, func() float64 {
		n := 0.0
		for _, v := range registry.Nodes() {
			if v.Online {
				n++
			}
		}
		return n
	}))
}
