package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An address in no pool is not served, whoever wrote it, because it may be a client's. An address that no host can have
// is never served.
func TestAddressInNoPoolIsNotServed(t *testing.T) {
	const inNoPool, noHost = "is in no pool", "is not the address of a host"
	const k3s = "; k3s wrote it: " + textOthers
	for _, tt := range []struct {
		addr  string
		pools []Pool
		want  string // why not
	}{
		{"203.0.113.1", []Pool{poolOfOne("203.0.113.1")}, ""},
		{"203.0.113.1", nil, ""},
		{"198.51.100.7", []Pool{poolOfOne("203.0.113.1")}, inNoPool},
		{"10.96.0.10", []Pool{poolOfOne("203.0.113.1")}, inNoPool},
		{"0.0.0.0", nil, noHost},
		{"::", nil, noHost},
		{"239.1.1.1", nil, noHost},
		{"ff02::1", nil, noHost},
		{"255.255.255.255", nil, noHost},
		{"127.0.0.1", nil, noHost},
		{"10.96.0.10", nil, "is the ClusterIP of default/dns"},
		{"10.96.0.11", nil, ""},
		{"192.0.2.77", []Pool{poolOfOne("203.0.113.1")}, inNoPool + k3s},
		{"192.0.2.77", nil, "is the address of a node" + k3s},
		{"203.0.113.1", []Pool{poolOfOne("203.0.113.1")}, "has ipMode Proxy" + k3s},
	} {
		f := newFixture(t, func(o *Options) { o.Pools = tt.pools })
		f.tunnelSources = addrs("192.0.2.77")
		s := wanting("web", given(tt.addr))
		if strings.Contains(tt.want, k3s) {
			setManager(s, "k3s")
		}
		if strings.Contains(tt.want, "Proxy") {
			s.Status.LoadBalancer.Ingress[0].IPMode = new(core.LoadBalancerIPModeProxy)
		}
		dns := aService(func(s *core.Service) { s.Name, s.Spec.ClusterIPs = "dns", []string{"10.96.0.10"} })
		f.have(t, s, dns)
		f.reconcile(webName, fakeSink{f.recorded})
		got := f.put[webName]
		var refused []lb.RefusedVIP
		if tt.want != "" {
			refused = []lb.RefusedVIP{{
				VIP: netip.MustParseAddr(tt.addr), Reason: "refused: " + tt.addr + " " + tt.want,
			}}
		}
		must.True(t, fmt.Sprint(got.Refused) == fmt.Sprint(refused) && len(got.VIPs) == 1-len(refused),
			"%s: serves %v, refuses %v; want %v", tt.addr, got.VIPs, got.Refused, refused)
		_, claimed := f.claimOf(s, netip.MustParseAddr(tt.addr))
		must.Row(t, tt.addr+" is claimed", tt.want == "", claimed)
		f.touchSharing(dns)
		must.Row(t, tt.addr+" follows a change of the other Service", tt.addr == "10.96.0.10", f.queue.Len() > 0)
	}
}

// An endpoint at the address of a Service would make nodes forward packets to each other in a loop.
func TestEndpointsInPools(t *testing.T) {
	const vip, pod = "203.0.113.10", "10.0.0.1"
	b := &lb.Boundary{Log: discard}
	f := newFixture(t, func(o *Options) { o.Pools, o.Boundary = []Pool{poolOfOne(vip)}, b })
	for want, all := range map[string][]discovery.Endpoint{
		"endpoint default/web: " + vip + " gets no packets: it is in a pool, or not the address of a host": {
			ep(vip, "a", "rs"), ep("::ffff:"+vip, "a", "rs"), ep(pod, "a", "rs"),
		},
		"": {ep(pod, "a", "rs")},
	} {
		f.have(t, aService(same), of("web", slice(80, all...)))
		f.reconcile(webName, fakeSink{f.recorded})
		got := f.put[webName].Ports[0].Backends
		must.True(t, got[0].Addr == netip.MustParseAddr(pod) && (len(got) == 1 || got[1].Deleted), "endpoints %+v", got)
		must.Equal(t, want, strings.Join(b.Troubles(), "; "))
	}
}

// An address that was in a pool is served, but not announced, until the grace period of the pool ends. After a restart
// this applies to addresses in the kernel.
func TestGrace(t *testing.T) {
	const vip = "203.0.113.10"
	first, next := poolOfOne(vip), poolOfOne("203.0.113.20")
	first.Grace = time.Minute
	for name, tt := range map[string]struct {
		held   []lb.Frontend
		pools  []Pool
		change func(f *fixture)
		grace  time.Duration
	}{
		"other pools": {nil, []Pool{first}, func(f *fixture) { f.SetPools([]Pool{next}) }, time.Minute},
		"a restart": {
			[]lb.Frontend{{VIP: netip.MustParseAddr(vip), Port: 80}}, []Pool{next}, func(*fixture) {}, GraceDefault,
		},
		"back in a pool": {nil, []Pool{first}, func(f *fixture) {
			f.SetPools([]Pool{next})
			time.Sleep(time.Second)
			f.SetPools([]Pool{first})
		}, time.Hour},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.Pools, o.Held = tt.pools, tt.held })
			f.have(t, wanting("web", given(vip)), node("n1", "192.0.2.1"))
			f.keepHeld()
			f.reconcile(webName, fakeSink{f.recorded})
			tt.change(f)
			serves := func() bool {
				for _, key := range f.queued() {
					f.handle(key, fakeSink{f.recorded})
				}
				return len(f.put[webName].VIPs) == 1
			}
			for _, d := range []time.Duration{0, tt.grace - time.Second} {
				time.Sleep(d)
				must.True(t, serves(), "%s: not served before %s", name, tt.grace)
			}
			rule := f.put[webName].PerVIP[netip.MustParseAddr(vip)]
			withheld := rule.WithholdReason != ""
			must.True(t, withheld != (tt.grace == time.Hour), "%s: withheld: %q", name, rule.WithholdReason)
			pass(2 * time.Second)
			must.True(t, serves() == (tt.grace == time.Hour),
				"%s: after %s it serves %v", name, tt.grace, f.put[webName].VIPs)
		})
	}
}

// A Service from which an address is taken gets an Event with the reason, unless the Service is deleted.
func TestAddressMoved(t *testing.T) {
	const taken = "Warning AddressMoved 203.0.113.1 was taken from the Service"
	for _, tt := range []struct {
		change func(*core.Service)
		want   string
	}{
		{same, ""},
		{func(s *core.Service) { s.Spec.LoadBalancerIP = "203.0.113.2" },
			taken + ", which has 203.0.113.2 now: it requests others by name"},
		{func(s *core.Service) { s.Annotations = map[string]string{wantPool[0]: "more"} },
			taken + `, which has 198.51.100.1 now: it requests the pool "more"`},
		{func(s *core.Service) { s.Spec.IPFamilies = []core.IPFamily{core.IPv6Protocol} },
			taken + ", which has 2001:db8::1 now: it requests other families or a different number of addresses"},
		{func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP }, taken + ": its type or class has changed"},
		{func(s *core.Service) { s.DeletionTimestamp = &meta.Time{} }, ""},
	} {
		s := wanting("web", func(s *core.Service) {
			owning("203.0.113.1")(s)
			setManager(s, fieldManager)
			tt.change(s)
		})
		term, _, events := testTerm(t, s)
		more := poolOfOne("198.51.100.1")
		more.Name, more.AutoAssign = "more", false
		term.assigner = newAssigner(nil, append(term.o.Pools, more, poolOfOne("2001:db8::1")))
		must.Do(t, term.reconcile(t.Context(), webName))
		told := slices.DeleteFunc(drained(events), func(e string) bool { return !strings.Contains(e, "AddressMoved") })
		must.Equal(t, tt.want, strings.Join(told, "; "))
	}
}
