package kube

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// poolFrom returns a pool of the addresses from first to last.
func poolFrom(name, first, last string, changes ...func(*Pool)) Pool {
	r := lb.AddrRange{From: netip.MustParseAddr(first), To: netip.MustParseAddr(last)}
	p := Pool{Pool: lb.Pool{Name: name, AutoAssign: true, Ranges: []lb.AddrRange{r}}}
	for _, change := range changes {
		change(&p)
	}
	return p
}

// poolOfOne returns a pool with one address.
func poolOfOne(addr string, changes ...func(*Pool)) Pool {
	return poolFrom(addr, addr, addr, changes...)
}

// forExternalIPs lets Services use the addresses of a pool as externalIPs.
func forExternalIPs(p *Pool) { p.ExternalIPs = true }

// Services that wait for an address get one when the pools change, without a new election; the others keep theirs.
func TestAllocatorFollowsPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ranges := new(networking.ServiceCIDR)
		ranges.Spec.CIDRs = []string{"198.51.100.0/24", "fd00::/108"}
		client := fake.NewClientset(wanting("has", owning("203.0.113.1")), wanting("waits", same), ranges)
		a := NewAllocator(AllocatorOptions{
			Client: client, Lease: client, Node: "n1", Namespace: "steelyard", Log: discard,
			Pools: []Pool{poolOfOne("203.0.113.1")},
		})
		must.Run(t, a.Run)
		addresses := func() (list string) {
			pass(10 * time.Second)
			for _, name := range []string{"has", "waits"} {
				s := must.Get(client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
				list += fmt.Sprint(statusAddresses(s))
			}
			return list
		}
		must.Row(t, "at first", "[203.0.113.1][]", addresses())
		a.SetPools([]Pool{poolOfOne("203.0.113.1"), poolOfOne("198.51.100.1")})
		must.Row(t, "with a pool of ClusterIPs", "[203.0.113.1][]", addresses())
		a.SetPools([]Pool{poolOfOne("203.0.113.2"), poolOfOne("203.0.113.1")})
		must.Row(t, "with another pool", "[203.0.113.1][203.0.113.2]", addresses())
		a.SetPools([]Pool{poolOfOne("203.0.113.2")})
		must.Row(t, "without the first pool", "[203.0.113.1][203.0.113.2]", addresses())
	})
}

// A Service that a pool excludes after a change keeps its address, and one Event says so. When its status is emptied,
// it gets an address from a pool that is for it.
func TestExcludedServiceKeepsItsAddress(t *testing.T) {
	term, client, events := testTerm(t, wanting("web", owning("203.0.113.1")))
	others := poolOfOne("203.0.113.1")
	others.Namespaces = []string{"other"}
	term.assigner = newAssigner(nil, []Pool{others, poolOfOne("203.0.113.2")})
	for range 2 {
		must.Do(t, term.reconcile(t.Context(), webName))
	}
	must.Row(t, "patched", nil, patches(client))
	const want = "Warning PoolExcludesService the pool of 203.0.113.1 no longer permits this Service: see its " +
		"class, namespaces and service_selector; the Service keeps the address until its status.loadBalancer is emptied"
	must.Row(t, "Events", []string{want}, drained(events))
	must.Row(t, "a new one", "[203.0.113.2]", answer(term.assigner, wanting("new", same)))
	term.assigner.release("default/new")
	emptied := wanting("web", func(s *core.Service) { s.Finalizers = []string{finalizer} })
	d := term.assigner.decide(emptied, pending{}, false)
	must.True(t, fmt.Sprint(d.addrs) == "[203.0.113.2]", "emptied, it gets %v, %s", d.addrs, d.warning)
}

// A Service that requests its current address, by name or by pool, is excluded in the same way. One that requests
// another address or pool does not get it.
func TestExcludedServiceThatNamesItsAddress(t *testing.T) {
	const excludes, failed = "PoolExcludesService", "AllocationFailed"
	annotated := func(name, value string) func(*core.Service) {
		return func(s *core.Service) { s.Annotations = map[string]string{name: value} }
	}
	for _, tt := range []struct {
		change func(*core.Service)
		want   string
	}{
		{annotated("steelyard.dev/addresses", "203.0.113.1"), excludes},
		{annotated("metallb.io/loadBalancerIPs", "203.0.113.1"), excludes},
		{func(s *core.Service) { s.Spec.LoadBalancerIP = "203.0.113.1" }, excludes},
		{annotated("steelyard.dev/pool", "public"), excludes},
		{annotated("steelyard.dev/addresses", "203.0.113.2"), failed},
		{annotated("steelyard.dev/pool", "more"), failed},
	} {
		s := wanting("web", func(s *core.Service) { owning("203.0.113.1")(s); tt.change(s) })
		term, client, events := testTerm(t, s)
		public, more := poolOfOne("203.0.113.1"), poolOfOne("203.0.113.2")
		public.Namespaces, more.Namespaces = []string{"other"}, []string{"other"}
		public.Name, more.Name = "public", "more"
		term.assigner = newAssigner(nil, []Pool{public, more})
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		for _, patch := range patches(client) { // only the condition, with the reason
			must.True(t, tt.want != excludes && !strings.Contains(patch, "loadBalancer") &&
				strings.Contains(patch, tt.want), "%v: patched %s", s.Annotations, patch)
		}
		first := <-events.Events
		if !strings.HasPrefix(first, "Warning "+tt.want+" ") || tt.want == excludes && len(events.Events) > 0 {
			t.Errorf("%v: %q, and %d Events more; want %s", s.Annotations, first, len(events.Events), tt.want)
		}
	}
}

// A node announces and serves according to the pools that were set last.
func TestSourceFollowsPools(t *testing.T) {
	first := poolOfOne("203.0.113.10")
	first.Grace = time.Minute
	f := newFixture(t, func(o *Options) { o.Pools = []Pool{first} })
	external := aService(func(s *core.Service) {
		s.Name, s.Spec.Type, s.Spec.ExternalIPs = "external", core.ServiceTypeClusterIP, []string{"203.0.113.20"}
		s.Status = core.ServiceStatus{}
	})
	f.have(t, aService(same), external, node("n1", "192.0.2.1"))
	f.reconcile(webName, fakeSink{f.recorded})
	taken(&f.sink)
	f.SetPools([]Pool{poolOfOne("203.0.113.20", forExternalIPs)})
	for _, key := range f.queued() {
		f.handle(key, fakeSink{f.recorded})
	}
	rule := f.put[webName].PerVIP[netip.MustParseAddr("203.0.113.10")]
	must.True(t, f.put["default/external"] != nil && rule.WithholdReason == "203.0.113.10 is in no pool",
		"served %v; %+v", f.put, rule)
}

// A Service keeps an address that is no longer in a pool, and is told so, even if it could get no other address.
func TestAddressWithoutPool(t *testing.T) {
	team := poolOfOne("203.0.113.2")
	team.Namespaces = []string{"team"}
	s := wanting("web", given("203.0.113.1"))
	const kept = "203.0.113.1 is no longer in a pool; the Service keeps it, but it is not announced; "
	for _, tt := range []struct {
		pools []Pool
		want  string
	}{
		{nil, kept + "Steelyard's configuration has no [[pool]]"},
		{[]Pool{team}, kept + "no pool permits this Service: 203.0.113.2 is for other namespaces; name one with the " +
			"annotation steelyard.dev/pool, or change the pools"},
		{[]Pool{poolOfOne("203.0.113.3")}, kept + "to get a different one, set the annotation steelyard.dev/pool"},
	} {
		d := newAssigner(nil, tt.pools).decide(s, pending{}, false)
		must.True(t, d.reason == reasonUnpooled && d.warning == tt.want && !d.write &&
			fmt.Sprint(d.addrs) == "[203.0.113.1]", "%v: %+v; want %s", tt.pools, d, tt.want)
	}
}

// An Event of more than 1024 bytes is refused.
func TestManyPoolsFitIntoAnEvent(t *testing.T) {
	var pools []Pool
	for i := range 200 {
		p := poolOfOne(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}).String())
		p.Namespaces = []string{"other"}
		pools = append(pools, p)
	}
	_, err := newAssigner(nil, pools).assign(wanting("web", same))
	must.True(t, err != nil && strings.Contains(err.Error(), ", and 195 more;") && len(err.Error()) <= 600, "%v", err)
	s := wanting("web", func(s *core.Service) { s.Annotations = map[string]string{wantPool[0]: "x"} })
	term, _, events := testTerm(t, s)
	term.assigner = newAssigner(nil, pools)
	must.Do(t, term.reconcile(t.Context(), webName))
	got := <-events.Events
	must.True(t, len(got) <= maxNote+len("Warning AllocationFailed "), "an Event of %d bytes", len(got))
}

// The API server accepts the names of the field managers, and each class has one.
func TestManagerOf(t *testing.T) {
	long := "example.com/" + strings.Repeat("x", 200)
	seen := map[string]bool{}
	for _, class := range []string{"", "x", "x/y", long + "1", long + "2"} {
		name := managerOf(class)
		must.True(t, len(name) <= 128 && isSteelyard(name) && !seen[name], "class %.20q: %q", class, name)
		seen[name] = true
	}
	must.Row(t, "default class", "steelyard", managerOf(""))
}

// One allocator serves several classes, each from the pools for it. The first class names its Lease and its field
// manager. A Service of a class that nobody serves gets one Event, after a minute.
func TestClasses(t *testing.T) {
	of := func(name, class string, age time.Duration) *core.Service {
		return wanting(name, func(s *core.Service) {
			s.CreationTimestamp = meta.NewTime(time.Now().Add(-age))
			if class != "" {
				s.Spec.LoadBalancerClass = &class
			}
		})
	}
	const long = 2 * othersTime
	term, client, events := testTerm(t, of("a", "", long), of("b", "x/y", long), of("c", "z", long), of("d", "z", 0))
	term.o.Classes = []string{"", "x/y"}
	second := poolOfOne("203.0.113.9")
	second.Class, second.Priority = "x/y", -1
	term.assigner = newAssigner(term.o.Classes, append(term.o.Pools, second))
	var got []string
	for _, name := range []string{"a", "b", "c", "c", "d"} {
		must.Do(t, term.reconcile(t.Context(), "default/"+name))
		s := must.Get(client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
		text := append([]string{name + fmt.Sprint(statusAddresses(s))}, drained(events)...)
		got = append(got, strings.Join(text, " "))
	}
	must.Equal(t, []string{
		"a[203.0.113.1] Normal IPAllocated assigned [203.0.113.1]",
		"b[203.0.113.9] Normal IPAllocated assigned [203.0.113.9]",
		`c[] Warning NoAgentForClass no Steelyard agent serves the class "z": ` +
			"see load_balancer_class in [kubernetes]",
		"c[]", "d[]",
	}, got)
	must.Row(t, "the Lease is", leaseName, term.leaseName())
}

// Allocators of two classes leave each other's Services alone: each Service is written once. A Service that changes its
// class gets an address of the new class, and keeps the finalizer.
func TestTwoClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newAPIServer(t, 1)
		writes := map[string]int{}
		ctx, cancel := context.WithCancel(t.Context())
		server.written = func(client string, _, now *core.Service) {
			if writes[client+" "+now.Name]++; writes[client+" "+now.Name] > 50 {
				cancel() // they overwrite each other
			}
		}
		defer func() {
			cancel()
			time.Sleep(5 * time.Minute)
		}()
		start := func(class, first, last string) {
			client := server.client("of:"+class, &faults{})
			a := NewAllocator(AllocatorOptions{
				Client: client, Lease: client, Node: "n", Namespace: "steelyard", Classes: []string{class},
				Pools: []Pool{poolFrom("p", first, last)}, Log: discard,
			})
			a.events = &record.FakeRecorder{}
			go a.lead(ctx)
			time.Sleep(10 * time.Minute)
		}
		create := func(name, class string, more func(*core.Service)) {
			server.edit("default/"+name, func(*core.Service) *core.Service {
				return wanting(name, func(s *core.Service) {
					if class != "" {
						s.Spec.LoadBalancerClass = &class
					}
					more(s)
				})
			})
		}
		state := func() (all []string) {
			server.mu.Lock()
			defer server.mu.Unlock()
			for _, name := range sortedKeys(server.services) {
				s := server.services[name]
				has := fmt.Sprint(statusAddresses(s), len(s.Finalizers), len(s.Status.Conditions))
				all = append(all, s.Name+" "+has)
			}
			return all
		}
		check := func(when string, want ...string) {
			t.Helper()
			must.Row(t, when, want, state())
		}
		noPool := func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/pool": "x"} }
		create("a1", "", same)
		create("a2", "", noPool)
		create("b1", "x/y", same)
		create("b2", "x/y", noPool)
		create("b3", "x/y", owning("198.51.100.3")) // by an older version
		start("", "203.0.113.1", "203.0.113.8")
		check("one allocator", "a1 [203.0.113.1] 1 0", "a2 [] 0 1", "b1 [] 0 0", "b2 [] 0 0", "b3 [198.51.100.3] 1 0")
		start("x/y", "198.51.100.1", "198.51.100.8")
		check("two", "a1 [203.0.113.1] 1 0", "a2 [] 0 1", "b1 [198.51.100.1] 1 0", "b2 [] 0 1", "b3 [198.51.100.3] 1 0")
		must.Row(t, "writes", "map[of: a1:1 of: a2:1 of:x/y b1:1 of:x/y b2:1]", fmt.Sprint(writes))

		server.change("default/a1", func(s *core.Service) { s.Spec.LoadBalancerClass = new("x/y") })
		server.change("default/b3", func(s *core.Service) {
			s.Spec.Type, s.Spec.LoadBalancerClass = core.ServiceTypeClusterIP, nil
		})
		time.Sleep(10 * time.Minute)
		check("moved", "a1 [198.51.100.2] 1 0", "a2 [] 0 1", "b1 [198.51.100.1] 1 0", "b2 [] 0 1", "b3 [] 0 0")
		server.change("default/b1", func(s *core.Service) { s.Spec.LoadBalancerClass = nil })
		time.Sleep(10 * time.Minute)
		check("and back", "a1 [198.51.100.2] 1 0", "a2 [] 0 1", "b1 [203.0.113.1] 1 0", "b2 [] 0 1", "b3 [] 0 0")
	})
}
