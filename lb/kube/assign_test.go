package kube

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/steelyard-lb/steelyard/lb"
)

// A Service keeps the address that it has, and gets the one that it asks for or an error that says why not.
func TestAssign(t *testing.T) {
	pool := func(name, from, to string, change func(*Pool)) Pool {
		r := lb.AddrRange{From: netip.MustParseAddr(from), To: netip.MustParseAddr(to)}
		p := Pool{Pool: lb.Pool{Name: name, AutoAssign: true, Ranges: []lb.AddrRange{r}}}
		change(&p)
		return p
	}
	none := func(*Pool) {}
	a := newAssigner(nil, []Pool{
		pool("late", "203.0.113.200", "203.0.113.201", func(p *Pool) { p.Priority = 5 }),
		pool("four", "203.0.113.0", "203.0.113.2", func(p *Pool) { p.AvoidBuggy = true }),
		pool("six", "2001:db8::1", "2001:db8::2", none),
		pool("team", "198.51.100.1", "198.51.100.1", func(p *Pool) { p.Namespaces = []string{"team"} }),
		pool("manual", "198.51.100.9", "198.51.100.9", func(p *Pool) { p.AutoAssign = false }),
	})
	svc := func(name string, change func(*core.Service)) *core.Service {
		return aService(func(s *core.Service) {
			s.Name, s.Status = name, core.ServiceStatus{}
			change(s)
		})
	}
	notes := func(pairs ...string) func(*core.Service) {
		return func(s *core.Service) {
			s.Annotations = map[string]string{}
			for i := 0; i < len(pairs); i += 2 {
				s.Annotations[pairs[i]] = pairs[i+1]
			}
		}
	}
	dual := func(s *core.Service) { s.Spec.IPFamilies = []core.IPFamily{core.IPv6Protocol, core.IPv4Protocol} }
	port := func(n int32, more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Spec.Ports[0].Port = n }
	}
	const (
		fourFull = "no free IPv4 address in four, six, late; add addresses to a pool, or delete a Service that has one"
		sixFull  = "no free IPv4 address in six; add addresses to a pool, or delete a Service that has one"
	)
	for _, tt := range []struct {
		service *core.Service
		want    string
	}{
		{svc("a", same), "[203.0.113.1]"}, // .0 is left out
		{svc("a", dual), "[2001:db8::1 203.0.113.1]"},
		{svc("b", same), "[203.0.113.2]"},
		{svc("c", same), "[203.0.113.200]"},
		{svc("b", notes("steelyard.dev/pool", "late")), "[203.0.113.201]"},
		{svc("b", same), "[203.0.113.201]"},
		{svc("d", same), "[203.0.113.2]"},
		{svc("e", same), fourFull},
		{svc("e", notes("metallb.io/address-pool", "manual")), "[198.51.100.9]"},
		{
			svc("f", notes("steelyard.dev/pool", "team")),
			`the pool "team" is not for this Service: see its class, namespaces and service_selector`,
		},
		{
			svc("f", notes("steelyard.dev/pool", "none")),
			`there is no pool "none"; pools: four, six, team, manual, late`,
		},
		{
			svc("f", notes("steelyard.dev/addresses", "203.0.113.1")),
			"203.0.113.1 belongs to default/a, and cannot be shared with it: both have port 80/TCP",
		},
		{
			svc("f", func(s *core.Service) {
				notes("steelyard.dev/addresses", "203.0.113.1")(s)
				s.Spec.Ports[0].Port = 81
			}),
			"203.0.113.1 belongs to default/a; " +
				"to share it, set the annotation steelyard.dev/share to one value on both",
		},
		{svc("f", notes("steelyard.dev/addresses", "2001:db8::2")), fourFull},
		{svc("f", notes("steelyard.dev/addresses", "me")), `"me" is requested, but is not an IP address`},
		{svc("e", same), "[198.51.100.9]"}, // it had asked for the pool once, and keeps what it has
		{svc("g", port(1, notes("steelyard.dev/share", "x", "steelyard.dev/pool", "six"))), sixFull},
		{svc("a", notes("steelyard.dev/share", "x")), "[203.0.113.1]"},
		{
			svc("g", notes("steelyard.dev/share", "x", "steelyard.dev/addresses", "203.0.113.1")),
			"203.0.113.1 belongs to default/a, and cannot be shared with it: both have port 80/TCP",
		},
		{svc("g", port(81, notes("steelyard.dev/share", "x"))), "[203.0.113.1]"},
	} {
		got, err := a.assign(tt.service)
		text := fmt.Sprint(got)
		if err != nil {
			text = err.Error()
		}
		if text != tt.want {
			t.Errorf("%s with %v: %s; want %s", tt.service.Name, tt.service.Annotations, text, tt.want)
		}
	}
	a.release("default/d")
	if got, err := a.assign(svc("h", same)); fmt.Sprint(got) != "[203.0.113.2]" {
		t.Errorf("after a release: %v, %v", got, err)
	}
	// A new leader starts from the addresses in the API.
	next := newAssigner(nil, a.pools)
	old := svc("z", func(s *core.Service) {
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "192.0.2.1"}}
	})
	next.adopt(old, pending{})
	if got, err := next.assign(svc("a", same)); fmt.Sprint(got) != "[203.0.113.2]" {
		t.Errorf("beside an older Service: %v, %v", got, err)
	}
}

// externalIPs are served when they are in a pool for the Service, on any type of Service, and are assigned to no other.
func TestExternalIPs(t *testing.T) {
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	ranges := []lb.AddrRange{{From: addr("203.0.113.0"), To: addr("203.0.113.3")}}
	pool := Pool{Pool: lb.Pool{Name: "public", AutoAssign: true, Ranges: ranges}, Namespaces: []string{"default"}}
	pool.ExternalIPs = true
	source := newFixture(t, func(o *Options) { o.Pools = []Pool{pool, poolOfOne("203.0.113.10")} })
	names := func(ips ...string) func(*core.Service) {
		return func(s *core.Service) { s.Spec.ExternalIPs = ips }
	}
	for name, tt := range map[string]struct {
		change func(*core.Service)
		vips   string
		open   string
	}{
		"LoadBalancer": {names("203.0.113.3", "x", "203.0.113.3"), "[203.0.113.10 203.0.113.3]", "[203.0.113.3]"},
		"ClusterIP": {func(s *core.Service) {
			s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{"203.0.113.3"}
		}, "[203.0.113.3]", "[203.0.113.3]"},
		"in no pool": {names("8.8.8.8"), "[203.0.113.10]", "[]"},
		"in another's pool": {func(s *core.Service) {
			s.Namespace, s.Spec.ExternalIPs = "other", []string{"203.0.113.3"}
		}, "[203.0.113.10]", "[]"},
		"which it has": {names("203.0.113.10"), "[203.0.113.10]", "[]"},
	} {
		got := source.addressesFor(aService(tt.change))
		if fmt.Sprint(got.vips) != tt.vips || fmt.Sprint(got.external) != tt.open {
			t.Errorf("%s: serves %v, of which %v are open; want %s and %s",
				name, got.vips, got.external, tt.vips, tt.open)
		}
	}

	a := newAssigner(nil, []Pool{pool})
	outside := aService(func(s *core.Service) {
		s.Name, s.Spec.ExternalIPs = "outside", []string{"203.0.113.0", "203.0.113.1"}
	})
	a.reserve(outside, nil)
	inside := aService(func(s *core.Service) {
		s.Name, s.Spec.IPFamilies, s.Status = "inside", []core.IPFamily{core.IPv4Protocol}, core.ServiceStatus{}
	})
	if got, err := a.assign(inside); err != nil || fmt.Sprint(got) != "[203.0.113.2]" {
		t.Errorf("given %v, %v; want what nobody names", got, err)
	}
	inside.Spec.LoadBalancerIP = "203.0.113.1"
	if got, err := a.assign(inside); err == nil || !strings.Contains(err.Error(), "belongs to default/outside") {
		t.Errorf("given %v, %v; want that it belongs to another", got, err)
	}
	outside.Spec.ExternalIPs = nil
	a.reserve(outside, nil)
	if got, err := a.assign(inside); err != nil || fmt.Sprint(got) != "[203.0.113.1]" {
		t.Errorf("given %v, %v; want what is free now", got, err)
	}
}

// With PreferDualStack the first family is enough, unless addresses are asked for by name.
func TestFamilies(t *testing.T) {
	addr := netip.MustParseAddr
	four := Pool{Pool: lb.Pool{Name: "four", AutoAssign: true, Ranges: []lb.AddrRange{
		{From: addr("203.0.113.1"), To: addr("203.0.113.9")},
	}}}
	const noSix = "no free IPv6 address in four; add addresses to a pool, or delete a Service that has one"
	const v4, v6 = core.IPv4Protocol, core.IPv6Protocol
	for name, tt := range map[string]struct {
		policy   *core.IPFamilyPolicy
		families []core.IPFamily
		byName   string
		want     string
	}{
		"single":          {nil, []core.IPFamily{v4}, "", "[203.0.113.1]"},
		"no policy":       {nil, []core.IPFamily{v4, v6}, "", noSix},
		"single stack":    {ptr(core.IPFamilyPolicySingleStack), []core.IPFamily{v4, v6}, "", noSix},
		"required":        {ptr(core.IPFamilyPolicyRequireDualStack), []core.IPFamily{v4, v6}, "", noSix},
		"preferred":       {ptr(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v4, v6}, "", "[203.0.113.1]"},
		"IPv6 first":      {ptr(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v6, v4}, "", "[203.0.113.1]"},
		"IPv6 only":       {ptr(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v6}, "", noSix},
		"one by name":     {ptr(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v4, v6}, "203.0.113.5", noSix},
		"without its own": {nil, []core.IPFamily{v4}, "2001:db8::1", noFamily},
		"the only one":    {nil, []core.IPFamily{v4}, " 203.0.113.5, ", "[203.0.113.5]"},
		"two of a family": {nil, []core.IPFamily{v4}, "203.0.113.5,203.0.113.6", twoOfFamily},
		"two, unprintable": {nil, []core.IPFamily{v4}, "203.0.113.5,203.0.113.6,\x1b[2K" + strings.Repeat(" x", 200),
			twoOfFamily + ",�[2K" + strings.Repeat(" x", 86) + "…"},
		"with a zone": {nil, []core.IPFamily{v6}, "fe80::1%\x1b[2K",
			`"fe80::1%\x1b[2K" is requested, but is not an IP address`},
		"in no pool": {nil, []core.IPFamily{v4}, "192.0.2.1", "192.0.2.1 is in no pool"},
	} {
		s := aService(func(s *core.Service) {
			s.Status = core.ServiceStatus{}
			s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = tt.policy, tt.families
			s.Annotations = map[string]string{"steelyard.dev/addresses": tt.byName}
		})
		got, err := newAssigner(nil, []Pool{four}).assign(s)
		text := fmt.Sprint(got)
		if err != nil {
			text = err.Error()
		}
		if text != tt.want {
			t.Errorf("%s: %s; want %s", name, text, tt.want)
		}
	}
	both := aService(func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/loadBalancerIPs": "203.0.113.5"}
		s.Spec.LoadBalancerIP = "203.0.113.6"
	})
	if _, err := newAssigner(nil, []Pool{four}).assign(both); err == nil || !strings.HasPrefix(err.Error(), "both ") {
		t.Errorf("two ways to ask: %v", err)
	}
}

const (
	noFamily    = "2001:db8::1 is requested, but the Service has no such family: see spec.ipFamilies"
	twoOfFamily = "two addresses of one family are requested: 203.0.113.5,203.0.113.6"
)

// Addresses asked for and auto_assign pools that the namespace or the labels of a Service exclude.
func TestPoolsOfAService(t *testing.T) {
	addr := netip.MustParseAddr("203.0.113.1")
	pool := Pool{Pool: lb.Pool{Name: "four", AutoAssign: true, Ranges: []lb.AddrRange{{From: addr, To: addr}}}}
	const selects = "has a service_selector that does not match"
	none := func(why string) string {
		return "no pool is for this Service: four " + why + "; name one with the annotation steelyard.dev/pool, " +
			"or change the pools"
	}
	const byName = `203.0.113.1 is in the pool "four", which is not for this Service: ` +
		"see its class, namespaces and service_selector"
	for name, tt := range map[string]struct {
		namespaces []string
		selector   labels.Set
		auto       bool
		byName     string
		want       string
	}{
		"all":                 {nil, nil, true, "", "[203.0.113.1]"},
		"its namespace":       {[]string{"x", "default"}, nil, true, "", "[203.0.113.1]"},
		"another namespace":   {[]string{"x"}, nil, true, "", none("is for other namespaces")},
		"by name":             {[]string{"x"}, nil, true, "203.0.113.1", byName},
		"its labels":          {nil, labels.Set{"app": "web"}, true, "", "[203.0.113.1]"},
		"other labels":        {nil, labels.Set{"app": "x"}, true, "", none(selects)},
		"labels, not its ns":  {[]string{"x"}, labels.Set{"app": "web"}, true, "", none("is for other namespaces")},
		"not auto_assign":     {nil, nil, false, "", none("has no auto_assign")},
		"not auto, but asked": {nil, nil, false, "203.0.113.1", "[203.0.113.1]"},
	} {
		p := pool
		p.Namespaces, p.AutoAssign = tt.namespaces, tt.auto
		if tt.selector != nil {
			p.Selector = tt.selector.AsSelector()
		}
		s := aService(func(s *core.Service) {
			s.Status, s.Labels = core.ServiceStatus{}, map[string]string{"app": "web"}
			s.Spec.LoadBalancerIP = tt.byName
		})
		got, err := newAssigner(nil, []Pool{p}).assign(s)
		text := fmt.Sprint(got)
		if err != nil {
			text = err.Error()
		}
		if text != tt.want {
			t.Errorf("%s: %s; want %s", name, text, tt.want)
		}
	}
}
