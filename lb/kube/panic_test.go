package kube

import (
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// After an interruption, the last endpoints are kept if the kubelets of all their nodes were silent as well.
func TestPanicHold(t *testing.T) {
	usable := []discovery.Endpoint{ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs")}
	failed := []discovery.Endpoint{ep("10.0.0.1", "n1", ""), ep("10.0.0.2", "n2", "")}
	const silent, ready = core.ConditionUnknown, core.ConditionTrue
	for _, tt := range []struct {
		name   string
		policy func(*core.Service)
		away   time.Duration
		second core.ConditionStatus // of the second node, or "" if it does not exist; the first one is silent
		back   bool                 // it has become so after the interruption began
		now    []discovery.Endpoint
		kept   int
	}{
		{"an interruption", same, time.Minute, silent, false, failed, 2},
		{"Local, and the proxy has none", localPort, time.Minute, silent, false, failed, 1},
		{"a kubelet reports again", same, time.Minute, ready, true, failed, 2},
		{"one was deleted", same, time.Minute, silent, false, failed[:1], 1},
		{"one terminates", same, time.Minute, silent, false,
			[]discovery.Endpoint{failed[0], ep("10.0.0.2", "n2", "t")}, 1},
		{"no interruption", same, 0, silent, false, failed, 0},
		{"a short one", same, 9 * time.Second, silent, false, failed, 0},
		{"a node was always ready", same, time.Minute, ready, false, failed, 0},
		{"a node is gone", same, time.Minute, "", false, failed, 0},
		{"all were deleted", same, time.Minute, silent, false, nil, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			first, second, client := node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), fake.NewClientset()
			first.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, Status: silent}}
			second.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, Status: tt.second}}
			if tt.back {
				second.Status.Conditions[0].LastTransitionTime = meta.NewTime(time.Now().Add(tt.away))
			}
			must.Do(t, client.Tracker().Add(first))
			if tt.second != "" {
				must.Do(t, client.Tracker().Add(second))
			}
			f := newFixture(t, func(o *Options) { o.PanicHold, o.Client = 30*time.Second, client })
			f.have(t, first, aService(tt.policy), of("web", slice(8080, usable...)))
			look := func(proxy error) (s *lb.Service, used int) {
				for range 3 { // the result of the proxy's check, and of the question about the nodes
					f.queue.Add(webName)
					for _, key := range f.queued() {
						f.handle(key, fakeSink{f.recorded})
					}
					f.Health(report(webName, proxy))
					synctest.Wait()
				}
				for _, b := range f.put[webName].Ports[0].Backends {
					if !b.Deleted {
						used++
					}
				}
				return f.put[webName], used
			}
			look(nil)
			time.Sleep(tt.away)
			f.Interrupted(time.Now().Add(-tt.away))
			f.have(t, of("web", slice(8080, tt.now...)))
			for _, after := range []time.Duration{0, 29 * time.Second} {
				time.Sleep(after)
				s, used := look(errTest)
				lower := s.LowerPreference != ""
				if used != tt.kept || lower != (used > 0) || lower != (s.WithholdReason == "") ||
					lower && (s.Check.Type != lb.CheckTCP || s.Check.Fall != 1 || !lb.Checks(s)[0].Presumed) {
					t.Errorf("%s: %d endpoints in use; want %d; %+v", tt.name, used, tt.kept, s)
				}
			}
			time.Sleep(2 * time.Second)
			if s, used := look(errTest); used > 0 || s.WithholdReason == "" || s.LowerPreference != "" {
				t.Errorf("%s: after the time %d endpoints in use, withheld for %q", tt.name, used, s.WithholdReason)
			}
			f.have(t, of("web", slice(8080, usable...)))
			if s, used := look(nil); used == 0 || s.LowerPreference != "" || s.Check.Type != lb.CheckNone {
				t.Errorf("%s: back again: %+v", tt.name, s)
			}
		})
	}
}
