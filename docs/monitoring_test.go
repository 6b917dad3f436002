package docs

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	expression = regexp.MustCompile(`(?m)"expr": "((?:[^"\\]|\\.)*)"|^\s*expr: (.*)$`)
	ourMetric  = regexp.MustCompile(`\bsteelyard_\w+`)
	grouping   = regexp.MustCompile(`(?:by|ignoring) \(([^)]*)\)|\bignoring\((\w+)\)`)
	matcher    = regexp.MustCompile(`[{,](\w+)=`)
	finding    = regexp.MustCompile(`code=\\?"([\w-]+)`)
)

// The alerting rules and the dashboard use metrics, labels and findings that exist.
func TestMonitoringUsesWhatExists(t *testing.T) {
	labels := map[string][]string{}
	for _, m := range metrics(t) {
		labels[m.name] = append(m.labels, "instance", "job")
		if m.kind() == dto.MetricType_HISTOGRAM {
			labels[m.name+"_bucket"] = append(labels[m.name], "le")
		}
	}
	files := must.Get(filepath.Glob("monitoring/*"))(t)
	must.Equal(t, 2, len(files))
	for _, file := range files {
		found := expression.FindAllStringSubmatch(read(t, file), -1)
		must.True(t, len(found) >= 10, "%s has only %d expressions", file, len(found))
		for _, m := range found {
			expr := m[1] + m[2]
			var known []string
			for _, name := range ourMetric.FindAllString(expr, -1) {
				must.True(t, labels[name] != nil, "%s: there is no metric %s", file, name)
				known = append(known, labels[name]...)
			}
			var used []string
			for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
				used = append(used, strings.Split(m[1]+m[2], ", ")...)
			}
			for _, m := range matcher.FindAllStringSubmatch(expr, -1) {
				used = append(used, m[1])
			}
			for _, label := range used {
				must.True(t, slices.Contains(known, label) || !strings.Contains(expr, "steelyard_"),
					"%s: no metric in %s has the label %s", file, expr, label)
			}
			if code := finding.FindStringSubmatch(expr); code != nil {
				must.True(t, slices.ContainsFunc(lb.FindingKinds, func(k *lb.FindingKind) bool {
					return k.Code == code[1]
				}), "%s: there is no finding %s", file, code[1])
			}
		}
	}
}

var alert = regexp.MustCompile(`(?s)- alert: (\w+)\n\s*expr: ([^\n]*)\n.*?summary: "([^"\n]*)"`)

// The text of an alert has each label of its metric, unless the expression selects one value. Otherwise several alerts
// have the same text. A finding has one severity at a time.
func TestAlertsDiffer(t *testing.T) {
	found := alert.FindAllStringSubmatch(read(t, "monitoring/alerts.yaml"), -1)
	must.True(t, len(found) >= 10, "only %d alerts", len(found))
	for _, m := range found {
		for _, metric := range metrics(t) {
			if metric.name != ourMetric.FindString(m[2]) || strings.Contains(m[2], " by (") {
				continue
			}
			for _, label := range metric.labels {
				one := strings.Contains(m[2], label+"=") || label == "severity" && finding.MatchString(m[2])
				must.True(t, one || strings.Contains(m[3], "$labels."+label), "%s: label %s of %s", m[1], label,
					metric.name)
			}
		}
	}
}
