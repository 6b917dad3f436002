package healthd

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts probes by service: backends come and go too often to be labels.
type metrics struct {
	probes   *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "steelyard_health_probes_total", Help: "Probes of the backends of a service, by result: ok or failed.",
		}, []string{"service", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "steelyard_health_probe_duration_seconds", Help: "How long a probe of a backend of a service took.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8),
		}, []string{"service"}),
	}
	if r != nil {
		r.MustRegister(m.probes, m.duration)
	}
	return m
}

func (m *metrics) observe(service string, took time.Duration, well bool) {
	result := "failed"
	if well {
		result = "ok"
	}
	m.probes.WithLabelValues(service, result).Inc()
	m.duration.WithLabelValues(service).Observe(took.Seconds())
}

// forget removes the series of a service that is gone.
func (m *metrics) forget(service string) {
	m.probes.DeletePartialMatch(prometheus.Labels{"service": service})
	m.duration.DeletePartialMatch(prometheus.Labels{"service": service})
}
