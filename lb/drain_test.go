package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestDrainsWith(t *testing.T) {
	of := func(name string) DrainTarget { return DrainTarget{Service: name} }
	d := Drains{}.With(of("a"), true).With(of("b"), true).With(of("a"), true)
	must.True(t, slices.Equal(d.Services, []string{"b", "a"}) && !d.Node, "drains %+v; want b and a", d)
	e := d.With(of("b"), false)
	must.True(t, slices.Equal(e.Services, []string{"a"}) && slices.Equal(d.Services, []string{"b", "a"}),
		"without b: %+v; want a; before: %+v; want b and a", e, d)
	node := d.With(DrainTarget{}, true)
	for name, tt := range map[string]struct {
		d    Drains
		want string
	}{"b": {d, drained}, "c": {d, ""}, "d": {node, drained}, "e": {node.With(DrainTarget{}, false), ""}} {
		must.Row(t, fmt.Sprintf("%s with %+v", name, tt.d), tt.want, tt.d.reason(name))
	}
}

// A server is drained at all of its ports.
func TestDrainedBackends(t *testing.T) {
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	s := &Service{Name: "web", Ports: PortsOn([]Backend{{Addr: one}, {Addr: two}, {Addr: two, Port: 9000}},
		Port{Port: 80, Target: 8080}, Port{Port: 443, Target: 8443})}
	server, other := DrainTarget{"web", two}, DrainTarget{"api", two}
	for _, tt := range []struct {
		d    Drains
		want string
	}{
		{Drains{}.With(server, true).With(other, true),
			"192.0.2.2:8080 192.0.2.2:9000 192.0.2.2:8443 192.0.2.2:9000 "},
		{Drains{}.With(server, true).With(other, true).With(server, false), ""},
		{Drains{}.With(server, true).With(other, true).With(DrainTarget{Service: "web"}, false), ""},
	} {
		got := ""
		for _, p := range tt.d.applied(s).Ports {
			for _, b := range p.Backends {
				if b.Drain {
					got += b.On(p.Port).String() + " "
				}
			}
		}
		must.Row(t, fmt.Sprint(tt.d), tt.want, got)
		must.Row(t, "it has the server", tt.want != "", tt.d.Has(server))
	}
	must.True(t, !s.Ports[0].Backends[1].Drain, "the original changed")
}

// A backend is no longer drained once its entry in the configuration, or its service, has changed.
func TestDrainsAfterChanges(t *testing.T) {
	d := Drains{}.With(DrainTarget{"web", netip.MustParseAddr("192.0.2.2")}, true)
	for object, ends := range map[string]bool{
		"backend 192.0.2.2 of web": true, "backend 192.0.2.2:9000 of web": true, "service web": true,
		"backend 192.0.2.20 of web": false, "backend 192.0.2.2 of api": false, "service api": false,
	} {
		now, ended := d.After([]Change{{Op: Removed, Object: object}})
		must.Row(t, object, ends, len(now.Names()) == 0)
		must.Row(t, object, ends, len(ended) == 1)
	}
	now, _ := d.After([]Change{{Op: Changed, Object: "service web"}})
	must.Row(t, "other settings of the service", d, now)
}

// A service whose servers are all drained is not announced, whatever should happen while all fail.
func TestAllServersAreDrained(t *testing.T) {
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, MinHealthy: 1, KeepAllDown: true, Check: CheckSpec{Type: CheckTCP},
		Ports: PortsOn(backends("10.0.0.1", "10.0.0.2"), Port{Port: 80, Target: 80, Protocol: TCP}),
	}
	for i, want := range []string{"", "", "0 of 2 backends healthy, min_healthy is 1"} {
		d := Drains{}
		for _, b := range s.Ports[0].Backends[:i] {
			d = d.With(DrainTarget{"web", b.Addr}, true)
		}
		must.Row(t, i, want, Build(d.applied(s), states(s, "uu"), d).VIPs[0].Reason)
	}
}
