package app

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

type metrics struct {
	leading prometheus.Gauge
	ended   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		leading: prometheus.NewGauge(prometheus.GaugeOpts{Name: "dormouse_coordinator_leading", Help: "1 while this coordinator leads."}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dormouse_operations_ended_total",
			Help: "Operations that ended, by kind and reason of failure (empty: succeeded)."}, []string{"kind", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dormouse_operation_seconds",
			Help: "Time from acceptance to the end of operations that succeeded, by kind.", Buckets: prometheus.ExponentialBuckets(0.005, 2, 16)}, []string{"kind"}),
	}
	r.MustRegister(m.leading, m.ended, m.seconds)
	return m
}

func (m *metrics) operation(kind operations.Kind, reason errs.Reason, took time.Duration) {
	m.ended.WithLabelValues(string(kind), string(reason)).Inc()
	if reason == "" {
		m.seconds.WithLabelValues(string(kind)).Observe(took.Seconds())
	}
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
