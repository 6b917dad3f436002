package kube

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The owner of a Service with externalIPs that no pool permits is told once, whatever the type of the Service is.
func TestExternalIPNotPermitted(t *testing.T) {
	const want = "Warning ExternalIPNotPermitted 198.51.100.1 of spec.externalIPs is not announced: no pool permits " +
		"it; a [[pool]] that has the address and is for this Service needs external_ips = true"
	for _, tt := range []struct {
		ips  []string
		want string
	}{
		{[]string{"203.0.113.1", "198.51.100.1"}, want}, // the pool of the first one permits it
		{[]string{"203.0.113.1"}, ""},
		{nil, ""},
	} {
		term, _, events := testTerm(t, wanting("web", func(s *core.Service) {
			s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, tt.ips
		}))
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		must.Row(t, tt.ips, tt.want, strings.Join(drained(events), "; "))
	}
}

// An endpoint with an address that no host has is ignored: packets to it would reach nobody.
func TestEndpointsOfHosts(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1": true, "2001:db8::1": true,
		"239.1.1.1": false, "255.255.255.255": false, "ff02::1": false, "0.0.0.0": false,
	} {
		s := &discovery.EndpointSlice{Endpoints: []discovery.Endpoint{{Addresses: []string{addr}}}}
		slim := slimSlice(s)
		must.Row(t, addr+" is an endpoint", want, len(slim.endpoints) == 1)
		must.Row(t, addr+" is reported", !want, slim.ignored == netip.MustParseAddr(addr))
	}
}

// If any endpoint in the cluster serves, UDP flows to endpoints that do not serve are ended, whatever the policy, and
// no node asks nodes that have only such endpoints for flows (pkg/proxy/conntrack/cleanup.go).
func TestDatagramsLeaveEndpointsThatDoNotServe(t *testing.T) {
	top := topology{node: "n1", nodes: map[string]netip.Addr{
		"n1": netip.MustParseAddr("192.0.2.1"), "n2": netip.MustParseAddr("192.0.2.2"),
	}}
	const a, b, n1, n2, n12 = "10.0.0.1", "10.0.0.2", "192.0.2.1!", "192.0.2.2", "192.0.2.1! 192.0.2.2"
	type eps = []discovery.Endpoint
	for _, tt := range []struct {
		name        string
		endpoints   eps
		down, nodes string
	}{
		{"ready", eps{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, "[]", n12},
		{"terminating and serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "st")}, "[]", "192.0.2.2 192.0.2.1!"},
		{"not serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "")}, "[10.0.0.2:8080]", n1},
		{"terminating and not serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "t")}, "[10.0.0.2:8080]", n1},
		{"not serving, here", eps{ep(a, "n1", ""), ep(b, "n2", "rs")}, "[10.0.0.1:8080]", n2},
		{"another one is terminating", eps{ep(a, "n1", ""), ep(b, "n2", "st")}, "[10.0.0.1:8080]", n2},
		{"none serves", eps{ep(a, "n1", ""), ep(b, "n2", "t")}, "[]", n12},
		{"of two on a node", eps{ep(a, "n1", "rs"), ep("10.0.0.3", "n1", ""), ep(b, "n2", "rs")},
			"[10.0.0.3:8080]", n12},
	} {
		for _, change := range []func(*core.Service){same, local, sticky, stickyLocal} {
			s := aService(change)
			s.Spec.Ports[0].Protocol = core.ProtocolUDP
			for _, protocol := range []core.Protocol{core.ProtocolUDP, core.ProtocolTCP} {
				x := slice(8080, tt.endpoints...)
				s.Spec.Ports[0].Protocol, x.Ports[0].Protocol = protocol, &protocol
				down, nodes := "", ""
				v := viewOn(s, []*discovery.EndpointSlice{x}, top, false)
				for _, f := range lb.Build(v.service, nil, lb.Drains{}).Frontends {
					if f.Decap {
						down = fmt.Sprint(f.Down)
					} else {
						nodes = marked(f.Nodes, func(n lb.Node) (netip.Addr, bool) { return n.Addr, n.Local })
					}
				}
				switch {
				case protocol == core.ProtocolTCP:
					must.True(t, down == "[]" && len(nodes) == len(n12),
						"%s, TCP: flows of %s end, nodes %s", tt.name, down, nodes)
				case down != tt.down || nodes != tt.nodes:
					t.Errorf("%s, %+v: flows of %s end, nodes %q; want %s, %q",
						tt.name, s.Spec.ExternalTrafficPolicy, down, nodes, tt.down, tt.nodes)
				}
			}
		}
	}
}

// Conditions that are not set are true, except terminating (discovery/v1; pkg/proxy/endpointslicecache.go).
func TestUnsetConditions(t *testing.T) {
	yes, no := true, false
	for _, tt := range []struct {
		conditions                  discovery.EndpointConditions
		ready, serving, terminating bool
	}{
		{discovery.EndpointConditions{}, true, true, false},
		{discovery.EndpointConditions{Ready: &no}, false, true, false},
		{discovery.EndpointConditions{Ready: &no, Terminating: &yes}, false, true, true},
		{discovery.EndpointConditions{Serving: &no}, true, false, false},
	} {
		e := discovery.Endpoint{Addresses: []string{"10.0.0.1"}, Conditions: tt.conditions}
		x, ok := toEndpoint(e)
		must.True(t, ok && x.ready == tt.ready && x.serving == tt.serving && x.terminating == tt.terminating,
			"%v: %t, %+v; want %+v", tt.conditions, ok, x, tt)
	}
}

func TestPolicyIsExternalTrafficPolicy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   lb.Policy
	}{
		{"unset", func(s *core.Service) { s.Spec.ExternalTrafficPolicy = "" }, lb.PolicyCluster},
		{"Cluster", same, lb.PolicyCluster},
		{"Local", local, lb.PolicyLocal},
	} {
		t.Run(tt.name, func(t *testing.T) {
			must.Row(t, "policy", tt.want, viewOn(aService(tt.change), nil, topology{node: "n1"}, false).service.Policy)
		})
	}
}

// Under Local, packets to each port and family without a local backend are dropped if another node has one, and refused
// if none has, independently of the other ports and the other family (pkg/proxy/service.go).
func TestDropsByPortAndFamily(t *testing.T) {
	port := func(name string, at int32, e *discovery.EndpointSlice) *discovery.EndpointSlice {
		e.Ports = []discovery.EndpointPort{{Name: new(name), Port: &at, Protocol: new(core.ProtocolTCP)}}
		return e
	}
	v6 := port("http", 8080, slice(0, ep("2001:db8::2", "n2", "rs")))
	v6.AddressType = discovery.AddressTypeIPv6
	s := viewOn(aService(func(s *core.Service) {
		local(s)
		s.Spec.Ports = append(s.Spec.Ports,
			core.ServicePort{Name: "else", Port: 81}, core.ServicePort{Name: "none", Port: 82})
	}), []*discovery.EndpointSlice{
		port("http", 8080, slice(0, ep("10.0.0.1", "n1", "rs"))), v6,
		port("else", 8081, slice(0, ep("10.0.0.2", "n2", "rs"))),
	}, topology{node: "n1"}, false).service
	got := ""
	for _, p := range s.Ports {
		got += fmt.Sprintln(p.Port.Port, len(p.Backends), p.DropWhenEmpty)
	}
	want := "80 1 [IPv6]\n81 0 [IPv4]\n82 0 []\n"
	must.True(t, got == want, "got\n%swant\n%s", got, want)
}

// twoPorts returns a view of a service without backends.
func twoPorts() *view {
	return &view{
		service: &lb.Service{Name: webName, Ports: make([]lb.ServicePort, 2)},
		ports:   []portKey{{"http", core.ProtocolTCP}, {"other", core.ProtocolTCP}},
	}
}

// deleted returns the deleted backends of each port.
func deleted(v *view) string {
	out := make([][]netip.AddrPort, len(v.service.Ports))
	for i, p := range v.service.Ports {
		for _, b := range p.Backends {
			if b.Deleted {
				out[i] = append(out[i], b.ID())
			}
		}
	}
	return fmt.Sprint(out)
}

const webName = "default/web"

// Former endpoints of a service become deleted backends when no slice has them, whatever their conditions were.
func TestStaleEndpoints(t *testing.T) {
	const none, first = "[[] []]", "[[10.0.0.1:8080] []]"
	const both = "[[10.0.0.1:8080 10.0.0.2:8080] []]"
	a, b := ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n1", "rs")
	down, leaving := ep("10.0.0.1", "n1", ""), ep("10.0.0.1", "n1", "st")
	portless := slice(8080, a)
	portless.Ports = append([]discovery.EndpointPort{{}}, portless.Ports...)
	one := func(e ...discovery.Endpoint) *discovery.EndpointSlice { return slice(8080, e...) }
	for _, tt := range []struct {
		name  string
		steps []*discovery.EndpointSlice
		want  string
	}{
		{"new service", []*discovery.EndpointSlice{one()}, none},
		{"removed", []*discovery.EndpointSlice{one(a), one(b)}, first},
		{"both removed", []*discovery.EndpointSlice{one(b, a), one()}, both},
		{"not ready", []*discovery.EndpointSlice{one(a), one(down)}, none},
		{"terminating", []*discovery.EndpointSlice{one(a), one(leaving)}, none},
		{"removed while it was terminating", []*discovery.EndpointSlice{one(a), one(leaving), one(b)}, first},
		{"removed while it was not ready", []*discovery.EndpointSlice{one(down), one(b)}, first},
		{"back again", []*discovery.EndpointSlice{one(a), one(), one(down)}, none},
		{"other port", []*discovery.EndpointSlice{one(a), slice(8081, a)}, first},
		{"behind a port without number", []*discovery.EndpointSlice{one(a), portless}, none},
		{"behind one without address", []*discovery.EndpointSlice{one(a), one(discovery.Endpoint{}, a)}, none},
	} {
		f := newFixture(t, asIs)
		f.have(t, of("db", slice(8080, a, b)))
		var now *view
		for _, step := range tt.steps {
			f.have(t, of("web", step))
			now = twoPorts()
			f.addStale(now)
		}
		must.Row(t, tt.name+": deleted", tt.want, deleted(now))
	}
}

func TestStaleEndpointsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, asIs)
		f.have(t, of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
		f.addStale(twoPorts())
		f.have(t, of("web", slice(8080)))
		const at, none = "[[10.0.0.1:8080] []]", "[[] []]"
		for i, step := range []struct {
			wait time.Duration
			want string
		}{
			{0, at}, {staleEndpointTTL - time.Second, at},
			{time.Second, at}, // it expires after, not at the end of, its time
			{time.Nanosecond, none}, {0, none},
		} {
			time.Sleep(step.wait)
			now := twoPorts()
			f.addStale(now)
			must.Row(t, fmt.Sprintf("step %d: deleted", i), step.want, deleted(now))
		}
		pass(time.Second)
		got := f.queued()
		must.True(t, len(got) == 1 && got[0] == webName, "looked at again: %q", got)
		x := f.endpoints[webName]
		must.True(t, len(x.present)+len(x.removed) == 0, "remembered: %v", x)
	})
}
