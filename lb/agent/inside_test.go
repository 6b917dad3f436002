package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/inside"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fakeInside implements insider.
type fakeInside struct {
	datapath.TracePart
	recorded
	prometheus.Gauge
}

func newFakeInside() *fakeInside {
	return &fakeInside{Gauge: prometheus.NewGauge(prometheus.GaugeOpts{Name: "steelyard_test_proxy"})}
}

func (f *fakeInside) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (f *fakeInside) Findings() []string { return nil }

func (f *fakeInside) State() inside.State { return inside.State{} }

func (f *fakeInside) Rules() []lb.NodeRule { return nil }

func (f *fakeInside) Flows(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
	return limited(3, lb.ScopeInside, want)
}

func (f *fakeInside) Explain(q lb.Question) (lb.Explanation, bool, error) {
	return lb.Explanation{Scope: lb.ScopeInside, Reason: "no_backend"}, q.To.Addr().Is4(), nil
}

// The service proxy explains what it decides, and the datapath for VIPs the rest.
func TestExplainAllScopes(t *testing.T) {
	four := must.Get(lb.ParseQuestion("10.0.0.1", "10.96.0.1:80"))(t)
	six := must.Get(lb.ParseQuestion("2001:db8::1", "[fd00::1]:80"))(t)
	for _, tt := range []struct {
		s       scopes
		q       lb.Question
		reason  string
		meaning bool
	}{
		{scopes{newMemoryDatapath(), nil}, four, "test", false},
		{scopes{newMemoryDatapath(), newFakeInside()}, six, "test", false},
		{scopes{newMemoryDatapath(), newFakeInside()}, four, "no_backend", true},
	} {
		e := must.Get(tt.s.explain(tt.q))(t)
		must.True(t, e.Reason == tt.reason && (e.Meaning != "") == tt.meaning, "%s: %+v", tt.q.To, e)
	}
}

// limited returns n flows, as far as a filter permits.
func limited(n int, scope lb.Scope, want lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error) {
	for range n {
		if f := (lb.FlowStatus{Scope: scope}); want.Match(f) {
			flows = append(flows, f)
		}
	}
	if want.Limit > 0 && len(flows) > want.Limit {
		return flows[:want.Limit], true, nil
	}
	return flows, false, nil
}

// fewFlows is a datapath with two flows.
type fewFlows struct{ forwarder }

func (fewFlows) Flows(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
	return limited(2, lb.ScopeOutside, want)
}

// One list has the flows of all scopes, up to the limit.
func TestFlowsOfAllScopes(t *testing.T) {
	for _, tt := range []struct {
		scope           lb.Scope
		limit           int
		outside, inside int
		more            bool
	}{
		{"", 0, 2, 3, false}, {"", 1, 1, 0, true}, {"", 2, 2, 0, true}, {"", 3, 2, 1, true}, {"", 5, 2, 3, false},
		{lb.ScopeInside, 0, 0, 3, false}, {lb.ScopeInside, 2, 0, 2, true}, {lb.ScopeOutside, 2, 2, 0, false},
	} {
		s := scopes{fewFlows{}, newFakeInside()}
		all, more, err := s.flows(t.Context(), lb.FlowFilter{Scope: tt.scope, Limit: tt.limit})
		must.Do(t, err)
		count := map[lb.Scope]int{}
		for _, f := range all {
			count[f.Scope]++
		}
		must.True(t, count[lb.ScopeOutside] == tt.outside && count[lb.ScopeInside] == tt.inside && more == tt.more,
			"%+v: %v, more %t", tt, count, more)
	}
	all, more, err := scopes{fewFlows{}, nil}.flows(t.Context(), lb.FlowFilter{Limit: 2})
	must.True(t, len(all) == 2 && !more && err == nil, "without a service proxy: %v, %t, %v", all, more, err)
}

func (f *fakeInside) Apply(changed map[string][]lb.NodeRule, all bool) error {
	f.add(fmt.Sprint(slices.Sorted(maps.Keys(changed)), " ", all))
	return nil
}

// Only an agent that is the service proxy opens the datapath for connections from inside. It also closes it.
func TestOpenInside(t *testing.T) {
	kubeconfig := apiServer(t, webInCluster())
	errTest := errors.New("no cgroup")
	for _, tt := range []struct {
		proxy  string
		err    error
		closed string
	}{
		{"replace", nil, "[datapath closed]"}, {"replace", errTest, "[]"}, // goes on without
		{"kube-proxy", nil, "[]"}, {"auto", nil, "[]"},
	} {
		proxy := newFakeInside()
		text := fmt.Sprintf("[kubernetes]\nkubeconfig = %q\nforward = \"nat\"\nproxy = %q\n", kubeconfig, tt.proxy)
		a, dp, err := newInMemory(t, text, func(o *Options) {
			o.openInside = func(Options, func() []datapath.InterfaceStatus, bool) (insider, error) {
				if tt.err != nil {
					return nil, tt.err
				}
				return proxy, nil
			}
		})
		must.Do(t, err)
		if a != nil {
			a.close()
		}
		must.Row(t, tt.proxy+": inside", tt.closed, fmt.Sprint(proxy.all()))
		must.Row(t, tt.proxy+": datapath", "[datapath closed]", fmt.Sprint(dp.all()))
	}
}

// The source passes what the node does as service proxy to that datapath.
func TestClusterAppliesInside(t *testing.T) {
	t.Parallel()
	cfg := parse(t, fmt.Sprintf("[kubernetes]\nkubeconfig = %q\nproxy = \"replace\"\nforward = \"nat\"\n",
		apiServer(t, webInCluster())))
	memory, inside := lbtest.New(), newFakeInside()
	engine := must.Get(lb.NewEngine(lb.EngineOptions{
		Datapath: memory, Announcer: memory, Prober: memory, Sources: []string{kube.Name},
		Settle: settleTimeout, Retry: retryDelay, Withdraw: withdrawTimeout, Log: discard,
	}))(t)
	o := Options{Config: cfg, Log: discard, KeepDir: t.TempDir(), api: new(apiDialer), inside: inside}
	c := must.Get(newCluster(o, facts, engine, engine, nil, nil, nil))(t)
	defer must.Run(t, engine.Run)()
	defer must.Run(t, c.source.run)()
	eventually(t, "all Services", func() bool { return slices.Contains(inside.all(), "[default/web] true") })
}
