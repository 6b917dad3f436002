package healthd

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts probes per service. Backends are not a label, because they change too often.
type metrics struct {
	probes   *prometheus.CounterVec
	duration *prometheus.HistogramVec
	flaps    *prometheus.CounterVec
	late     prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "steelyard_health_probes_total",
			Help: "Probes of backends by result: ok, failed or inconclusive.",
		}, []string{"service", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "steelyard_health_probe_duration_seconds",
			Help:    "Duration of the probes of the backends of a service.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8),
		}, []string{"service"}),
		flaps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "steelyard_flaps_total", Help: "How often backends of a service became unhealthy.",
		}, []string{"service"}),
		late: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "steelyard_health_probes_late_total",
			Help: "Probes that started late by more than a tenth of their interval, because too many were running.",
		}),
	}
	if r != nil {
		r.MustRegister(m.probes, m.duration, m.flaps, m.late)
	}
	return m
}

func (m *metrics) observe(service string, took time.Duration, ok bool) {
	result := "failed"
	if ok {
		result = "ok"
	}
	m.probes.WithLabelValues(service, result).Inc()
	m.duration.WithLabelValues(service).Observe(took.Seconds())
}

// forget removes the series of a deleted service.
func (m *metrics) forget(service string) {
	m.probes.DeletePartialMatch(prometheus.Labels{"service": service})
	m.duration.DeletePartialMatch(prometheus.Labels{"service": service})
	m.flaps.DeletePartialMatch(prometheus.Labels{"service": service})
}
