package publish

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	depth, unknown    prometheus.Gauge
	batch, seconds    prometheus.Histogram
	whole             prometheus.Histogram
	applied, rebuilds prometheus.Counter
	refused, settled  *prometheus.CounterVec
}

// newMetrics makes the collectors and registers them unless r is nil. A queue is made once in a
// process, so that a double registration is a programming error and panics.
func newMetrics(r prometheus.Registerer) *metrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "dormouse", Subsystem: "publish", Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts(opts(name, help)))
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts(opts(name, help)))
	}
	vector := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), []string{label})
	}
	m := &metrics{
		depth:   gauge("waiting", "Publications that wait for admission."),
		unknown: gauge("unknown_open", "Commits whose reply was lost and whose outcome is not settled."),
		batch: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "dormouse", Subsystem: "publish", Name: "batch_commits", Help: "Commits sent in one call.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 10),
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "dormouse", Subsystem: "publish", Name: "batch_seconds", Help: "Time of one call to the store.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
		}),
		whole: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "dormouse", Subsystem: "publish", Name: "seconds", Help: "Time from asking for admission until a commit was applied.",
			Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60},
		}),
		applied:  counter("applied_total", "Commits that were applied or replayed."),
		rebuilds: counter("rebuilds_total", "Commits that were built again after a conflict or a voided attempt."),
		refused:  vector("refused_total", "Commits that were refused, by reason.", "reason"),
		settled:  vector("settled_total", "Lost replies by what became of them: applied, void, unresolved.", "how"),
	}
	if r != nil {
		r.MustRegister(m.depth, m.unknown, m.batch, m.seconds, m.whole, m.applied, m.rebuilds, m.refused, m.settled)
	}
	return m
}
