package admin

import (
	"context"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

var (
	descVerdict = prometheus.NewDesc("steelyard_verdict",
		"The verdict of steelyard status: 0 for OK, 1 for DEGRADED, 2 for DOWN.", nil, nil)
	descFindings = prometheus.NewDesc("steelyard_findings",
		"Current findings of steelyard status, by the codes of docs/findings.md.", []string{"code", "severity"}, nil)
	descBuild = prometheus.NewDesc("steelyard_build_info",
		"1, with the version of the agent.", []string{"version"}, nil)
	descReload = prometheus.NewDesc("steelyard_config_last_reload_successful",
		"0 if the last reload of the configuration was rejected, otherwise 1.", nil, nil)
	descDrained = prometheus.NewDesc("steelyard_drained", "Frontends that an operator has drained.", nil, nil)
)

// FindingMetrics is a prometheus.Collector for the verdict and the findings of "steelyard status".
type FindingMetrics struct {
	info func(context.Context) (Info, error)
}

// NewFindingMetrics returns a collector that calls info at each scrape.
func NewFindingMetrics(info func(context.Context) (Info, error)) *FindingMetrics {
	return &FindingMetrics{info}
}

// Describe implements prometheus.Collector.
func (m *FindingMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descVerdict, descFindings, descBuild, descReload, descDrained} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It exports nothing if the engine does not respond in time.
func (m *FindingMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	i, err := m.info(ctx)
	if err != nil {
		return
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(descVerdict, slices.Index(Verdicts, i.Verdict))
	gauge(descBuild, 1, i.Version)
	gauge(descReload, one(i.LoadError == ""))
	gauge(descDrained, i.DrainedServices)
	type row struct {
		code     string
		severity lb.Severity
	}
	rows := map[row]int{}
	for _, f := range i.Findings {
		rows[row{f.Code, f.Severity}]++
	}
	for r, n := range rows {
		gauge(descFindings, n, r.code, string(r.severity))
	}
}

// Headline returns the first line of "steelyard status": the verdict and the most severe reason.
func (i *Info) Headline() string {
	if len(i.Reasons) == 0 {
		for _, f := range i.Findings {
			if f.Code == lb.FoundNoPackets.Code { // nobody here can tell whether clients fail
				return string(i.Verdict) + ", but " + f.Text
			}
		}
		return string(i.Verdict)
	}
	return string(i.Verdict) + ": " + i.Reasons[0]
}
