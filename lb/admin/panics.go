package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

var descPanics = prometheus.NewDesc("steelyard_panics_total",
	"Panics while handling objects from outside; each affected only one object.", []string{"part"}, nil)

// PanicMetrics is a prometheus.Collector of a boundary's panics.
type PanicMetrics struct{ boundary *lb.Boundary }

// NewPanicMetrics returns a collector of the panics inside a boundary.
func NewPanicMetrics(b *lb.Boundary) *PanicMetrics { return &PanicMetrics{b} }

// Describe implements prometheus.Collector.
func (m *PanicMetrics) Describe(ch chan<- *prometheus.Desc) { ch <- descPanics }

// Collect implements prometheus.Collector.
func (m *PanicMetrics) Collect(ch chan<- prometheus.Metric) {
	panics := m.boundary.Panics()
	for _, part := range lb.Parts {
		n := float64(panics[part])
		ch <- prometheus.MustNewConstMetric(descPanics, prometheus.CounterValue, n, string(part))
	}
}
