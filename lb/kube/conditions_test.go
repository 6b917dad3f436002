package kube

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestExcludedNode(t *testing.T) {
	for value, want := range map[string]bool{"": true, "true": true, "yes": true, "false": false, "0": false} {
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Labels: map[string]string{labelExclude: value}}}
		must.Row(t, fmt.Sprintf("label %q: excluded", value), want, (&conditions{}).excluded(n) != "")
	}
	// A node that Kubernetes itself does not exclude is excluded only when the configuration says so.
	status := func(ready core.ConditionStatus) []core.NodeCondition {
		pressure := core.NodeCondition{Type: core.NodeMemoryPressure, Status: core.ConditionTrue}
		return []core.NodeCondition{pressure, {Type: core.NodeReady, Status: ready}}
	}
	ready := core.NodeStatus{Conditions: status(core.ConditionTrue)}
	unknown := core.NodeStatus{Conditions: status(core.ConditionUnknown)}
	for _, tt := range []struct {
		o    Options
		node core.Node
		want string
	}{
		{Options{}, core.Node{Spec: core.NodeSpec{Unschedulable: true}}, ""},
		{Options{Unschedulable: true}, core.Node{Spec: core.NodeSpec{Unschedulable: true}}, "the node is cordoned"},
		{Options{Unschedulable: true}, core.Node{}, ""},
		{Options{NotReady: true}, core.Node{Status: ready}, ""},
		{Options{NotReady: true}, core.Node{Status: unknown}, "the node is not ready"},
		{Options{NotReady: true}, core.Node{}, "the node is not ready"},
	} {
		must.Row(t, fmt.Sprintf("%+v: excluded for", tt.node), tt.want, (&conditions{o: tt.o}).excluded(&tt.node))
	}
}

func TestRemoval(t *testing.T) {
	tainted := func(keys ...string) *core.Node {
		n := &core.Node{}
		for _, k := range keys {
			n.Spec.Taints = append(n.Spec.Taints, core.Taint{Key: k})
		}
		return n
	}
	deleted := &core.Node{}
	deleted.DeletionTimestamp = &meta.Time{Time: time.Now()}
	for want, n := range map[string]*core.Node{
		"":                          tainted("other"),
		"the node is being deleted": deleted,
		"the node has the taint ToBeDeletedByClusterAutoscaler": tainted("other", taintAutoscaler),
	} {
		must.Row(t, "excluded for", want, (&conditions{}).excluded(n))
	}
	must.Row(t, "no node: excluded for", "this node is not known to the API server", (&conditions{}).excluded(nil))
}

const healthz = "http://192.0.2.1:10256/healthz?x=1"

// errRefused is what a dialer returns where nothing listens.
var errRefused = &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}

// report returns a check result: healthy if err is nil, otherwise unhealthy.
func report(key string, err error) lb.Health {
	h := lb.Health{Key: lb.CheckKey{Service: key}, State: lb.StateHealthy, Reason: "HTTP 200", Err: err}
	if err != nil {
		h.State, h.Reason = lb.StateUnhealthy, "bad"
	}
	return h
}

// The addresses are withheld for the first reason that applies.
func TestWithhold(t *testing.T) {
	const web = "default/web"
	nodePort := func(s *core.Service) { local(s); s.Spec.HealthCheckNodePort = 30000 }
	clusterNodePort := func(s *core.Service) { s.Spec.HealthCheckNodePort = 30000 }
	const notProbed = "health check node port 30000 has not answered yet"
	const unhealthy = "health check node port 30000: bad"
	proxyIs := func(err error) []lb.Health { return []lb.Health{report(proxyCheck, err)} }
	const noneReady = "externalTrafficPolicy is Local, and no ready endpoint is on this node"
	const proxy = "the service proxy's " + healthz
	for _, tt := range []struct {
		name    string
		change  func(*core.Service)
		ready   int
		node    *core.Node
		reports []lb.Health
		want    string
		checked bool // whether its health check node port is checked afterwards
	}{
		{"healthy proxy", same, 0, node("n1"), proxyIs(nil), "", false},
		{"proxy not probed yet", same, 0, node("n1"), nil, proxy + " has not answered yet", false},
		{"unhealthy proxy", same, 0, node("n1"), proxyIs(errTest), proxy + ": bad", false},
		{"no proxy", same, 0, node("n1"), proxyIs(errRefused), "", false},
		{"no node", same, 0, nil, proxyIs(nil), "this node is not known to the API server", true},
		{"Local, none ready", local, 0, node("n1"), proxyIs(nil), noneReady, false},
		{"Local, one ready", local, 1, node("n1"), proxyIs(nil), "", false},
		{"Local, not probed yet", nodePort, 1, node("n1"), nil, notProbed, true},
		{"Local, unhealthy", nodePort, 1, node("n1"), []lb.Health{report(web, errTest)}, unhealthy, true},
		{"Local, healthy", nodePort, 1, node("n1"), append(proxyIs(errTest), report(web, nil)), "", true},
		{"Local, none ready now", nodePort, 0, node("n1"), []lb.Health{report(web, nil)}, noneReady, false},
		{"Cluster", clusterNodePort, 1, node("n1"), proxyIs(nil), "", false},
	} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
		f.conditions.startProxyCheck(false)
		f.probePort(web, 30000, nil) // as if the Service had been Local before
		for _, h := range tt.reports {
			f.Health(h)
		}
		v := &view{service: &lb.Service{Name: web, VIPs: addrs("203.0.113.10")}, readyLocal: tt.ready}
		got := f.conditions.withhold(aService(tt.change), v, tt.node)
		must.Row(t, tt.name+": withheld for", tt.want, got)
		_, checked := f.conditions.checks[web]
		must.Row(t, tt.name+": checked", tt.checked, checked)
	}
}

func TestChecksOfTheNode(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
	f.conditions.startProxyCheck(false)
	f.probePort("default/web", 30000, nil)
	spec := f.o.Probe
	proxy, port := spec, spec
	proxy.Type, proxy.Path, proxy.Status = lb.CheckHTTP, "/healthz?x=1", []lb.StatusRange{{From: 200, To: 200}}
	port.Type, port.Path, port.Body = lb.CheckNodePort, "/healthz", "default/web"
	want := []lb.Check{
		{Key: lb.CheckKey{Service: proxyCheck}, Target: netip.MustParseAddrPort("192.0.2.1:10256"), Spec: proxy,
			ByRoot: true},
		{Key: lb.CheckKey{Service: "default/web"}, Target: netip.MustParseAddrPort("192.0.2.1:30000"), Spec: port},
	}
	must.Row(t, "checks", want, f.checks)
}

// A proxy that is not checked withholds nothing.
func TestProxyIsNotChecked(t *testing.T) {
	for url, warns := range map[string]bool{"": false, "http://a b/": false, "http://proxy:10256/healthz": true} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz = url })
		f.conditions.startProxyCheck(false)
		warned := strings.Contains(f.log.String(), `level=WARN msg="service proxy not checked"`)
		must.True(t, len(f.checks) == 0 && warned == warns && f.conditions.noProxy() &&
			f.conditions.proxyReason() == "", "%q: checks %v, log %s", url, f.checks, &f.log)
	}
}

// Refused connections count as a failure only once the proxy has listened; until then there may be no proxy.
func TestProxyListens(t *testing.T) {
	for name, tt := range map[string]struct {
		reports []error
		none    bool // noProxy
		warns   int
	}{
		"not probed yet":        {nil, false, 0},
		"never":                 {[]error{errRefused, errRefused}, true, 2},
		"fails":                 {[]error{errTest}, false, 0},
		"listens later":         {[]error{errRefused, nil}, false, 1},
		"fails later":           {[]error{errRefused, errTest}, false, 1},
		"listened before":       {[]error{nil, errRefused}, false, 0},
		"silent":                {[]error{context.DeadlineExceeded}, false, 0},
		"silent, then never":    {[]error{context.DeadlineExceeded, errRefused}, true, 1},
		"silent for a moment":   {[]error{errRefused, context.DeadlineExceeded, errRefused}, true, 2},
		"silent for long":       {[]error{errRefused, context.DeadlineExceeded}, true, 1},
		"hangs":                 {[]error{nil, context.DeadlineExceeded}, false, 0},
		"failed before":         {[]error{errTest, errRefused, errRefused}, false, 0},
		"refused in words only": {[]error{fmt.Errorf("connection refused by policy")}, false, 0},
	} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
		f.conditions.startProxyCheck(false)
		for _, err := range tt.reports {
			f.Health(report(proxyCheck, err))
			must.Row(t, name+": queued", []string{everything}, f.queued())
		}
		warns := strings.Count(f.log.String(), "level=WARN")
		must.Row(t, name+": no proxy", tt.none, f.conditions.noProxy())
		must.Row(t, name+": warnings", tt.warns, warns)
	}
	f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
	f.conditions.startProxyCheck(false)
	f.probePort("default/web", 30000, nil)
	f.Health(report("default/web", errRefused))
	if warned := f.log.Len() > 0; warned || f.conditions.noProxy() || f.conditions.proxyListens {
		t.Error("the report of a health check node port was taken for the proxy's")
	}
	must.Row(t, "queued", []string{"default/web"}, f.queued())
}

// A check starts once, and again when its target changes. Its result is not used after it has stopped.
func TestCheckStartsAndStops(t *testing.T) {
	const web = "default/web"
	f := newFixture(t, asIs)
	started := func(want ...string) {
		t.Helper()
		var got []string
		for _, c := range f.checks {
			got = append(got, c.Target.String())
		}
		f.checks = nil
		must.True(t, slices.Equal(got, want), "started %q; want %q", got, want)
	}
	const notYet = "health check node port 30001 has not answered yet"
	f.conditions.stop(web)
	started()
	f.probePort(web, 30000, nil)
	started("192.0.2.1:30000")
	f.Health(report(web, errTest))
	must.Row(t, "withheld for", "health check node port 30000: bad", f.probePort(web, 30000, nil))
	started()
	must.Row(t, "after another port: withheld for", notYet, f.probePort(web, 30001, nil))
	const ended = "invalid AddrPort" // or the prober would keep the state, and report nothing
	started(ended, "192.0.2.1:30001")
	f.queued()
	f.probePort(web, 30001, node("n1", "192.0.2.7", "2001:db8::7")) // kube-proxy may listen there only
	started(ended, "192.0.2.7:30001")
	f.probePort(web, 30001, nil)
	started(ended, "192.0.2.1:30001")
	f.conditions.stop(web)
	started(ended)
	f.Health(report(web, nil))
	got := f.queued()
	must.True(t, len(got) == 0 && len(f.conditions.results) == 0, "a late report queues %q", got)
	must.Row(t, "after a new start: withheld for", notYet, f.probePort(web, 30001, nil))
}

// The health check node port is probed in each family in which the service has an address and a local endpoint. A
// failure withholds the addresses of its family.
func TestHealthCheckNodePortOfEachFamily(t *testing.T) {
	const web, port = "default/web", "health check node port 30000"
	const bad, notYet = port + ": bad", port + " has not answered yet"
	const v4, v6 = "203.0.113.10", "2001:db8::10"
	for _, tt := range []struct {
		name                   string
		vips                   []string
		unserved               []lb.Family
		reports                []lb.Health
		checks, want, families string
	}{
		{"IPv4", []string{v4}, nil, nil, "[default/web 192.0.2.7:30000]", notYet, "map[]"},
		{"IPv6", []string{v6}, nil, nil, "[default/web/IPv6 [2001:db8::7]:30000]", notYet, "map[]"},
		{"IPv6 works", []string{v6}, nil, []lb.Health{report(web+ofIPv6, nil)},
			"[default/web/IPv6 [2001:db8::7]:30000]", "", "map[]"},
		{"both work", []string{v4, v6}, nil, []lb.Health{report(web, nil), report(web+ofIPv6, nil)},
			"[default/web 192.0.2.7:30000 default/web/IPv6 [2001:db8::7]:30000]", "", "map[]"},
		{"both fail", []string{v4, v6}, nil, []lb.Health{report(web, errTest), report(web+ofIPv6, errTest)},
			"[default/web 192.0.2.7:30000 default/web/IPv6 [2001:db8::7]:30000]", bad, "map[]"},
		{"IPv6 fails", []string{v4, v6}, nil, []lb.Health{report(web, nil), report(web+ofIPv6, errTest)},
			"[default/web 192.0.2.7:30000 default/web/IPv6 [2001:db8::7]:30000]", "", "map[IPv6:{" + bad + " false}]"},
		{"no IPv4 endpoint here", []string{v4, v6}, []lb.Family{lb.IPv4}, []lb.Health{report(web+ofIPv6, nil)},
			"[default/web/IPv6 [2001:db8::7]:30000]", "", "map[IPv4:{none true}]"},
		{"none of its family here", []string{v4}, []lb.Family{lb.IPv4}, nil, "[]", "", "map[IPv4:{none true}]"},
	} {
		f := newFixture(t, asIs)
		v := &view{
			service: &lb.Service{Name: web, VIPs: addrs(tt.vips...)}, readyLocal: 1, unserved: map[lb.Family]withheld{},
		}
		for _, family := range tt.unserved {
			v.unserved[family] = withheld{"none", true}
		}
		s := aService(func(s *core.Service) {
			s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = core.ServiceExternalTrafficPolicyLocal, 30000
		})
		withhold := func() string { return f.conditions.withhold(s, v, node("n1", "192.0.2.7", "2001:db8::7")) }
		withhold()
		var checks []string
		for _, c := range f.checks {
			checks = append(checks, c.Key.Service+" "+c.Target.String())
		}
		for _, h := range tt.reports {
			f.Health(h)
		}
		if got := f.queued(); len(tt.reports) > 0 && !slices.Equal(got, []string{web}) {
			t.Errorf("%s: queued %q", tt.name, got)
		}
		for family := range v.unserved {
			if !slices.Contains(tt.unserved, family) {
				delete(v.unserved, family)
			}
		}
		got, families := withhold(), fmt.Sprint(v.unserved)
		must.True(t, fmt.Sprint(checks) == tt.checks && got == tt.want && families == tt.families,
			"%s: checks %v, withheld for %q, %s; want %s, %q, %s", tt.name, checks, got, families, tt.checks, tt.want,
			tt.families)
		f.conditions.stop(web)
		must.True(t, len(f.conditions.checks) == 0, "%s: left %v", tt.name, f.conditions.checks)
	}
}

// probePort checks a health check node port over IPv4.
func (f *fixture) probePort(service string, port uint16, node *core.Node) string {
	at := netip.AddrPortFrom(f.conditions.addressOf(node, lb.IPv4), port)
	return f.conditions.nodePort(service, &view{service: &lb.Service{Name: service}}, at)
}

func addrs(list ...string) (all []netip.Addr) {
	for _, a := range list {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}
