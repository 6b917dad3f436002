package kube

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The rules are in force after the first success. A change that is not applied makes them late, until it is.
func TestRulesInForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(inCluster("web", "10.96.0.1", same), node("n1"))
		w, rules := proxying(t, func(o *Options) { o.Client = client })
		rules.fail(errors.New("no memory"))
		stop := w.running(t)
		defer stop()
		step := func(name string, d time.Duration, inForce bool, behind time.Time) {
			t.Helper()
			pass(d)
			must.Row(t, name, inForce, w.RulesInForce())
			must.Row(t, name+": behind", behind, w.RulesBehind())
		}
		pass(time.Second)
		since := w.RulesBehind()
		must.True(t, !since.IsZero(), "rules that were not applied are not late")
		step("nothing applied", time.Hour, false, since)
		rules.fail(nil)
		step("applied", rulesDelayMax, true, time.Time{})
		rules.fail(errors.New("full"))
		api := client.CoreV1().Services("default")
		api.Create(t.Context(), inCluster("new", "10.96.0.2", same), meta.CreateOptions{})
		step("fails", time.Minute, true, time.Now())
		rules.fail(nil)
		step("applied again", rulesDelayMax, true, time.Time{})
		w.queue.Add(anyNode) // changes no rule
		step("another change", time.Minute, true, time.Time{})
		rules.takes.Store(int64(time.Hour))
		api.Create(t.Context(), inCluster("more", "10.96.0.3", same), meta.CreateOptions{})
		step("hangs", time.Minute, true, time.Now())
		step("continues", time.Hour, true, time.Time{})
	})
}

// The metrics tell how long updates take, and how long after a change of a pod the rules followed, even after an error.
// Changes from before the start do not count.
func TestRuleMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reports := func(at time.Time) *discovery.EndpointSlice {
			s := of("web", slice(8080, ep("10.0.0.1", "n1", "rs")))
			s.Annotations = map[string]string{core.EndpointsLastChangeTriggerTime: at.Format(time.RFC3339Nano)}
			s.ResourceVersion = at.String()
			return s
		}
		client := fake.NewClientset(inCluster("web", "10.96.0.1", same), node("n1"),
			reports(time.Now().Add(-time.Hour)))
		metrics := NewRuleMetrics()
		w, rules := proxying(t, func(o *Options) { o.Client, o.RuleMetrics = client, metrics })
		stop := w.running(t)
		defer stop()
		count := func(h prometheus.Histogram) (n uint64, sum float64) {
			var m dto.Metric
			must.Do(t, h.Write(&m))
			return m.Histogram.GetSampleCount(), m.Histogram.GetSampleSum()
		}
		step := func(name string, latencies uint64, seconds float64) {
			t.Helper()
			n, sum := count(metrics.latency)
			must.Row(t, name, fmt.Sprintf("%d, %.1f s", latencies, seconds), fmt.Sprintf("%d, %.1f s", n, sum))
		}
		slices := client.DiscoveryV1().EndpointSlices("default")
		change := func(at time.Time) {
			t.Helper()
			must.Get(slices.Update(t.Context(), reports(at), meta.UpdateOptions{}))(t)
		}
		pass(time.Minute)
		step("older than the agent", 0, 0)
		before, _ := count(metrics.calls)
		rules.takes.Store(int64(time.Second))
		last := time.Now().Add(-2 * time.Second)
		change(last)
		pass(time.Minute)
		step("two seconds ago, and one to apply", 1, 3)
		n, _ := count(metrics.calls)
		must.True(t, n == before+1, "%d updates; want one more than %d", n, before)
		again := reports(last)
		again.ResourceVersion = "again"
		must.Get(slices.Update(t.Context(), again, meta.UpdateOptions{}))(t)
		pass(time.Minute)
		step("no other change", 1, 3)
		rules.takes.Store(0)
		rules.fail(errors.New("full"))
		change(time.Now())
		pass(rulesDelay / 2)
		step("fails", 1, 3)
		rules.fail(nil)
		pass(time.Minute)
		step("applied later", 2, 3.1)
		applied, changed := testutil.ToFloat64(metrics.applied), testutil.ToFloat64(metrics.changed)
		must.True(t, applied > changed && changed > float64(last.Unix()), "changed at %f, applied at %f", changed,
			applied)
		must.Do(t, slices.Delete(t.Context(), "web-1", meta.DeleteOptions{}))
		pass(time.Minute)
		step("deleted", 2, 3.1)
	})
}
