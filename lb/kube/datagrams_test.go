package kube

import (
	"fmt"
	"net/netip"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

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
