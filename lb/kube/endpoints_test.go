package kube

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
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
		got := ""
		for len(events.Events) > 0 {
			got += <-events.Events
		}
		if got != tt.want {
			t.Errorf("%v: %q; want %q", tt.ips, got, tt.want)
		}
	}
}

// An endpoint with an address that no host has is ignored: packets to it would reach nobody.
func TestEndpointsOfHosts(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1": true, "2001:db8::1": true,
		"239.1.1.1": false, "255.255.255.255": false, "ff02::1": false, "0.0.0.0": false,
	} {
		s := &discovery.EndpointSlice{Endpoints: []discovery.Endpoint{{Addresses: []string{addr}}}}
		if got := len(slimSlice(s).endpoints) == 1; got != want {
			t.Errorf("%s is an endpoint: %t; want %t", addr, got, want)
		}
	}
}

// Flows of datagrams to endpoints that do not serve end while others serve, in the whole cluster and under any policy,
// and no node asks the nodes of such endpoints for flows (pkg/proxy/conntrack/cleanup.go).
func TestDatagramsLeaveEndpointsThatDoNotServe(t *testing.T) {
	top := topology{node: "n1", nodes: map[string]netip.Addr{
		"n1": netip.MustParseAddr("192.0.2.1"), "n2": netip.MustParseAddr("192.0.2.2"),
	}}
	const a, b, n1, n2, n12 = "10.0.0.1", "10.0.0.2", "192.0.2.1!", "192.0.2.2", "192.0.2.1! 192.0.2.2"
	type eps = []discovery.Endpoint
	for _, tt := range []struct {
		name      string
		endpoints eps
		down      string
		nodes     string
	}{
		{"ready", eps{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, "[]", n12},
		{"terminating and serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "st")}, "[]", "192.0.2.2 192.0.2.1!"},
		{"not serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "")}, "[10.0.0.2:8080]", n1},
		{"terminating and not serving", eps{ep(a, "n1", "rs"), ep(b, "n2", "t")}, "[10.0.0.2:8080]", n1},
		{"not serving, here", eps{ep(a, "n1", ""), ep(b, "n2", "rs")}, "[10.0.0.1:8080]", n2},
		{"another one is terminating", eps{ep(a, "n1", ""), ep(b, "n2", "st")}, "[10.0.0.1:8080]", n2},
		{"none serves", eps{ep(a, "n1", ""), ep(b, "n2", "t")}, "[]", n12},
		{
			"of two on a node", eps{ep(a, "n1", "rs"), ep("10.0.0.3", "n1", ""), ep(b, "n2", "rs")},
			"[10.0.0.3:8080]", n12,
		},
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
					if down != "[]" || len(nodes) != len(n12) {
						t.Errorf("%s, TCP: flows of %s end, nodes %s", tt.name, down, nodes)
					}
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
		if !ok || x.ready != tt.ready || x.serving != tt.serving || x.terminating != tt.terminating {
			t.Errorf("%v: %t, %+v; want %+v", tt.conditions, ok, x, tt)
		}
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
			if got := viewOn(aService(tt.change), nil, topology{node: "n1"}, false).service.Policy; got != tt.want {
				t.Errorf("policy %q; want %q", got, tt.want)
			}
		})
	}
}

// Under Local, packets to each port and family without a local backend are dropped if another node has one, and refused
// if none has, independently of the other ports and the other family (pkg/proxy/service.go).
func TestDropsByPortAndFamily(t *testing.T) {
	port := func(name string, at int32, e *discovery.EndpointSlice) *discovery.EndpointSlice {
		e.Ports = []discovery.EndpointPort{{Name: ptr(name), Port: &at, Protocol: ptr(core.ProtocolTCP)}}
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
	if want := "80 1 [IPv6]\n81 0 [IPv4]\n82 0 []\n"; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
