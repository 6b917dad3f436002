package lb

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// planText returns one line per frontend (targets with weight and "!" for local ones, then down backends) and per VIP.
func planText(p *Plan) string {
	var b strings.Builder
	for _, f := range p.Frontends {
		fmt.Fprintf(&b, "%s %s", f.Frontend, f.Method)
		for _, x := range f.Targets {
			fmt.Fprintf(&b, " %s*%d%s", x.Addr, x.Weight, map[bool]string{true: "!"}[x.Local])
		}
		if len(f.Down) > 0 {
			fmt.Fprintf(&b, " down %v", f.Down)
		}
		if f.NodeForwarding.Enabled {
			fmt.Fprintf(&b, " nodes %d any %t", len(f.Nodes), f.NodeForwarding.AnyNode)
		}
		b.WriteString("\n")
	}
	for _, v := range p.VIPs {
		fmt.Fprintf(&b, "%s: %d %q\n", v.VIP, v.Healthy, v.Reason)
	}
	return b.String()
}

// states returns results for backends in order, each for all of its ports: h is healthy, u is unhealthy, anything else
// means no result.
func states(s *Service, results string) map[CheckKey]Health {
	out := map[CheckKey]Health{}
	number := map[netip.AddrPort]int{}
	s.eachChecked(func(key CheckKey, b Backend) {
		i, ok := number[b.ID()]
		if !ok {
			i = len(number)
			number[b.ID()] = i
		}
		if i < len(results) && strings.ContainsRune("hu", rune(results[i])) {
			state := map[byte]State{'h': StateHealthy, 'u': StateUnhealthy}[results[i]]
			out[key] = Health{State: state, Weight: -1}
		}
	})
	return out
}

func TestBuild(t *testing.T) {
	for _, tt := range []struct {
		name    string
		change  func(*Service)
		results string
		drains  Drains
		want    string
	}{
		{"healthy, unhealthy and unknown backends", func(*Service) {}, "hu?", Drains{},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1 down [10.0.0.2:8080]\n203.0.113.10: 1 \"\"\n"},
		{"a backend of the other family is skipped, the next one is used", func(s *Service) {
			s.Ports[0].Backends = backends("2001:db8::1", "10.0.0.1")
		}, "hh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1\n203.0.113.10: 1 \"\"\n"},
		{"a deleted backend is down, the next one is used", func(s *Service) {
			s.Ports[0].Backends[0].Deleted = true
		}, "hhh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.2:8080*1 10.0.0.3:8080*1 down [10.0.0.1:8080]\n" +
			"203.0.113.10: 2 \"\"\n"},
		{"draining and weight 0: no new flows, existing ones stay", func(s *Service) {
			s.Ports[0].Backends[0].Drain, s.Ports[0].Backends[1].Weight = true, 0
		}, "hhh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.3:8080*1\n203.0.113.10: 1 \"\"\n"},
		{"weights, and targets sorted by address", func(s *Service) {
			s.Ports[0].Backends = backends("10.0.0.9", "10.0.0.1")
			s.Ports[0].Backends[0].Weight, s.Ports[0].Backends[1].Local = 7, true
		}, "hh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1! 10.0.0.9:8080*7\n203.0.113.10: 2 \"\"\n"},
		{"without check", func(s *Service) { s.Check.Type = CheckNone }, "u??", Drains{},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1 10.0.0.2:8080*1 10.0.0.3:8080*1\n203.0.113.10: 3 \"\"\n"},
		{"fewer than min_healthy; a deleted backend does not count", func(s *Service) {
			s.MinHealthy, s.Ports[0].Backends[2].Deleted = 2, true
		}, "hu?", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1 down [10.0.0.2:8080 10.0.0.3:8080]\n" +
			"203.0.113.10: 1 \"1 of 2 backends healthy, min_healthy is 2\"\n"},
		{"fewer than min_healthy, because of a weight", func(s *Service) {
			s.MinHealthy, s.Ports[0].Backends[1].Weight = 3, 0
		}, "hhh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1 10.0.0.3:8080*1\n" +
			"203.0.113.10: 2 \"3 of 3 backends healthy, 1 of them with weight 0, min_healthy is 3\"\n"},
		{"min_healthy 0 means 1", func(s *Service) { s.MinHealthy = 0 }, "???", Drains{},
			"203.0.113.10:80/tcp nat\n203.0.113.10: 0 \"0 of 3 backends healthy, min_healthy is 1\"\n"},
		{"as many as min_healthy", func(s *Service) { s.MinHealthy = 2 }, "hh?", Drains{},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1 10.0.0.2:8080*1\n203.0.113.10: 2 \"\"\n"},
		{"withheld by the source", func(s *Service) { s.WithholdReason = "no" }, "h??", Drains{},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1\n203.0.113.10: 1 \"no\"\n"},
		{"service drained", func(*Service) {}, "h??", Drains{Services: []string{"web"}},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1\n203.0.113.10: 1 \"drained by the operator\"\n"},
		{"another service drained", func(*Service) {}, "h??", Drains{Services: []string{"mail"}},
			"203.0.113.10:80/tcp nat 10.0.0.1:8080*1\n203.0.113.10: 1 \"\"\n"},
		{"node drained, and a reason of its own", func(*Service) {}, "???", Drains{Node: true},
			"203.0.113.10:80/tcp nat\n203.0.113.10: 0 \"0 of 3 backends healthy, min_healthy is 1\"\n"},
		{"ports with other backends: the best one counts", func(s *Service) {
			s.Ports = append(s.Ports, ServicePort{Port: Port{53, 0, 53, UDP}, Backends: backends("10.0.0.1")})
		}, "hh?", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1 10.0.0.2:8080*1\n" +
			"203.0.113.10:53/udp nat 10.0.0.1:53*1\n203.0.113.10: 2 \"\"\n"},
		{"two VIPs", func(s *Service) {
			s.VIPs = append(s.VIPs, testVIP6)
			s.Ports[0].Backends = backends("10.0.0.1", "2001:db8::1", "2001:db8::2")
		}, "hhh", Drains{}, "203.0.113.10:80/tcp nat 10.0.0.1:8080*1\n" +
			"[2001:db8::10]:80/tcp nat [2001:db8::1]:8080*1 [2001:db8::2]:8080*1\n" +
			"203.0.113.10: 1 \"\"\n2001:db8::10: 2 \"\"\n"},
		{"a tunnel uses the other family when its own has no backend", func(s *Service) {
			s.Method, s.VIPs = MethodTunnel, []netip.Addr{testVIP, testVIP6}
		}, "h??", Drains{}, "203.0.113.10:80/tcp tunnel 10.0.0.1:8080*1\n" +
			"[2001:db8::10]:80/tcp tunnel 10.0.0.1:8080*1\n" +
			"203.0.113.10: 1 \"\"\n2001:db8::10: 1 \"\"\n"},
		{"a tunnel uses its own family when that has a backend", func(s *Service) {
			s.Method, s.VIPs, s.Ports[0].Backends[2] = MethodTunnel, []netip.Addr{testVIP6}, backend("2001:db8::1")
		}, "hhh", Drains{}, "[2001:db8::10]:80/tcp tunnel [2001:db8::1]:8080*1\n2001:db8::10: 1 \"\"\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &Service{
				Name: "web", VIPs: []netip.Addr{testVIP}, Algorithm: AlgorithmMaglev, Method: MethodNAT, MinHealthy: 1,
				Ports: PortsOn(backends("10.0.0.1", "10.0.0.2", "10.0.0.3"), Port{80, 0, 8080, TCP}),
				Check: CheckSpec{Type: CheckTCP},
			}
			tt.change(s)
			must.Equal(t, tt.want, planText(Build(s, states(s, tt.results), tt.drains)))
		})
	}
}

// With node forwarding each port has a frontend that delivers to local backends, and one that chooses a node.
func TestBuildNodeForwarding(t *testing.T) {
	n1, n2 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	list := backends("10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080", "10.0.0.4:8080")
	list[0].Node, list[0].Local = n1, true
	list[1].Node, list[2].Node, list[3].Node, list[3].Deleted = n2, n2, n2, true
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, Ports: PortsOn(list, Port{80, 0, 80, TCP}, Port{80, 0, 80, UDP}),
		NodeForwarding: NodeForwarding{Enabled: true, AnyNode: true}, Algorithm: AlgorithmMaglev, Method: MethodNAT,
		Allow: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Affinity: time.Hour,
		Check: CheckSpec{Type: CheckNone},
	}
	s.Ports[0].Nodes = []Node{{n2, false}, {n1, true}}
	p := Build(s, nil, Drains{})
	want := `203.0.113.10:80/tcp (decap) nat 10.0.0.1:8080*1! down [10.0.0.4:8080]
203.0.113.10:80/tcp tunnel 192.0.2.1:0*1! 192.0.2.2:0*2 nodes 2 any true
203.0.113.10:80/udp (decap) nat 10.0.0.1:8080*1! down [10.0.0.4:8080]
203.0.113.10:80/udp tunnel 192.0.2.1:0*1! 192.0.2.2:0*2 nodes 0 any false
203.0.113.10: 3 ""
`
	must.Equal(t, want, planText(p))
	decap, node := p.Frontends[0], p.Frontends[1]
	must.True(t, len(decap.Allow) == 1 && decap.DropWhenEmpty && decap.Affinity == time.Hour,
		"decap frontend %+v; want the list of sources, dropping, affinity", decap)
	must.True(t, len(node.Allow) == 1 && !node.DropWhenEmpty && node.Affinity == time.Hour && node.Encap == EncapGUE &&
		node.Algorithm == AlgorithmSourceHash,
		"node frontend %+v; want the list of sources, GUE by the source's hash without affinity", node)
}

func TestUnrestrictedVIPs(t *testing.T) {
	other := netip.MustParseAddr("203.0.113.11")
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP, other}, UnrestrictedVIPs: []netip.Addr{other},
		Algorithm: AlgorithmMaglev,
		Allow:     []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Ports: PortsOn(nil, Port{80, 0, 80, TCP}),
	}
	p := Build(s, nil, Drains{})
	must.Row(t, "allowed sources", s.Allow, p.Frontends[0].Allow)
	must.Row(t, "of the unrestricted VIP", nil, p.Frontends[1].Allow)
}

// A weight that a backend reports replaces the configured one only with the check of Kubernetes' node ports, up to the
// same limit, so that the sum of all weights cannot overflow. No weight is more than four times the median of the
// others. A draining backend does not count, and one with the configured weight 0 keeps it.
func TestReportedWeight(t *testing.T) {
	for _, tt := range []struct {
		check    CheckType
		reported int
		want     string
	}{
		{CheckNodePort, 5, "10.0.0.1:80*5"}, {CheckNodePort, -1, "10.0.0.1:80*1"}, {CheckNodePort, 0, ""},
		{CheckHTTP, 5, "10.0.0.1:80*1"}, {CheckNodePort, math.MaxInt, "10.0.0.1:80*1000"},
	} {
		s := &Service{
			Name: "web", VIPs: []netip.Addr{testVIP}, Algorithm: AlgorithmMaglev, Check: CheckSpec{Type: tt.check},
			Ports: PortsOn(backends("10.0.0.1"), Port{80, 0, 80, TCP}),
		}
		key := keyOf(s, s.Ports[0].Backends[0], s.Ports[0].Port)
		h := map[CheckKey]Health{key: {State: StateHealthy, Weight: tt.reported}}
		got := ""
		for _, x := range Build(s, h, Drains{}).Frontends[0].Targets {
			got += fmt.Sprintf("%s*%d", x.Addr, x.Weight)
		}
		must.True(t, got == tt.want, "%s reports %d: targets %q; want %q", tt.check, tt.reported, got, tt.want)
	}
}

func TestReportedWeightsAreBounded(t *testing.T) {
	for _, tt := range []struct {
		reported []int // -1: no weight, -2: drains, -3: the configured weight is 0
		want     string
	}{
		{[]int{3, 3, 3}, "[3 3 3]"}, {[]int{3, 3, 1000}, "[3 3 12]"}, {[]int{1, 1000}, "[1 4]"},
		{[]int{2, 3, 8, 10}, "[2 3 8 10]"}, {[]int{1, 1, 1000, 1000}, "[1 1 4 4]"}, {[]int{0, 1000}, "[1000]"},
		{[]int{-1, 1000}, "[1 4]"}, {[]int{-2, 1000}, "[1000]"}, {[]int{-3, 5}, "[5]"}, {[]int{5, 5, 20}, "[5 5 20]"},
	} {
		s := &Service{
			Name: "web", VIPs: []netip.Addr{testVIP}, Algorithm: AlgorithmMaglev, Check: CheckSpec{Type: CheckNodePort},
			Ports: PortsOn(backends("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), Port{80, 0, 80, TCP}),
		}
		s.Ports[0].Backends = s.Ports[0].Backends[:len(tt.reported)]
		h := map[CheckKey]Health{}
		for i, weight := range tt.reported {
			b := &s.Ports[0].Backends[i]
			state := Health{State: StateHealthy, Weight: max(weight, -1)}
			switch weight {
			case -2:
				state.State = StateDraining
			case -3:
				b.Weight, state.Weight = 0, 1000
			}
			h[keyOf(s, *b, s.Ports[0].Port)] = state
		}
		var got []int
		for _, x := range Build(s, h, Drains{}).Frontends[0].Targets {
			got = append(got, x.Weight)
		}
		must.True(t, fmt.Sprint(got) == tt.want, "reported %v: weights %v; want %s", tt.reported, got, tt.want)
	}
}

// A backend that reports that it takes no new flows keeps its existing ones: it is neither a target nor down. If all
// do, on_all_down = "keep" uses them, and by default the address is withdrawn. If none answers, both use all.
func TestDrainingBackends(t *testing.T) {
	for _, tt := range []struct {
		name    string
		a, b    State
		keep    bool // on_all_down = "keep"
		targets string
		down    int
		reason  string
	}{
		{"one drains", StateHealthy, StateDraining, false, "[10.0.0.1:80]", 0, ""},
		{"one drains, the other is down", StateDraining, StateUnhealthy, false, "[]", 1,
			"0 of 2 backends healthy, min_healthy is 1"},
		{"the same, and keep", StateDraining, StateUnhealthy, true, "[10.0.0.1:80]", 1, ""},
		{"both are down", StateUnhealthy, StateUnhealthy, false, "[10.0.0.1:80 10.0.0.2:80]", 0, ""},
		{"both are down, and keep", StateUnhealthy, StateUnhealthy, true, "[10.0.0.1:80 10.0.0.2:80]", 0, ""},
	} {
		s := &Service{
			Name: "web", VIPs: []netip.Addr{testVIP}, Algorithm: AlgorithmMaglev, KeepAllDown: tt.keep,
			KeepUnanswered: !tt.keep, Check: CheckSpec{Type: CheckNodePort},
			Ports: PortsOn(backends("10.0.0.1", "10.0.0.2"), Port{80, 0, 80, TCP}),
		}
		h := map[CheckKey]Health{}
		for i, state := range []State{tt.a, tt.b} {
			h[keyOf(s, s.Ports[0].Backends[i], s.Ports[0].Port)] = Health{State: state, Weight: -1}
		}
		p := Build(s, h, Drains{})
		var to []netip.AddrPort
		for _, x := range p.Frontends[0].Targets {
			to = append(to, x.Addr)
		}
		must.True(t, fmt.Sprint(to) == tt.targets && len(p.Frontends[0].Down) == tt.down &&
			p.VIPs[0].Reason == tt.reason, "%s: targets %v, down %v, reason %q; want %s, %d, %q", tt.name, to,
			p.Frontends[0].Down, p.VIPs[0].Reason, tt.targets, tt.down, tt.reason)
	}
}

// Every field that the datapath reads makes two plans differ.
func TestFrontendPlanEqual(t *testing.T) {
	full := func() *FrontendPlan {
		return &FrontendPlan{
			Frontend: Frontend{VIP: testVIP, Port: 80, Protocol: TCP}, Service: "web",
			Method: MethodNAT, Encap: EncapGUE, Algorithm: AlgorithmMaglev, Affinity: time.Second,
			Allow:   []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			Targets: targets(1, 2), Nodes: []Node{{Addr: testVIP}},
			Down: []netip.AddrPort{netip.AddrPortFrom(testVIP, 1)},
		}
	}
	must.True(t, full().Equal(full()), "a plan is not equal to itself")
	for name, change := range map[string]func(*FrontendPlan){
		"frontend":        func(f *FrontendPlan) { f.Decap = true },
		"service":         func(f *FrontendPlan) { f.Service = "mail" },
		"method":          func(f *FrontendPlan) { f.Method = MethodDSR },
		"encap":           func(f *FrontendPlan) { f.Encap = EncapIPIP },
		"algorithm":       func(f *FrontendPlan) { f.Algorithm = AlgorithmRandom },
		"affinity":        func(f *FrontendPlan) { f.Affinity = 0 },
		"allow":           func(f *FrontendPlan) { f.Allow = nil },
		"keep source":     func(f *FrontendPlan) { f.KeepSource = true },
		"drop when empty": func(f *FrontendPlan) { f.DropWhenEmpty = true },
		"target":          func(f *FrontendPlan) { f.Targets[1].Weight = 3 },
		"node forwarding": func(f *FrontendPlan) { f.NodeForwarding.Enabled = true },
		"any node":        func(f *FrontendPlan) { f.NodeForwarding.AnyNode = true },
		"nodes":           func(f *FrontendPlan) { f.Nodes[0].Local = true },
		"down":            func(f *FrontendPlan) { f.Down = nil },
	} {
		f := full()
		change(f)
		must.True(t, !f.Equal(full()) && !full().Equal(f), "a plan with another %s is equal", name)
	}
}

// With KeepAllDown, backends that exist serve although their checks fail, and the VIP has a lower preference.
func TestKeepAllDown(t *testing.T) {
	backend := func(last byte, change func(*Backend)) Backend {
		b := Backend{Addr: netip.AddrFrom4([4]byte{10, 0, 0, last}), Weight: 1}
		change(&b)
		return b
	}
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, MinHealthy: 2, KeepAllDown: true, Check: CheckSpec{Type: CheckTCP},
		Ports: PortsOn([]Backend{
			backend(1, func(*Backend) {}), backend(2, func(*Backend) {}),
			backend(3, func(b *Backend) { b.Drain = true }), backend(4, func(b *Backend) { b.Deleted = true }),
		}, Port{Port: 80, Target: 80, Protocol: TCP}),
	}
	for _, tt := range []struct {
		results       string
		targets, down int
		lower         string
	}{
		{"hhhh", 2, 1, ""}, {"uhhh", 1, 2, "1 of 3 backends healthy, min_healthy is 2"},
		{"uuuu", 2, 2, "0 of 3 backends healthy, min_healthy is 2"},
	} {
		p := Build(s, states(s, tt.results), Drains{})
		f, v := p.Frontends[0], p.VIPs[0]
		must.True(t, len(f.Targets) == tt.targets && len(f.Down) == tt.down && v.Reason == "" &&
			v.LowerPreference == tt.lower && v.Healthy >= 1,
			"%s: targets %v, down %v, %+v", tt.results, f.Targets, f.Down, v)
	}
	s.KeepAllDown = false
	v := Build(s, states(s, "uuuu"), Drains{}).VIPs[0]
	must.True(t, v.Reason != "" && v.LowerPreference == "", "without it: %+v", v)
}

// Where each port is checked, the first port decides whether the VIP is announced.
func TestFirstPortDecides(t *testing.T) {
	web, tls := Port{80, 0, 80, TCP}, Port{443, 0, 443, TCP}
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, Method: MethodNAT, MinHealthy: 1,
		Ports: PortsOn(backends("10.0.0.1"), web, tls), Check: CheckSpec{Type: CheckTCP, ServicePort: web},
	}
	for _, tt := range []struct {
		first, second State
		announced     bool
	}{
		{StateHealthy, StateHealthy, true},
		{StateHealthy, StateUnhealthy, true},
		{StateUnhealthy, StateHealthy, false},
		{StateUnknown, StateHealthy, false},
	} {
		states := map[CheckKey]Health{
			keyOf(s, s.Ports[0].Backends[0], web): {State: tt.first, Weight: -1},
			keyOf(s, s.Ports[1].Backends[0], tls): {State: tt.second, Weight: -1},
		}
		reason := Build(s, states, Drains{}).VIPs[0].Reason
		must.True(t, (reason == "") == tt.announced, "%v, %v: %q", tt.first, tt.second, reason)
	}
}

// A VIP in a different pool from the others has its own announcers and reason.
func TestRulePerVIP(t *testing.T) {
	vips := addrs("203.0.113.1", "203.0.113.2", "203.0.113.3")
	a, b, c := vips[0], vips[1], vips[2]
	s := &Service{
		Name: "web", VIPs: []netip.Addr{a, b, c}, Announce: []AnnouncerKind{AnnounceL2},
		Ports:  PortsOn([]Backend{{Addr: netip.MustParseAddr("10.0.0.1"), Weight: 1}}, Port{Port: 80, Target: 80}),
		Check:  CheckSpec{Type: CheckNone},
		PerVIP: map[netip.Addr]VIPRule{a: {Announce: []AnnouncerKind{AnnounceBGP}}, b: {WithholdReason: "no pool"}},
	}
	plan := Build(s, nil, Drains{})
	got := fmt.Sprintf("%q %q %q", plan.VIPs[0].Reason, plan.VIPs[1].Reason, plan.VIPs[2].Reason)
	must.Equal(t, `"" "no pool" ""`, got)
	must.Equal(t, "[bgp] [] [l2]", fmt.Sprint(s.announcers(a), s.announcers(b), s.announcers(c)))
}

// With KeepDown, an unhealthy backend keeps its flows, including those that an earlier agent left, until it is deleted.
func TestKeepDown(t *testing.T) {
	all := backends("10.0.0.1", "10.0.0.2", "10.0.0.3")
	all[2].Deleted = true
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, KeepDown: true, Check: CheckSpec{Type: CheckTCP},
		Ports: PortsOn(all, Port{Port: 80, Target: 80, Protocol: TCP}),
	}
	s.Ports[0].Kept = []netip.AddrPort{}
	for keep, want := range map[bool]string{
		true: "[10.0.0.1:80] [10.0.0.3:80]", false: "[] [10.0.0.1:80 10.0.0.3:80]",
	} {
		s.KeepDown = keep
		f := Build(s, states(s, "uhh"), Drains{}).Frontends[0]
		must.Row(t, fmt.Sprintf("KeepDown %t: kept and down", keep), want, fmt.Sprint(f.Kept, f.Down))
		must.True(t, len(f.Targets) == 1, "KeepDown %t: targets %v", keep, f.Targets)
	}
}
