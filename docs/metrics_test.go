// Package docs has the pages for users, and tests that compare generated pages with the code.
package docs

import (
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/inside"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var update = flag.Bool("update", false, "rewrite docs/metrics.md")

// metric describes one metric of a collector.
type metric struct {
	name, help string
	labels     []string
}

// kind derives the type from the name's suffix, which TestMetricNames checks.
func (m metric) kind() dto.MetricType {
	switch {
	case strings.HasSuffix(m.name, "_total"):
		return dto.MetricType_COUNTER
	case strings.HasSuffix(m.name, "_duration_seconds"), strings.HasSuffix(m.name, "_handshake_seconds"):
		return dto.MetricType_HISTOGRAM
	}
	return dto.MetricType_GAUGE
}

// registry is a prometheus.Registerer that records the registered collectors.
type registry struct{ all []prometheus.Collector }

func (r *registry) Register(c prometheus.Collector) error   { r.all = append(r.all, c); return nil }
func (r *registry) Unregister(prometheus.Collector) bool    { return false }
func (r *registry) MustRegister(cs ...prometheus.Collector) { r.all = append(r.all, cs...) }

// collectors returns the collectors of every part of the agent. Describe needs neither privileges nor a running agent.
func collectors(t *testing.T) []prometheus.Collector {
	t.Helper()
	var r registry
	healthd.New(healthd.Options{Registerer: &r, Log: slog.New(slog.DiscardHandler)})
	onLink := must.Get(l2.New(l2.Options{Interfaces: []string{"eth0"}, Log: slog.New(slog.DiscardHandler)}))(t)
	r.MustRegister((*datapath.Datapath)(nil), (*inside.Inside)(nil), kube.NewRuleMetrics(), (*bgp.Speaker)(nil), onLink)
	r.MustRegister(admin.NewCallMetrics(), admin.NewStateMetrics(nil, nil), admin.NewPanicMetrics(nil))
	r.MustRegister(admin.NewFindingMetrics(nil))
	return r.all
}

var described = regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), help: ("(?:[^"\\]|\\.)*"), (?:unit: "", )?` +
	`constLabels: \{\}, variableLabels: \{(.*)\}\}$`)

// metrics returns the metrics of all collectors, by name.
func metrics(t *testing.T) []metric {
	t.Helper()
	var all []metric
	for _, c := range collectors(t) {
		descs := make(chan *prometheus.Desc, 100)
		c.Describe(descs)
		close(descs)
		for d := range descs {
			m := described.FindStringSubmatch(d.String())
			must.Need(t, m != nil, "cannot read %s", d)
			var x metric
			x.name, _ = strconv.Unquote(m[1])
			x.help, _ = strconv.Unquote(m[2])
			if m[3] != "" {
				x.labels = strings.Split(m[3], ",")
			}
			all = append(all, x)
		}
	}
	slices.SortFunc(all, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return all
}

// The page has every metric of the collectors.
func TestMetricsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Metrics\n\n" +
		"The agent serves these metrics at `GET /metrics` on the admin socket and on `admin.listen`, in Prometheus'\n" +
		"text format. Metrics of the Go runtime and of the process (`go_*`, `process_*`) are included.\n" +
		"[Reasons](reasons.md) lists the values of the label `reason`.\n\n" +
		"| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, m := range metrics(t) {
		labels := "none"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "` `") + "`"
		}
		fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", m.name, strings.ToLower(m.kind().String()), labels, m.help)
	}
	if *update {
		must.Do(t, os.WriteFile("metrics.md", []byte(page.String()), 0o644))
	}
	must.Equal(t, page.String(), string(must.Get(os.ReadFile("metrics.md"))(t)))
}

// Names and help texts follow Prometheus' conventions.
func TestMetricNames(t *testing.T) {
	var families []*dto.MetricFamily
	for _, m := range metrics(t) {
		f := &dto.MetricFamily{Name: &m.name, Help: &m.help, Type: m.kind().Enum(), Metric: []*dto.Metric{{}}}
		for _, l := range m.labels {
			f.Metric[0].Label = append(f.Metric[0].Label, &dto.LabelPair{Name: &l})
		}
		families = append(families, f)
	}
	problems := must.Get(promlint.NewWithMetricFamilies(families).Lint())(t)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

var (
	metricName = regexp.MustCompile(`\bsteelyard_(?:announce|bgp|datapath|engine|health|l2|proxy)_[a-z0-9_]*[a-z0-9]`)
	histogram  = regexp.MustCompile(`_seconds_(bucket|sum|count)$`)
)

// Every metric named in code, tests or pages belongs to one of these collectors.
func TestNamedMetricsExist(t *testing.T) {
	known := map[string]bool{}
	for _, m := range metrics(t) {
		known[m.name] = true
	}
	must.Do(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != ".." {
			if err == nil {
				err = filepath.SkipDir
			}
			return err
		}
		// The changelog has the names from earlier versions.
		ext := filepath.Ext(path)
		if d.IsDir() || d.Name() == "CHANGELOG.md" || !slices.Contains([]string{".go", ".html", ".js", ".md"}, ext) {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, name := range metricName.FindAllString(string(text), -1) {
			must.True(t, known[histogram.ReplaceAllString(name, "_seconds")],
				"%s names the metric %s, which no collector has", path, name)
		}
		return nil
	}))
}
