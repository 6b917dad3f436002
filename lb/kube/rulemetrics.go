package kube

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// RuleMetrics are the metrics of a service proxy that dashboards for kube-proxy expect (pkg/proxy/metrics/metrics.go in
// Kubernetes 1.35). They have no label ip_family, because each call applies the rules of both families.
type RuleMetrics struct {
	calls, latency   prometheus.Histogram
	applied, changed prometheus.Gauge
}

// NewRuleMetrics returns metrics of no call.
func NewRuleMetrics() *RuleMetrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Subsystem: "kubeproxy", Name: name, Help: help})
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Subsystem: "kubeproxy", Name: name, Help: help, Buckets: buckets,
		})
	}
	return &RuleMetrics{
		calls: histogram("sync_proxy_rules_duration_seconds",
			"Duration of an update of the service proxy's rules.", prometheus.ExponentialBuckets(0.001, 2, 15)),
		latency: histogram("network_programming_duration_seconds",
			"Time from a change of a Service or a pod until the service proxy's rules follow, by the clocks of this "+
				"node and of the controller of EndpointSlices.",
			slices.Concat(prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59),
				prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7))),
		applied: gauge("sync_proxy_rules_last_timestamp_seconds",
			"Unix time of the last successful update of the service proxy's rules."),
		changed: gauge("sync_proxy_rules_last_queued_timestamp_seconds",
			"Unix time of the last change of the cluster that may change the service proxy's rules."),
	}
}

func (m *RuleMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.calls, m.latency, m.applied, m.changed}
}

// Describe implements prometheus.Collector.
func (m *RuleMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *RuleMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

// observe records a call that began at start. triggers are the changes that it put in force, if it succeeded.
func (m *RuleMetrics) observe(start time.Time, err error, triggers []time.Time) {
	m.calls.Observe(time.Since(start).Seconds())
	if err != nil {
		return
	}
	m.applied.SetToCurrentTime()
	for _, t := range triggers {
		m.latency.Observe(max(0, time.Since(t).Seconds()))
	}
}

// changedAt returns when the change happened that made the controller write an EndpointSlice, or zero if it did not say
// so.
func changedAt(s *discovery.EndpointSlice) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s.Annotations[core.EndpointsLastChangeTriggerTime])
	if err != nil {
		return time.Time{}
	}
	return t
}
