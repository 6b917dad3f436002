package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// answer returns the result of assign as text.
func answer(a *assigner, s *core.Service) string {
	got, err := a.assign(s)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(got)
}

// A Service keeps its address, and gets the one that it requests or an error that says why not.
func TestAssign(t *testing.T) {
	a := newAssigner(nil, []Pool{
		poolFrom("late", "203.0.113.200", "203.0.113.201", func(p *Pool) { p.Priority = 5 }),
		poolFrom("four", "203.0.113.0", "203.0.113.2", func(p *Pool) { p.AvoidBuggy = true }),
		poolFrom("six", "2001:db8::1", "2001:db8::2"),
		poolFrom("team", "198.51.100.1", "198.51.100.1", func(p *Pool) { p.Namespaces = []string{"team"} }),
		poolFrom("manual", "198.51.100.9", "198.51.100.9", func(p *Pool) { p.AutoAssign = false }),
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
		{svc("f", notes("steelyard.dev/pool", "team")),
			`the pool "team" is not for this Service: see its class, namespaces and service_selector`},
		{svc("f", notes("steelyard.dev/pool", "none")),
			`there is no pool "none"; pools: four, six, team, manual, late`},
		{svc("f", notes("steelyard.dev/addresses", "203.0.113.1")),
			"203.0.113.1 belongs to default/a, and cannot be shared with it because both have port 80/TCP"},
		{svc("f", func(s *core.Service) {
			notes("steelyard.dev/addresses", "203.0.113.1")(s)
			s.Spec.Ports[0].Port = 81
		}),
			"203.0.113.1 belongs to default/a; " +
				"to share it, set the annotation steelyard.dev/share to the same value on both"},
		{svc("f", notes("steelyard.dev/addresses", "2001:db8::2")), fourFull},
		{svc("f", notes("steelyard.dev/addresses", "me")), `"me" is requested, but is not an IP address`},
		{svc("e", same), "[198.51.100.9]"}, // it requested the pool before, and keeps its address
		{svc("g", port(1, notes("steelyard.dev/share", "x", "steelyard.dev/pool", "six"))), sixFull},
		{svc("a", notes("steelyard.dev/share", "x")), "[203.0.113.1]"},
		{svc("g", notes("steelyard.dev/share", "x", "steelyard.dev/addresses", "203.0.113.1")),
			"203.0.113.1 belongs to default/a, and cannot be shared with it because both have port 80/TCP"},
		{svc("g", port(81, notes("steelyard.dev/share", "x"))), "[203.0.113.1]"},
	} {
		must.Row(t, fmt.Sprintf("%s with %v", tt.service.Name, tt.service.Annotations), tt.want, answer(a, tt.service))
	}
	a.release("default/d")
	must.Row(t, "after a release", "[203.0.113.2]", answer(a, svc("h", same)))
	// A new leader starts from the addresses in the API.
	next := newAssigner(nil, a.pools)
	old := svc("z", func(s *core.Service) {
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "192.0.2.1"}}
	})
	next.adopt(old, pending{})
	must.Row(t, "beside an older Service", "[203.0.113.2]", answer(next, svc("a", same)))
}

// externalIPs in a pool for the Service are served, on any type of Service, and are not assigned to others.
func TestExternalIPs(t *testing.T) {
	pool := poolFrom("public", "203.0.113.0", "203.0.113.3", forExternalIPs)
	pool.Namespaces = []string{"default"}
	source := newFixture(t, func(o *Options) { o.Pools = []Pool{pool, poolOfOne("203.0.113.10")} })
	names := func(ips ...string) func(*core.Service) { return func(s *core.Service) { s.Spec.ExternalIPs = ips } }
	for name, tt := range map[string]struct {
		change     func(*core.Service)
		vips, open string
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
		must.True(t, fmt.Sprint(got.vips) == tt.vips && fmt.Sprint(got.external) == tt.open,
			"%s: serves %v, of which %v are open; want %s and %s", name, got.vips, got.external, tt.vips, tt.open)
	}

	a := newAssigner(nil, []Pool{pool})
	outside := aService(func(s *core.Service) {
		s.Name, s.Spec.ExternalIPs = "outside", []string{"203.0.113.0", "203.0.113.1"}
	})
	a.reserve(outside, nil)
	inside := aService(func(s *core.Service) {
		s.Name, s.Spec.IPFamilies, s.Status = "inside", []core.IPFamily{core.IPv4Protocol}, core.ServiceStatus{}
	})
	must.Row(t, "what nobody names", "[203.0.113.2]", answer(a, inside))
	inside.Spec.LoadBalancerIP = "203.0.113.1"
	_, err := a.assign(inside)
	must.Fail(t, err, "belongs to default/outside")
	outside.Spec.ExternalIPs = nil
	a.reserve(outside, nil)
	must.Row(t, "what is free now", "[203.0.113.1]", answer(a, inside))
}

// With PreferDualStack the first family is enough, unless addresses are requested explicitly.
func TestFamilies(t *testing.T) {
	four := poolFrom("four", "203.0.113.1", "203.0.113.9")
	const noSix = "no free IPv6 address in four; add addresses to a pool, or delete a Service that has one"
	const v4, v6 = core.IPv4Protocol, core.IPv6Protocol
	for name, tt := range map[string]struct {
		policy       *core.IPFamilyPolicy
		families     []core.IPFamily
		byName, want string
	}{
		"single":          {nil, []core.IPFamily{v4}, "", "[203.0.113.1]"},
		"no policy":       {nil, []core.IPFamily{v4, v6}, "", noSix},
		"single stack":    {new(core.IPFamilyPolicySingleStack), []core.IPFamily{v4, v6}, "", noSix},
		"required":        {new(core.IPFamilyPolicyRequireDualStack), []core.IPFamily{v4, v6}, "", noSix},
		"preferred":       {new(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v4, v6}, "", "[203.0.113.1]"},
		"IPv6 first":      {new(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v6, v4}, "", "[203.0.113.1]"},
		"IPv6 only":       {new(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v6}, "", noSix},
		"one by name":     {new(core.IPFamilyPolicyPreferDualStack), []core.IPFamily{v4, v6}, "203.0.113.5", noSix},
		"without its own": {nil, []core.IPFamily{v4}, "2001:db8::1", noFamily},
		"the only one":    {nil, []core.IPFamily{v4}, " 203.0.113.5, ", "[203.0.113.5]"},
		"two of a family": {nil, []core.IPFamily{v4}, "203.0.113.5,203.0.113.6", twoOfFamily},
		"two, unprintable": {nil, []core.IPFamily{v4},
			"203.0.113.5,203.0.113.6,\x1b[2K\u009b" + strings.Repeat(" x", 200),
			twoOfFamily + ",�[2K�" + strings.Repeat(" x", 85) + "…"},
		"with a zone": {nil, []core.IPFamily{v6}, "fe80::1%\x1b[2K\u009b1A",
			`"fe80::1%\x1b[2K\u009b1A" is requested, but is not an IP address`},
		"in no pool": {nil, []core.IPFamily{v4}, "192.0.2.1", "192.0.2.1 is in no pool"},
	} {
		s := aService(func(s *core.Service) {
			s.Status = core.ServiceStatus{}
			s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = tt.policy, tt.families
			s.Annotations = map[string]string{"steelyard.dev/addresses": tt.byName}
		})
		must.Row(t, name, tt.want, answer(newAssigner(nil, []Pool{four}), s))
	}
	both := aService(func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/loadBalancerIPs": "203.0.113.5"}
		s.Spec.LoadBalancerIP = "203.0.113.6"
	})
	two := answer(newAssigner(nil, []Pool{four}), both)
	must.True(t, strings.HasPrefix(two, "both "), "two ways to ask: %s", two)
}

const (
	noFamily    = "2001:db8::1 is requested, but the Service has no such family: see spec.ipFamilies"
	twoOfFamily = "two addresses of one family are requested: 203.0.113.5,203.0.113.6"
)

// The namespace or the labels of a Service may exclude requested addresses and auto_assign pools.
func TestPoolsOfAService(t *testing.T) {
	pool := poolFrom("four", "203.0.113.1", "203.0.113.1")
	const selects = "has a service_selector that does not match"
	none := func(why string) string {
		return "no pool permits this Service: four " + why + "; name one with the annotation steelyard.dev/pool, " +
			"or change the pools"
	}
	const byName = `203.0.113.1 is in the pool "four", which is not for this Service: ` +
		"see its class, namespaces and service_selector"
	for name, tt := range map[string]struct {
		namespaces   []string
		selector     labels.Set
		auto         bool
		byName, want string
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
		must.Row(t, name, tt.want, answer(newAssigner(nil, []Pool{p}), s))
	}
}

func asksPerNode(s *core.Service) {
	s.Annotations = map[string]string{"steelyard.dev/address-per-node": "true"}
}

// A Service gets an address per node, more with more nodes, and keeps them when there are fewer, until it no longer
// requests them.
func TestAddressPerNode(t *testing.T) {
	addr := netip.MustParseAddr
	a := newAssigner(nil, []Pool{poolFrom("four", "203.0.113.1", "203.0.113.40")})
	s := wanting("web", asksPerNode)
	for i, step := range []struct {
		nodes  int
		change func(*core.Service)
		want   int
	}{
		{0, same, 1}, {3, same, 3}, {5, same, 5}, {2, same, 5}, {99, same, lb.VIPsPerNodeMax},
		{99, func(s *core.Service) { s.Annotations[perNode[0]] = "false" }, 1},
		{0, asksPerNode, 1},
	} {
		a.nodes = step.nodes
		step.change(s)
		got, err := a.assign(s)
		must.True(t, err == nil && len(got) == step.want && got[0] == addr("203.0.113.1"),
			"step %d: %v, %v; want %d addresses", i, got, err, step.want)
	}
	for text, want := range map[string]string{
		"3": `steelyard.dev/address-per-node is "3"; write "true"`, "true": "both steelyard.dev/address-per-node and ",
	} {
		s.Annotations = map[string]string{perNode[0]: text, wantAddresses[0]: "203.0.113.7"}
		_, err := a.assign(s)
		must.True(t, err != nil && strings.HasPrefix(err.Error(), want), "%q: %v; want %s", text, err, want)
	}
	vips := []netip.Addr{addr("203.0.113.1")}
	view := translate(wanting("web", asksPerNode), settings{}, vips, nil, topology{}, false, false, 10000)
	must.True(t, view.service.VIPPerNode, "nodes do not know that the Service asks for it")
}

// The agent that assigns addresses counts the nodes that may have some, including nodes that appear while it leads, and
// a new leader revokes no address.
func TestAddressPerNodeFollowsNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		excluded := node("n3", "192.0.2.3")
		excluded.Labels[labelExclude] = ""
		web := wanting("web", asksPerNode)
		client := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), excluded, web)
		pools := []Pool{poolFrom("four", "203.0.113.1", "203.0.113.9")}
		lead := func() (stop func()) {
			a := NewAllocator(AllocatorOptions{
				Client: client, Node: "n1", Namespace: "steelyard", Pools: pools, PublishNodes: true,
				Log: discard,
			})
			a.events = record.NewFakeRecorder(20)
			return must.Run(t, func(ctx context.Context) error { a.lead(ctx); return nil })
		}
		step := func(name string, want int) {
			t.Helper()
			pass(3 * time.Second)
			s := must.Get(client.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{}))(t)
			got := statusAddresses(s)
			must.True(t, len(got) == want && slices.IsSortedFunc(got, netip.Addr.Compare),
				"%s: %v; want %d addresses", name, got, want)
		}
		stop := lead()
		step("two nodes that are not excluded", 2)
		for i := 4; i < 6; i++ {
			n := node(fmt.Sprintf("n%d", i), fmt.Sprintf("192.0.2.%d", i))
			client.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{})
		}
		step("two more", 4)
		client.CoreV1().Nodes().Delete(t.Context(), "n4", meta.DeleteOptions{})
		step("one goes", 4)
		stop()
		stop = lead()
		step("another leader", 4)
		stop()
	})
}
