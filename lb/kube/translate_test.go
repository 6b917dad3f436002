package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// ep returns an endpoint with the conditions in flags, r (ready), s (serving) and t (terminating), and with the hints
// n:NODE and z:ZONE.
func ep(addr, node string, flags string, hints ...string) discovery.Endpoint {
	has := func(f byte) *bool { return new(slices.Contains([]byte(flags), f)) }
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
	s.Ports = []discovery.EndpointPort{{Name: new("http"), Port: &port, Protocol: new(core.ProtocolTCP)}}
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

func same(*core.Service)    {}
func local(s *core.Service) { s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal }

func sticky(s *core.Service) { s.Spec.SessionAffinity = core.ServiceAffinityClientIP }

func stickyLocal(s *core.Service) {
	local(s)
	sticky(s)
}

// The choice of endpoints is kube-proxy's (pkg/proxy/topology_test.go has the same cases).
func TestChoiceOfEndpoints(t *testing.T) {
	const a, b, c = "10.0.0.1", "10.0.0.2", "10.0.0.3"
	type eps = []discovery.Endpoint
	for _, tt := range []struct {
		name       string
		change     func(*core.Service)
		endpoints  eps
		want       string // addresses; "!" follows those on this node
		drop       bool
		readyLocal int
	}{
		{"ready", same, eps{ep(a, "n1", "rs"), ep(b, "n2", "rs"), ep(c, "n2", "")}, "10.0.0.1! 10.0.0.2", false, 1},
		{"no condition means ready", same, eps{{Addresses: []string{a}}}, "10.0.0.1", false, 0},
		{"a ready one and a terminating one", same, eps{ep(a, "n1", "st"), ep(b, "n2", "rs")}, "10.0.0.2", false, 0},
		{"none is ready: serving and terminating ones", same,
			eps{ep(a, "n1", "st"), ep(b, "n2", "st"), ep(c, "n2", "t")}, "10.0.0.1! 10.0.0.2", false, 0},
		{"serving, neither ready nor terminating", same, eps{ep(a, "n1", "s")}, "", false, 0},
		{"no address", same, eps{{NodeName: new("n1")}, {Addresses: []string{"pod.example"}}}, "", false, 0},
		{"Local", local, eps{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, "10.0.0.1!", false, 1},
		{"Local, a terminating one here", local, eps{ep(a, "n1", "st"), ep(b, "n2", "rs")}, "10.0.0.1!", false, 0},
		{"Local, on other nodes only", local, eps{ep(b, "n2", "rs")}, "", true, 0},
		{"Local, on other nodes only, terminating", local, eps{ep(b, "n2", "st")}, "", true, 0},
		{"Local, none", local, nil, "", false, 0},
		{"Local, none usable", local, eps{ep(a, "n1", ""), ep(b, "n2", "s")}, "", false, 0},
		{"hints for zones", same, eps{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs", "z:z1")}, "10.0.0.2", false, 1},
		{"hints for nodes come first", same,
			eps{ep(a, "n1", "rs", "z:z2", "n:n1"), ep(b, "n2", "rs", "z:z1", "n:n2")}, "10.0.0.1!", false, 1},
		{"no hint for this node, one for its zone", same,
			eps{ep(a, "n1", "rs", "z:z2", "n:n3"), ep(b, "n2", "rs", "z:z1", "n:n2")}, "10.0.0.2", false, 1},
		{"not all have hints", same, eps{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs")}, "10.0.0.1! 10.0.0.2", false, 1},
		{"no hint for this zone", same, eps{ep(a, "n1", "rs", "z:z3"), ep(b, "n2", "rs", "z:z2")},
			"10.0.0.1! 10.0.0.2", false, 1},
		{"Local ignores hints", local, eps{ep(a, "n1", "rs", "z:z2"), ep(b, "n2", "rs", "z:z1")},
			"10.0.0.1!", false, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			endpoints := []*discovery.EndpointSlice{slice(8080, tt.endpoints...)}
			v := viewOn(aService(tt.change), endpoints, topology{node: "n1", zone: "z1"}, false)
			got := marked(v.service.Ports[0].Backends, func(b lb.Backend) (netip.Addr, bool) { return b.Addr, b.Local })
			drop := len(v.service.Ports[0].DropWhenEmpty) > 0
			must.True(t, got == tt.want && drop == tt.drop && v.readyLocal == tt.readyLocal,
				"%q, drop %t, %d ready here; want %q, %t, %d", got, drop, v.readyLocal, tt.want, tt.drop, tt.readyLocal)
		})
	}
}

// marked lists addresses, with "!" after local ones.
func marked[T any](all []T, of func(T) (addr netip.Addr, local bool)) string {
	var list []string
	for _, x := range all {
		addr, local := of(x)
		list = append(list, addr.String()+map[bool]string{true: "!"}[local])
	}
	return strings.Join(list, " ")
}

// Ports are matched by name and protocol, may differ from endpoint to endpoint, and an address counts once.
func TestSeveralSlices(t *testing.T) {
	other := slice(9090, ep("10.0.0.2", "n2", "rs"), ep("10.0.0.1", "n1", "rs"))
	other.Ports = append(other.Ports,
		discovery.EndpointPort{Name: new("admin"), Port: new(int32(1)), Protocol: new(core.ProtocolTCP)},
		discovery.EndpointPort{Name: new("http"), Port: new(int32(2)), Protocol: new(core.ProtocolUDP)},
		discovery.EndpointPort{Name: new("http"), Port: new(int32(0))}, discovery.EndpointPort{Name: new("http")},
		discovery.EndpointPort{Port: new(int32(3))})
	six := slice(7, ep("2001:db8::1", "n1", "rs"))
	six.AddressType = discovery.AddressTypeIPv6
	all := []*discovery.EndpointSlice{slice(8080, ep("10.0.0.1", "n1", "s"), ep("10.0.0.1", "n1", "rs")), other, six}
	v := viewOn(aService(same), all, topology{node: "n1"}, false)
	var got []string
	for _, b := range v.service.Ports[0].Backends {
		got = append(got, fmt.Sprint(b.ID(), b.Local))
	}
	must.Row(t, "backends", "[10.0.0.1:8080 true 10.0.0.1:9090 true 10.0.0.2:9090 false [2001:db8::1]:7 true]",
		fmt.Sprint(got))
	must.Row(t, "ready here: a pod with two ports and two families counts once", 1, v.readyLocal)
}

func TestServedServices(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*core.Service)
		class  string
		want   bool
	}{
		"LoadBalancer":        {same, "", true},
		"ClusterIP":           {func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP }, "", false},
		"other class":         {func(s *core.Service) { s.Spec.LoadBalancerClass = new("x/y") }, "", false},
		"same class":          {func(s *core.Service) { s.Spec.LoadBalancerClass = new("x/y") }, "x/y", true},
		"class only of agent": {same, "x/y", false},
		"of another proxy":    {func(s *core.Service) { s.Labels = map[string]string{labelProxyName: ""} }, "", false},
		"headless by label":   {func(s *core.Service) { s.Labels = map[string]string{labelHeadless: ""} }, "", false},
		"headless":            {func(s *core.Service) { s.Spec.ClusterIP = core.ClusterIPNone }, "", false},
		"without ports":       {func(s *core.Service) { s.Spec.Ports = nil }, "", false},
	} {
		s := aService(tt.change)
		must.Row(t, name+": served", tt.want, handled(s) && matchesClass(s, tt.class))
	}
	must.True(t, !handled(aService(func(s *core.Service) { s.Spec.Type = core.ServiceTypeExternalName })),
		"ExternalName: served")
}

func TestAddressesOfService(t *testing.T) {
	s := aService(func(s *core.Service) {
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{
			{IP: "203.0.113.10"}, {IP: "203.0.113.11", IPMode: new(core.LoadBalancerIPModeProxy)}, {Hostname: "x"},
			{IP: "2001:db8::1", IPMode: new(core.LoadBalancerIPModeVIP)}, {IP: "203.0.113.10"},
		}
		s.Spec.ExternalIPs = []string{"198.51.100.1", "x", "198.51.100.2", "198.51.100.1"}
	})
	must.Row(t, "addresses; those with the ipMode Proxy are not for nodes", "[203.0.113.10 2001:db8::1]",
		fmt.Sprint(addressesOf(s)))
	must.Row(t, "external IPs", "[198.51.100.1 198.51.100.2]", fmt.Sprint(externalIPsOf(s)))
}

func TestAffinityOfService(t *testing.T) {
	for _, tt := range []struct {
		name     string
		affinity core.ServiceAffinity
		config   *core.SessionAffinityConfig
		want     time.Duration
	}{
		{"unset", "", nil, 0},
		{"None", core.ServiceAffinityNone, &core.SessionAffinityConfig{}, 0},
		{"no timeout", core.ServiceAffinityClientIP, nil, 3 * time.Hour},
		{"no clientIP", core.ServiceAffinityClientIP, &core.SessionAffinityConfig{}, 3 * time.Hour},
		{"no timeoutSeconds", core.ServiceAffinityClientIP,
			&core.SessionAffinityConfig{ClientIP: &core.ClientIPConfig{}}, 3 * time.Hour},
		{"timeout", core.ServiceAffinityClientIP,
			&core.SessionAffinityConfig{ClientIP: &core.ClientIPConfig{TimeoutSeconds: new(int32(60))}}, time.Minute},
	} {
		s := aService(func(s *core.Service) {
			s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = tt.affinity, tt.config
		})
		must.Row(t, tt.name, tt.want, viewOn(s, nil, topology{}, false).service.Affinity)
	}
}

func TestAllowedSources(t *testing.T) {
	for _, tt := range []struct {
		ranges []string
		want   string
	}{
		{nil, "[]"},
		{[]string{"x"}, "[]"},
		{[]string{" 192.0.2.1/24 ", "010.1.0.0/8", "::ffff:9.1.0.0/104"}, "[192.0.2.0/24 10.0.0.0/8 9.0.0.0/8 ::/0]"},
		{[]string{"2001:db8::1/32"}, "[2001:db8::/32 0.0.0.0/0]"},
		{[]string{"2001:db8::/32", "192.0.2.0/24"}, "[2001:db8::/32 192.0.2.0/24]"},
	} {
		s := aService(func(s *core.Service) { s.Spec.LoadBalancerSourceRanges = tt.ranges })
		must.Row(t, tt.ranges, tt.want, fmt.Sprint(viewOn(s, nil, topology{}, false).service.Allow))
	}
}

// Settings that do not depend on the node are the same for all Services.
func TestViewHasFixedFields(t *testing.T) {
	s := aService(func(s *core.Service) {
		s.Spec.Ports = []core.ServicePort{
			{Name: "http", Port: 80}, {Port: 9, Protocol: "X"}, {Port: 53, Protocol: "UDP"},
		}
	})
	got := *viewOn(s, nil, topology{node: "n1"}, false).service
	want := lb.Service{
		Name: webName, Source: Name, VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Policy: lb.PolicyCluster, MinHealthy: 1,
		Check: lb.CheckSpec{Type: lb.CheckNone},
		Ports: []lb.ServicePort{
			{Port: lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}},
			{Port: lb.Port{Port: 53, Target: 53, Protocol: lb.UDP}},
		},
	}
	must.Equal(t, fmt.Sprintf("%+v", want), fmt.Sprintf("%+v", got))
}

// With tunnels a node knows which nodes may have flows. Under Local it forwards to other nodes only where an address is
// shared.
func TestNodeForwarding(t *testing.T) {
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	top := topology{node: "n1", nodes: map[string]netip.Addr{
		"n1": addr("192.0.2.1"), "n2": addr("192.0.2.2"), "n3": addr("192.0.2.3"),
	}}
	type eps = []discovery.Endpoint
	here := ep("10.0.0.1", "n1", "rs")
	elsewhere := eps{ep("10.0.0.2", "n2", "rs"), ep("10.0.0.3", "n3", "st")}
	all := append(slices.Clone(elsewhere), here)
	const n1, n2, n12, n321 = "192.0.2.1!", "192.0.2.2", "192.0.2.1! 192.0.2.2", "192.0.2.3 192.0.2.1! 192.0.2.2"
	for _, tt := range []struct {
		name      string
		change    func(*core.Service)
		shared    bool
		endpoints eps
		targets   string
		anyNode   bool
		nodes     string
	}{
		{"Cluster", same, false, all, n12, false, n321},
		{"Cluster, shared address", same, true, all, n12, false, n321},
		{"Cluster, with hints", same, false,
			eps{ep("10.0.0.1", "n1", "rs", "n:n1"), ep("10.0.0.2", "n2", "rs", "n:n2")}, n1, true, n12},
		{"Cluster, a deleted node", same, false, eps{here, ep("10.0.0.9", "n9", "rs")}, n1, false, n1},
		{"Cluster, deleted nodes only", same, false, eps{ep("10.0.0.9", "n9", "rs")}, "", false, ""},
		{"Cluster, written by hand", same, false, eps{here, {Addresses: []string{"10.0.0.9"}}}, "", false, ""},
		{"Local", local, false, all, n1, true, n321},
		{"Local, none here", local, false, elsewhere, "", true, "192.0.2.3 192.0.2.2"},
		{"Local, none here, shared address", local, true, elsewhere, n2, true, "192.0.2.3 192.0.2.2"},
		{"Local, one here, shared address", local, true, all, n1, true, n321},
		{"Cluster, affinity", sticky, false, all, n12, false, n321},
		{"Cluster, affinity: without hints", sticky, false,
			eps{ep("10.0.0.1", "n1", "rs", "n:n1"), ep("10.0.0.2", "n2", "rs", "n:n2")}, n12, false, n12},
		{"Local, affinity", stickyLocal, false, all, n12, false, n321},
		{"Local, affinity, none here", stickyLocal, false, elsewhere, n2, false, "192.0.2.3 192.0.2.2"},
		{"Local, affinity, none is ready", stickyLocal, false,
			eps{ep("10.0.0.1", "n1", "st"), ep("10.0.0.2", "n2", "st")}, n12, false, n12},
		{"Local, affinity, a deleted node", stickyLocal, false, eps{here, ep("10.0.0.9", "n9", "rs")}, n1, false, n1},
		{"Local, affinity, deleted nodes only", stickyLocal, false, eps{ep("10.0.0.9", "n9", "rs")}, "", false, ""},
		{"Local, affinity, written by hand", stickyLocal, false, eps{here, {Addresses: []string{"10.0.0.9"}}},
			n1, false, n1},
		{"those that do not serve are last", same, false,
			eps{ep("10.0.0.1", "n1", ""), ep("10.0.0.2", "n2", "rs"), ep("10.0.0.3", "n3", "st")}, n2, false,
			"192.0.2.3 192.0.2.2 192.0.2.1!"},
	} {
		v := viewOn(aService(tt.change), []*discovery.EndpointSlice{slice(8080, tt.endpoints...)}, top, tt.shared)
		var targets, nodes string
		for _, f := range lb.Build(v.service, nil, lb.Drains{}).Frontends {
			if !f.NodeForwarding.Enabled {
				continue
			}
			targets = marked(f.Targets, func(x lb.Target) (netip.Addr, bool) { return x.Addr.Addr(), x.Local })
			nodes = marked(f.Nodes, func(n lb.Node) (netip.Addr, bool) { return n.Addr, n.Local })
			must.Row(t, tt.name+": AnyNode is", tt.anyNode, f.NodeForwarding.AnyNode)
		}
		must.True(t, targets == tt.targets && nodes == tt.nodes,
			"%s: targets %q of nodes %q; want %q of %q", tt.name, targets, nodes, tt.targets, tt.nodes)
	}
}

// Without tunnels there is no forwarding between nodes, even for shared addresses and with affinity.
func TestNoNodeForwardingWithoutTunnels(t *testing.T) {
	endpoints := []*discovery.EndpointSlice{slice(8080, ep("10.0.0.2", "n2", "rs"))}
	for _, change := range []func(*core.Service){local, stickyLocal} {
		s := viewOn(aService(change), endpoints, topology{node: "n1"}, true).service
		p := s.Ports[0]
		must.True(t, !s.NodeForwarding.Enabled && p.Nodes == nil && len(p.Backends) == 0 && len(p.DropWhenEmpty) == 1,
			"%+v", s)
	}
}

// When one node has the address, Local does not exclude endpoints of other nodes, because the client's address is kept.
// Endpoints on unknown nodes would not see it.
func TestLocalIsSpread(t *testing.T) {
	top := topology{node: "n1", nodes: map[string]netip.Addr{
		"n1": netip.MustParseAddr("192.0.2.1"), "n2": netip.MustParseAddr("192.0.2.2"),
	}}
	endpoints := []*discovery.EndpointSlice{
		slice(8080, ep("10.0.0.1", "n1", "rs", "z:z9"), ep("10.0.0.2", "n2", "rs"), ep("10.0.0.9", "n9", "rs")),
	}
	for _, spread := range []bool{false, true} {
		s := aService(local)
		v := translate(s, settings{}, addressesOf(s), slimmed(endpoints), top, false, spread, 10000)
		var targets []string
		isLocal := false
		plan := lb.Build(v.service, nil, lb.Drains{})
		for _, f := range plan.Frontends {
			if f.NodeForwarding.Enabled {
				for _, x := range f.Targets {
					targets = append(targets, x.Addr.Addr().String())
				}
			}
			isLocal = plan.VIPs[0].Local
		}
		slices.Sort(targets)
		want := map[bool]string{false: "[192.0.2.1]", true: "[192.0.2.1 192.0.2.2]"}[spread]
		got := fmt.Sprint(targets)
		must.True(t, got == want && isLocal && v.readyLocal == 1 && v.service.Policy == lb.PolicyLocal,
			"spread %t: targets %s; want %s (%+v)", spread, got, want, v)
	}
}

func viewOn(s *core.Service, endpoints []*discovery.EndpointSlice, top topology, shared bool) *view {
	return translate(s, settings{}, addressesOf(s), slimmed(endpoints), top, shared, false, 10000)
}
