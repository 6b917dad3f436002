package kube

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// poolOfOne is a pool with one address.
func poolOfOne(addr string) Pool {
	a := netip.MustParseAddr(addr)
	return Pool{Pool: lb.Pool{Name: addr, AutoAssign: true, Ranges: []lb.AddrRange{{From: a, To: a}}}}
}

// Services that wait for an address get one when the pools change, without a new election; the others keep theirs.
func TestAllocatorFollowsPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		has := wanting("has", func(s *core.Service) { given("203.0.113.1")(s); s.Finalizers = []string{finalizer} })
		client := fake.NewClientset(has, wanting("waits", same))
		a := NewAllocator(AllocatorOptions{
			Client: client, Lease: client, Node: "n1", Namespace: "steelyard", Log: slog.New(slog.DiscardHandler),
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
		if got := addresses(); got != "[203.0.113.1][]" {
			t.Errorf("at first: %s", got)
		}
		a.SetPools([]Pool{poolOfOne("203.0.113.2"), poolOfOne("203.0.113.1")})
		if got := addresses(); got != "[203.0.113.1][203.0.113.2]" {
			t.Errorf("with another pool: %s", got)
		}
		a.SetPools([]Pool{poolOfOne("203.0.113.2")})
		if got := addresses(); got != "[203.0.113.1][203.0.113.2]" {
			t.Errorf("without the first pool: %s", got)
		}
	})
}

// A Service that a pool excludes after a change keeps its address, and one Event says so. When its status is emptied it
// gets one of a pool that is for it.
func TestExcludedServiceKeepsItsAddress(t *testing.T) {
	term, client, events := testTerm(t, wanting("web", func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Finalizers = []string{finalizer}
	}))
	others := poolOfOne("203.0.113.1")
	others.Namespaces = []string{"other"}
	term.assigner = newAssigner(nil, []Pool{others, poolOfOne("203.0.113.2")})
	for range 2 {
		must.Do(t, term.reconcile(t.Context(), webName))
	}
	if got := patches(client); len(got) > 0 {
		t.Errorf("patched %q", got)
	}
	const want = "Warning PoolExcludesService the pool of 203.0.113.1 is no longer for this Service: see its " +
		"class, namespaces and service_selector; the Service keeps the address until its status.loadBalancer is emptied"
	if n, got := len(events.Events), <-events.Events; n != 1 || got != want {
		t.Errorf("%d Events, %q; want one, %q", n, got, want)
	}
	if got, err := term.assigner.assign(wanting("new", same)); fmt.Sprint(got) != "[203.0.113.2]" {
		t.Errorf("a new one got %v, %v", got, err)
	}
	term.assigner.release("default/new")
	emptied := wanting("web", func(s *core.Service) { s.Finalizers = []string{finalizer} })
	if d := term.assigner.decide(emptied, pending{}, false); fmt.Sprint(d.addrs) != "[203.0.113.2]" {
		t.Errorf("emptied, it gets %v, %s", d.addrs, d.warning)
	}
}

// A Service that asks for the address that it has, by name or by its pool, is excluded in the same way. One that asks
// for another address or pool cannot have it.
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
		s := wanting("web", func(s *core.Service) {
			given("203.0.113.1")(s)
			s.Finalizers = []string{finalizer}
			tt.change(s)
		})
		term, client, events := testTerm(t, s)
		public, more := poolOfOne("203.0.113.1"), poolOfOne("203.0.113.2")
		public.Namespaces, more.Namespaces = []string{"other"}, []string{"other"}
		public.Name, more.Name = "public", "more"
		term.assigner = newAssigner(nil, []Pool{public, more})
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		for _, patch := range patches(client) { // only the condition, with the reason
			if tt.want == excludes || strings.Contains(patch, "loadBalancer") || !strings.Contains(patch, tt.want) {
				t.Errorf("%v: patched %s", s.Annotations, patch)
			}
		}
		first := <-events.Events
		if !strings.HasPrefix(first, "Warning "+tt.want+" ") || tt.want == excludes && len(events.Events) > 0 {
			t.Errorf("%v: %q, and %d Events more; want %s", s.Annotations, first, len(events.Events), tt.want)
		}
	}
}

// A node announces and serves by the pools that are set last.
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
	more := poolOfOne("203.0.113.20")
	more.ExternalIPs = true
	f.SetPools([]Pool{more})
	for _, key := range f.queued() {
		f.handle(key, fakeSink{f.recorded})
	}
	rule := f.put[webName].PerVIP[netip.MustParseAddr("203.0.113.10")]
	if f.put["default/external"] == nil || rule.WithholdReason != "203.0.113.10 is in no pool" {
		t.Errorf("served %v; %+v", f.put, rule)
	}
}

// A Service keeps its address when it is no longer in a pool, and is told so, even if it could get no other one.
func TestAddressWithoutPool(t *testing.T) {
	team := poolOfOne("203.0.113.2")
	team.Namespaces = []string{"team"}
	s := wanting("web", given("203.0.113.1"))
	const kept = "203.0.113.1 is no longer in a pool; the Service keeps it, and it is not announced; "
	for _, tt := range []struct {
		pools []Pool
		want  string
	}{
		{nil, kept + "the configuration of Steelyard has no [[pool]]"},
		{[]Pool{team}, kept + "no pool is for this Service: 203.0.113.2 is for other namespaces; name one with the " +
			"annotation steelyard.dev/pool, or change the pools"},
		{[]Pool{poolOfOne("203.0.113.3")}, kept + "to get another one, set the annotation steelyard.dev/pool"},
	} {
		d := newAssigner(nil, tt.pools).decide(s, pending{}, false)
		if d.reason != reasonUnpooled || d.warning != tt.want || d.write || fmt.Sprint(d.addrs) != "[203.0.113.1]" {
			t.Errorf("%v: %+v; want %s", tt.pools, d, tt.want)
		}
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
	if err == nil || !strings.Contains(err.Error(), ", and 195 more;") || len(err.Error()) > 600 {
		t.Errorf("%v", err)
	}
	s := wanting("web", func(s *core.Service) { s.Annotations = map[string]string{wantPool[0]: "x"} })
	term, _, events := testTerm(t, s)
	term.assigner = newAssigner(nil, pools)
	must.Do(t, term.reconcile(t.Context(), webName))
	if got := <-events.Events; len(got) > maxNote+len("Warning AllocationFailed ") {
		t.Errorf("an Event of %d bytes", len(got))
	}
}
