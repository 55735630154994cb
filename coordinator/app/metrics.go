package app

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

type metrics struct {
	leading, suspended   prometheus.Gauge
	generations, repairs prometheus.Counter

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
	m.suspended = prometheus.NewGauge(prometheus.GaugeOpts{Name: "dormouse_catalog_suspended", Help: "1 while this coordinator leads and the catalog takes no writes."})
	m.generations = prometheus.NewCounter(prometheus.CounterOpts{Name: "dormouse_catalog_servers_replaced_total", Help: "Times that the catalog's server was another process than before."})
	m.repairs = prometheus.NewCounter(prometheus.CounterOpts{Name: "dormouse_catalog_repairs_total", Help: "Times that the catalog was rebuilt from the nodes' journals."})
	r.MustRegister(m.suspended, m.generations, m.repairs, m.leading, m.ended, m.seconds)
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
