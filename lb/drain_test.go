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

// A target is a backend at all of its ports, or at one.
func TestDrainedBackends(t *testing.T) {
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	s := &Service{Name: "web", Ports: PortsOn([]Backend{{Addr: one}, {Addr: two}, {Addr: two, Port: 9000}},
		Port{Port: 80, Target: 8080}, Port{Port: 443, Target: 8443})}
	for _, tt := range []struct {
		target DrainTarget
		want   string
	}{
		{DrainTarget{"web", two, 0}, "80: 192.0.2.2:8080 192.0.2.2:9000 443: 192.0.2.2:8443 192.0.2.2:9000 "},
		{DrainTarget{"web", two, 8443}, "80: 443: 192.0.2.2:8443 "},
		{DrainTarget{"web", two, 9000}, "80: 192.0.2.2:9000 443: 192.0.2.2:9000 "},
		{DrainTarget{"api", two, 0}, "80: 443: "},
	} {
		d, got := Drains{}.With(tt.target, true), ""
		for _, p := range d.applied(s).Ports {
			got += fmt.Sprintf("%d: ", p.Port.Port)
			for _, b := range p.Backends {
				if b.Drain {
					got += b.On(p.Port).String() + " "
				}
			}
		}
		must.Row(t, tt.target.String(), tt.want, got)
		must.True(t, d.Has(tt.target) && !d.With(tt.target, false).Has(tt.target), "%s: not undrained", tt.target)
	}
	must.True(t, !s.Ports[0].Backends[1].Drain, "the original changed")
}

// A backend is no longer drained once its entry in the configuration, or its service, has changed.
func TestDrainsAfterChanges(t *testing.T) {
	d := Drains{}.With(DrainTarget{"web", netip.MustParseAddr("192.0.2.2"), 0}, true)
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
