package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

func ptr[T any](v T) *T { return &v }

// ep is an endpoint "ADDRESS node flags", with flags of r (ready), s (serving), t (terminating), n:NODE and z:ZONE (hints).
func ep(addr, node string, flags string, hints ...string) discovery.Endpoint {
	has := func(f byte) *bool { return ptr(slices.Contains([]byte(flags), f)) }
	e := discovery.Endpoint{
		Addresses: []string{addr}, NodeName: &node,
		Conditions: discovery.EndpointConditions{Ready: has('r'), Serving: has('s'), Terminating: has('t')},
	}
	for _, h := range hints {
		if e.Hints == nil {
			e.Hints = &discovery.EndpointHints{}
		}
		if h[0] == 'n' {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discovery.ForNode{Name: h[2:]})
		} else {
			e.Hints.ForZones = append(e.Hints.ForZones, discovery.ForZone{Name: h[2:]})
		}
	}
	return e
}

func slice(port int32, eps ...discovery.Endpoint) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, Endpoints: eps}
	s.Ports = []discovery.EndpointPort{{Name: ptr("http"), Port: &port, Protocol: ptr(core.ProtocolTCP)}}
	return s
}

func aService(change func(*core.Service)) *core.Service {
	s := &core.Service{ObjectMeta: meta.ObjectMeta{Namespace: "default", Name: "web"}}
	s.Spec.Type = core.ServiceTypeLoadBalancer
	s.Spec.IPFamilies = []core.IPFamily{core.IPv4Protocol}
	s.Spec.Ports = []core.ServicePort{{Name: "http", Port: 80, Protocol: core.ProtocolTCP}}
	s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "203.0.113.10"}}
	change(s)
	return s
}

func same(*core.Service) {}

func local(s *core.Service) {
	s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
}

// The choice of endpoints is kube-proxy's (pkg/proxy/topology_test.go has the same cases).
func TestChoiceOfEndpoints(t *testing.T) {
	const a, b, c = "10.0.0.1", "10.0.0.2", "10.0.0.3"
	for _, tt := range []struct {
		name      string
		change    func(*core.Service)
		endpoints []discovery.Endpoint
		want      []string // "address" and, for those here, "address!"
		silent    bool
		readyHere int
	}{
		{"ready ones", same, []discovery.Endpoint{ep(a, "n1", "rs"), ep(b, "n2", "rs"), ep(c, "n2", "")}, []string{a + "!", b}, false, 1},
		{"no condition means ready", same, []discovery.Endpoint{{Addresses: []string{a}}}, []string{a}, false, 0},
		{"terminating ones while one is ready", same, []discovery.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "rs")}, []string{b}, false, 0},
		{"terminating ones when none is ready", same, []discovery.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "st"), ep(c, "n2", "t")}, []string{a + "!", b}, false, 0},
		{"Local", local, []discovery.Endpoint{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, []string{a + "!"}, false, 1},
		{"Local, one that terminates is here", local, []discovery.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "rs")}, []string{a + "!"}, false, 0},
		{"Local, elsewhere only", local, []discovery.Endpoint{ep(b, "n2", "rs")}, nil, true, 0},
		{"Local, nowhere", local, nil, nil, false, 0},
		{"hints for zones", same, []discovery.Endpoint{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs", "z:z1")}, []string{b}, false, 1},
		{"hints for nodes come first", same, []discovery.Endpoint{ep(a, "n1", "rs", "z:z2", "n:n1"), ep(b, "n2", "rs", "z:z1", "n:n2")}, []string{a + "!"}, false, 1},
		{"not all have hints", same, []discovery.Endpoint{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs")}, []string{a + "!", b}, false, 1},
		{"no hint is for us", same, []discovery.Endpoint{ep(a, "n1", "rs", "z:z3"), ep(b, "n2", "rs", "z:z2")}, []string{a + "!", b}, false, 1},
		{"hints say nothing to Local", local, []discovery.Endpoint{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs", "z:z1")}, []string{a + "!"}, false, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := seen(aService(tt.change), []*discovery.EndpointSlice{slice(8080, tt.endpoints...)}, place{node: "n1", zone: "z1"}, false)
			var got []string
			for _, b := range v.service.Ports[0].Backends {
				mark := ""
				if b.Local {
					mark = "!"
				}
				got = append(got, b.Addr.String()+mark)
			}
			if !slices.Equal(got, tt.want) || v.service.DropWhenEmpty != tt.silent || v.readyHere != tt.readyHere {
				t.Errorf("%v, silent %t, %d ready here; want %v, %t, %d", got, v.service.DropWhenEmpty, v.readyHere, tt.want, tt.silent, tt.readyHere)
			}
		})
	}
}

// Ports are matched by name and protocol, may differ from endpoint to endpoint, and an address counts once.
func TestSeveralSlices(t *testing.T) {
	other := slice(9090, ep("10.0.0.2", "n2", "rs"), ep("10.0.0.1", "n1", "rs"))
	other.Ports = append(other.Ports, discovery.EndpointPort{Name: ptr("admin"), Port: ptr(int32(1)), Protocol: ptr(core.ProtocolTCP)},
		discovery.EndpointPort{Name: ptr("http"), Port: ptr(int32(2)), Protocol: ptr(core.ProtocolUDP)}, discovery.EndpointPort{Port: ptr(int32(3))})
	six := slice(7, ep("2001:db8::1", "n1", "rs"))
	six.AddressType = discovery.AddressTypeIPv6
	all := []*discovery.EndpointSlice{slice(8080, ep("10.0.0.1", "n1", "s"), ep("10.0.0.1", "n1", "rs")), other, six}
	v := seen(aService(same), all, place{node: "n1"}, false)
	var got []string
	for _, b := range v.service.Ports[0].Backends {
		got = append(got, fmt.Sprint(b.ID(), b.Local))
	}
	if fmt.Sprint(got) != "[10.0.0.1:8080 true 10.0.0.1:9090 true 10.0.0.2:9090 false [2001:db8::1]:7 true]" {
		t.Errorf("backends %s", got)
	}
	if v.readyHere != 1 {
		t.Errorf("%d ready here; want 1: a pod, whatever its ports and families", v.readyHere)
	}
}

func TestWhatIsServed(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*core.Service)
		class  string
		want   bool
	}{
		"LoadBalancer":           {same, "", true},
		"ClusterIP":              {func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP }, "", false},
		"of another class":       {func(s *core.Service) { s.Spec.LoadBalancerClass = ptr("x/y") }, "", false},
		"of our class":           {func(s *core.Service) { s.Spec.LoadBalancerClass = ptr("x/y") }, "x/y", true},
		"of none, and we of one": {same, "x/y", false},
		"another's proxy":        {func(s *core.Service) { s.Labels = map[string]string{labelProxyName: ""} }, "", false},
		"headless by label":      {func(s *core.Service) { s.Labels = map[string]string{labelHeadless: ""} }, "", false},
		"headless":               {func(s *core.Service) { s.Spec.ClusterIP = core.ClusterIPNone }, "", false},
	} {
		s := aService(tt.change)
		if got := handled(s) && ours(s, tt.class); got != tt.want {
			t.Errorf("%s: served %t; want %t", name, got, tt.want)
		}
	}
	proxied := aService(func(s *core.Service) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, core.LoadBalancerIngress{IP: "203.0.113.11", IPMode: ptr(core.LoadBalancerIPModeProxy)}, core.LoadBalancerIngress{Hostname: "x"})
	})
	if got := addressesOf(proxied); fmt.Sprint(got) != "[203.0.113.10]" {
		t.Errorf("addresses %v; those of ipMode Proxy are not for nodes", got)
	}
}

// With tunnels a node is told which others may have flows. Under Local it gives traffic to them only where an address is shared.
func TestMachines(t *testing.T) {
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	at := place{node: "n1", nodes: map[string]netip.Addr{"n1": addr("192.0.2.1"), "n2": addr("192.0.2.2"), "n3": addr("192.0.2.3")}}
	here, elsewhere := ep("10.0.0.1", "n1", "rs"), []discovery.Endpoint{ep("10.0.0.2", "n2", "rs"), ep("10.0.0.3", "n3", "st")}
	for _, tt := range []struct {
		name      string
		change    func(*core.Service)
		shared    bool
		endpoints []discovery.Endpoint
		targets   string
		anywhere  bool
		machines  string
	}{
		{"Cluster", same, false, append(elsewhere, here), "[192.0.2.1! 192.0.2.2]", false, "[192.0.2.3 192.0.2.1! 192.0.2.2]"},
		{"Cluster, with hints", same, false, []discovery.Endpoint{ep("10.0.0.1", "n1", "rs", "n:n1"), ep("10.0.0.2", "n2", "rs", "n:n2")}, "[192.0.2.1!]", true, "[192.0.2.1! 192.0.2.2]"},
		{"Cluster, a node is gone", same, false, []discovery.Endpoint{here, ep("10.0.0.9", "n9", "rs")}, "[192.0.2.1!]", false, "[192.0.2.1!]"},
		{"Cluster, all nodes are gone", same, false, []discovery.Endpoint{ep("10.0.0.9", "n9", "rs")}, "[]", false, "[]"},
		{"Cluster, written by hand", same, false, []discovery.Endpoint{here, {Addresses: []string{"10.0.0.9"}}}, "[]", false, "[]"},
		{"Local", local, false, append(elsewhere, here), "[192.0.2.1!]", true, "[192.0.2.3 192.0.2.1! 192.0.2.2]"},
		{"Local, none here", local, false, elsewhere, "[]", true, "[192.0.2.3 192.0.2.2]"},
		{"Local, none here, and the address is shared", local, true, elsewhere, "[192.0.2.2]", true, "[192.0.2.3 192.0.2.2]"},
		{"Local, one here, and the address is shared", local, true, append(elsewhere, here), "[192.0.2.1!]", true, "[192.0.2.3 192.0.2.1! 192.0.2.2]"},
	} {
		v := seen(aService(tt.change), []*discovery.EndpointSlice{slice(8080, tt.endpoints...)}, at, tt.shared)
		var targets, machines []string
		for _, f := range lb.Build(v.service, nil, lb.Drains{}).Frontends {
			if !f.NodeForwarding.Enabled {
				continue
			}
			for _, x := range f.Targets {
				targets = append(targets, x.Addr.Addr().String()+map[bool]string{true: "!"}[x.Local])
			}
			for _, m := range f.Nodes {
				machines = append(machines, m.Addr.String()+map[bool]string{true: "!"}[m.Local])
			}
			if f.NodeForwarding.AnyNode != tt.anywhere {
				t.Errorf("%s: anywhere is %t", tt.name, f.NodeForwarding.AnyNode)
			}
		}
		if fmt.Sprint(targets) != tt.targets || fmt.Sprint(machines) != tt.machines {
			t.Errorf("%s: targets %v of machines %v; want %s of %s", tt.name, targets, machines, tt.targets, tt.machines)
		}
	}
}

func seen(s *core.Service, endpoints []*discovery.EndpointSlice, at place, shared bool) *view {
	return translate(s, addressesOf(s), endpoints, at, shared)
}
