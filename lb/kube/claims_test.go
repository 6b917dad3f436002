package kube

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// All nodes serve the same one of the Services that claim an address and a port, whatever they see first: one with the
// address in its status, then one whose record has the port, then the oldest, then the one with the lowest UID.
func TestWhoHasAnAddress(t *testing.T) {
	const vip = "203.0.113.10"
	svc := func(name string, minute int, change func(*core.Service)) *core.Service {
		return aService(func(s *core.Service) {
			s.Name, s.UID, s.Status = name, types.UID("uid-"+name), core.ServiceStatus{}
			s.CreationTimestamp = meta.NewTime(time.Unix(0, 0).Add(time.Duration(minute) * time.Minute))
			change(s)
		})
	}
	external := func(s *core.Service) { s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{vip} }
	port := func(n int32, more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Spec.Ports[0].Port = n }
	}
	key := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Annotations = map[string]string{wantShare[0]: "x"} }
	}
	recorded := func(record string, more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) {
			more(s)
			s.Status.Conditions = conditionsAfter(s, decision{addrs: statusOf(s), record: record})
		}
	}
	class := func(s *core.Service) { given(vip)(s); s.Spec.LoadBalancerClass = new("x/y") }
	deleting := func(finalizers ...string) func(*core.Service) {
		return func(s *core.Service) {
			given(vip)(s)
			s.DeletionTimestamp = &meta.Time{Time: time.Unix(1, 0)}
			s.Finalizers = append(finalizers, "example.com/hold")
		}
	}
	holder, withKey := svc("holder", 5, given(vip)), svc("holder", 5, key(given(vip)))
	for _, tt := range []struct {
		name     string
		services []*core.Service
		want     string // who serves it
	}{
		{"a status", []*core.Service{holder}, "[holder]"},
		{"an older thief", []*core.Service{svc("thief", 1, external), holder}, "[holder]"},
		{"at another port", []*core.Service{svc("thief", 1, port(81, external)), holder}, "[holder]"},
		{"with a key of its own", []*core.Service{svc("thief", 1, key(port(81, external))), holder}, "[holder]"},
		{"shared", []*core.Service{svc("s", 1, key(port(81, external))), withKey}, "[holder s]"},
		{"shared, one port", []*core.Service{svc("s", 1, key(external)), withKey}, "[holder]"},
		{"two statuses", []*core.Service{holder, svc("older", 4, given(vip))}, "[older]"},
		{"two statuses, two ports", []*core.Service{holder, svc("older", 4, port(81, given(vip)))}, "[holder older]"},
		{"the older one has changed", []*core.Service{
			svc("young", 5, recorded("80/TCP", given(vip))), svc("older", 4, recorded("81/TCP", given(vip))),
		}, "[young]"},
		{"both have changed", []*core.Service{
			svc("young", 5, recorded("82/TCP", given(vip))), svc("older", 4, recorded("81/TCP", given(vip))),
		}, "[older]"},
		{"one has more ports", []*core.Service{
			svc("young", 5, recorded("80/TCP", given(vip))),
			svc("older", 4, recorded("81/TCP", port(81, func(s *core.Service) {
				given(vip)(s)
				s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Port: 80})
			}))),
		}, "[older young]"},
		{"two of one age", []*core.Service{holder, svc("also", 5, given(vip))}, "[also]"},
		{"two externalIPs", []*core.Service{svc("b", 1, external), svc("a", 2, external)}, "[b]"},
		{"another class", []*core.Service{svc("other", 1, class), holder}, "[holder]"},
		{"another class, externalIPs", []*core.Service{svc("other", 1, class), svc("a", 2, external)}, "[a]"},
		{"a deleted one, released", []*core.Service{svc("old", 1, deleting()), holder}, "[holder]"},
		{"a deleted one", []*core.Service{svc("old", 1, deleting(finalizer)), holder}, "[old]"},
	} {
		for range 2 {
			slices.Reverse(tt.services)
			f := newFixture(t, func(o *Options) { o.Pools = []Pool{poolOfOne(vip, forExternalIPs)} })
			var got []string
			for _, s := range tt.services {
				f.have(t, s)
			}
			for _, s := range tt.services {
				a := f.addressesFor(s)
				if len(a.vips) > 0 {
					got = append(got, s.Name)
				} else if matchesClass(s, "") && !isReleased(s) && len(a.refused) != 1 {
					t.Errorf("%s: %s is refused %v", tt.name, s.Name, a.refused)
				}
			}
			slices.Sort(got)
			must.Row(t, tt.name+": served for", tt.want, fmt.Sprint(got))
		}
	}

	// A Service whose addresses are all refused has its own row, under each policy.
	f := newFixture(t, func(o *Options) {
		o.Pools = []Pool{poolOfOne(vip, forExternalIPs)}
		o.Forward, o.SpreadLocal = lb.MethodTunnel, func([]lb.AnnouncerKind) bool { return true }
	})
	thief := svc("thief", 1, external)
	thief.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
	f.have(t, holder, thief)
	v := f.viewOf(nameOf(thief)).service
	must.True(t, len(v.VIPs) == 0 && len(v.Refused) == 1, "all are refused: VIPs %v, refused %v", v.VIPs, v.Refused)

	// Without the pool's permission externalIPs are refused. ExternalIPs in no pool are not ours.
	f = newFixture(t, func(o *Options) { o.Pools = []Pool{poolOfOne(vip)} })
	if got := f.addressesFor(svc("a", 1, external)); len(got.vips) > 0 || len(got.refused) != 1 {
		t.Errorf("externalIPs without external_ips: %+v; want it refused", got)
	}
	f.o.Pools = []Pool{poolOfOne("203.0.113.11")}
	got := f.addressesFor(svc("a", 1, external))
	must.True(t, len(got.vips)+len(got.refused) == 0, "externalIPs in no pool: %+v", got)
}

// A Service may have 100,000 externalIPs, but only the first ones are read.
func TestManyExternalIPs(t *testing.T) {
	const vip = "203.0.113.1"
	f := newFixture(t, func(o *Options) { o.Pools = []Pool{poolOfOne(vip, forExternalIPs)} })
	for i, want := range map[int]string{
		99: "[203.0.113.1] []", 100: "[] [{203.0.113.1 refused: only the first 100 externalIPs of a Service are used}]",
	} {
		s := aService(func(s *core.Service) {
			s.Status = core.ServiceStatus{}
			for i := range 200 {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("198.51.100.%d", i))
			}
			s.Spec.ExternalIPs[i] = vip
		})
		a := f.addressesFor(s)
		must.True(t, fmt.Sprint(a.vips, a.refused) == want, "at %d: %v %v; want %s", i, a.vips, a.refused, want)
	}
}

// The externalIPs of one namespace leave other namespaces room in max_routes, and other routes in the routers.
func TestExternalIPsOfANamespace(t *testing.T) {
	pool := poolFrom("external", "10.0.0.0", "10.255.255.255", forExternalIPs)
	f := newFixture(t, func(o *Options) { o.Pools = []Pool{pool} })
	external := func(name string, n int) int {
		namespace, short, _ := strings.Cut(name, "/")
		f.have(t, aService(func(s *core.Service) {
			s.Namespace, s.Name, s.Status = namespace, short, core.ServiceStatus{}
			for i := range n {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("10.%d.%d.%d", namespace[0], short[0], i))
			}
		}))
		f.reconcile(name, fakeSink{f.recorded})
		s := f.put[name]
		if s == nil {
			return 0
		}
		must.Row(t, "UnrestrictedVIPs", len(s.VIPs), len(s.UnrestrictedVIPs))
		must.Row(t, "VIPs and refused", n, len(s.VIPs)+len(s.Refused))
		return len(s.VIPs)
	}
	for i, want := range []int{100, 100, 50, 0} {
		must.Row(t, fmt.Sprint("Service ", i), want, external(fmt.Sprintf("a/%d", i), 100))
	}
	must.Row(t, "another namespace", 100, external("b/0", 100))
	f.queued()
	must.Row(t, "a smaller one", 10, external("a/0", 10))
	waiting := f.queued()
	slices.Sort(waiting)
	must.Row(t, "handled again", "[a/1 a/2 a/3]", fmt.Sprint(waiting))
	must.Row(t, "the first again", 100, external("a/2", 100))
	must.Row(t, "the last again", 40, external("a/3", 100))
}

// Whatever is written to Services, nodes serve only addresses in pools, externalIPs only if their pool permits them,
// and each address by the announcers of its pool.
func TestRails(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 12))
	address := func() string {
		switch rng.IntN(8) {
		case 0:
			return fmt.Sprintf("2001:db8::%x", rng.IntN(8))
		case 1:
			odd := []string{"0.0.0.0", "::", "127.0.0.1", "fe80::1", "224.0.0.1", "::ffff:203.0.113.2", "x", ""}
			return odd[rng.IntN(len(odd))]
		}
		return fmt.Sprintf("203.0.113.%d", rng.IntN(16))
	}
	inside, outside := 0, 0
	for range 2000 {
		pool := func(name, from, to string, by ...lb.AnnouncerKind) Pool {
			p := poolFrom(name, from, to)
			p.Announce, p.ExternalIPs = by, rng.IntN(2) == 0
			return p
		}
		pools := []Pool{
			pool("bgp", "203.0.113.4", "203.0.113.7", lb.AnnounceBGP),
			pool("l2", "203.0.113.8", "203.0.113.9", lb.AnnounceL2),
			pool("six", "2001:db8::1", "2001:db8::3"),
		}
		f := newFixture(t, func(o *Options) { o.Pools = pools })
		f.have(t, node("n1", "192.0.2.1"))
		var names []string
		for n := range 1 + rng.IntN(4) {
			s := aService(func(s *core.Service) {
				s.Name, s.Status = fmt.Sprintf("s%d", n), core.ServiceStatus{}
				s.Spec.Type = []core.ServiceType{
					core.ServiceTypeLoadBalancer, core.ServiceTypeClusterIP, core.ServiceTypeNodePort,
				}[rng.IntN(3)]
				for range rng.IntN(4) {
					ingress := core.LoadBalancerIngress{IP: address()}
					s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
				}
				for range rng.IntN(3) {
					s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, address())
				}
				s.Spec.LoadBalancerIP = address()
				s.Annotations = map[string]string{wantAddresses[0]: address(), perNode[0]: "true", wantShare[0]: "x"}
			})
			f.have(t, s)
			names = append(names, nameOf(s))
		}
		for _, name := range names {
			f.reconcile(name, fakeSink{f.recorded})
		}
		for _, name := range names {
			served := f.put[name]
			if served == nil {
				continue
			}
			x, _, _ := f.services.GetByKey(name)
			inStatus := addressesOf(x.(*core.Service))
			for _, vip := range served.VIPs {
				rule, known := served.PerVIP[vip]
				if !known {
					rule.Announce = served.Announce
				}
				switch p := poolOf(pools, vip); {
				case p == nil:
					t.Fatalf("%s serves %s, which is in no pool", name, vip)
				case !slices.Equal(rule.Announce, p.Announce):
					t.Fatalf("%s announces %s by %v", name, vip, rule.Announce)
				case !slices.Contains(inStatus, vip) && !p.ExternalIPs:
					t.Fatalf("%s announces %s of spec.externalIPs", name, vip)
				default:
					inside++
				}
			}
			for _, r := range served.Refused {
				if poolOf(pools, r.VIP) == nil {
					outside++
				}
			}
		}
	}
	must.True(t, inside >= 1000 && outside >= 1000, "%d addresses inside of pools, and %d outside", inside, outside)
}
