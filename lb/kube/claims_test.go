package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/lb"
)

// All nodes serve the same one of the Services that have an address and a port, whatever they see first: one with the
// address in its status, then one that has the port by its record, then the oldest, then the lowest UID.
func TestWhoHasAnAddress(t *testing.T) {
	const vip = "203.0.113.10"
	svc := func(name string, minute int, change func(*core.Service)) *core.Service {
		return aService(func(s *core.Service) {
			s.Name, s.UID, s.Status = name, types.UID("uid-"+name), core.ServiceStatus{}
			s.CreationTimestamp = meta.NewTime(time.Unix(0, 0).Add(time.Duration(minute) * time.Minute))
			change(s)
		})
	}
	external := func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{vip}
	}
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
	class := func(s *core.Service) { given(vip)(s); s.Spec.LoadBalancerClass = ptr("x/y") }
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
			f := newFixture(t, func(o *Options) {
				at := netip.MustParseAddr(vip)
				o.Pools = []Pool{{ExternalIPs: true, Pool: lb.Pool{Ranges: []lb.AddrRange{{From: at, To: at}}}}}
			})
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
			if fmt.Sprint(got) != tt.want {
				t.Errorf("%s: served for %v; want %s", tt.name, got, tt.want)
			}
		}
	}

	// A Service whose addresses are all refused has its own row, under each policy.
	f := newFixture(t, func(o *Options) {
		at := netip.MustParseAddr(vip)
		o.Pools = []Pool{{ExternalIPs: true, Pool: lb.Pool{Ranges: []lb.AddrRange{{From: at, To: at}}}}}
		o.Forward, o.SpreadLocal = lb.MethodTunnel, func([]lb.AnnouncerKind) bool { return true }
	})
	thief := svc("thief", 1, external)
	thief.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
	f.have(t, holder, thief)
	if v := f.viewOf(nameOf(thief)); len(v.service.VIPs) > 0 || len(v.service.Refused) != 1 {
		t.Errorf("all addresses are refused: VIPs %v, refused %v", v.service.VIPs, v.service.Refused)
	}

	// Without permission of the pool externalIPs are refused. Those in no pool are not ours.
	f = newFixture(t, func(o *Options) {
		at := netip.MustParseAddr(vip)
		o.Pools = []Pool{{Pool: lb.Pool{Ranges: []lb.AddrRange{{From: at, To: at}}}}}
	})
	if got := f.addressesFor(svc("a", 1, external)); len(got.vips) > 0 || len(got.refused) != 1 {
		t.Errorf("externalIPs without external_ips: %+v; want that it is refused", got)
	}
	f.o.Pools = []Pool{poolOfOne("203.0.113.11")}
	if got := f.addressesFor(svc("a", 1, external)); len(got.vips)+len(got.refused) > 0 {
		t.Errorf("externalIPs in no pool: %+v", got)
	}
}

// A Service may have 100,000 externalIPs, and only the first ones are read.
func TestManyExternalIPs(t *testing.T) {
	const vip = "203.0.113.1"
	f := newFixture(t, func(o *Options) {
		at := netip.MustParseAddr(vip)
		o.Pools = []Pool{{ExternalIPs: true, Pool: lb.Pool{Ranges: []lb.AddrRange{{From: at, To: at}}}}}
	})
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
		if a := f.addressesFor(s); fmt.Sprint(a.vips, a.refused) != want {
			t.Errorf("at %d: %v %v; want %s", i, a.vips, a.refused, want)
		}
	}
}
