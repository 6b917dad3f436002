package lb

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestPortOverlaps(t *testing.T) {
	for _, tt := range []struct {
		name string
		a, b Port
		want bool
	}{
		{"same port", Port{Port: 80, Protocol: TCP}, Port{Port: 80, Protocol: TCP}, true},
		{"same port, other target", Port{80, 0, 1, TCP}, Port{80, 0, 2, TCP}, true},
		{"same port, other protocol", Port{Port: 53, Protocol: TCP}, Port{Port: 53, Protocol: UDP}, false},
		{"other port", Port{Port: 80, Protocol: TCP}, Port{Port: 81, Protocol: TCP}, false},
		{"in a range", Port{Port: 85, Protocol: TCP}, Port{Port: 80, Last: 89, Protocol: TCP}, true},
		{"first of a range", Port{Port: 80, Protocol: TCP}, Port{Port: 80, Last: 89, Protocol: TCP}, true},
		{"last of a range", Port{Port: 89, Protocol: TCP}, Port{Port: 80, Last: 89, Protocol: TCP}, true},
		{"before a range", Port{Port: 79, Protocol: TCP}, Port{Port: 80, Last: 89, Protocol: TCP}, false},
		{"after a range", Port{Port: 90, Protocol: TCP}, Port{Port: 80, Last: 89, Protocol: TCP}, false},
		{"in a range, other protocol", Port{Port: 85, Protocol: UDP}, Port{Port: 80, Last: 89, Protocol: TCP}, false},
		{"ranges", Port{Port: 80, Last: 85, Protocol: TCP}, Port{Port: 85, Last: 89, Protocol: TCP}, true},
		{"range within a range", Port{82, 84, 1, TCP}, Port{80, 89, 1, TCP}, true},
		{"adjacent ranges", Port{Port: 80, Last: 84, Protocol: TCP}, Port{Port: 85, Last: 89, Protocol: TCP}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			must.Equal(t, tt.want, tt.a.Overlaps(tt.b))
			must.Equal(t, tt.want, tt.b.Overlaps(tt.a))
		})
	}
}

func TestFrontendText(t *testing.T) {
	v4, v6 := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8::10")
	for _, tt := range []struct {
		f                   Frontend
		text, ports, ofPort string
	}{
		{Frontend{v4, 80, 0, TCP, false}, "203.0.113.10:80/tcp", "80", "80/tcp"},
		{Frontend{v6, 53, 0, UDP, false}, "[2001:db8::10]:53/udp", "53", "53/udp"},
		{Frontend{v4, 8000, 8999, SCTP, false}, "203.0.113.10:8000-8999/sctp", "8000-8999", "8000-8999/sctp"},
		{Frontend{v4, 80, 0, TCP, true}, "203.0.113.10:80/tcp (decap)", "80", "80/tcp"},
		{Frontend{v6, 80, 89, TCP, true}, "[2001:db8::10]:80-89/tcp (decap)", "80-89", "80-89/tcp"},
	} {
		must.Equal(t, tt.text, tt.f.String())
		must.Equal(t, tt.ports, tt.f.Ports())
		p := Port{Port: tt.f.Port, Last: tt.f.Last, Protocol: tt.f.Protocol}
		must.Equal(t, tt.ofPort, p.Name())
		on := p.On(tt.f.VIP)
		on.Decap = tt.f.Decap
		must.Equal(t, tt.f, on)
	}
}

// Each field decides by itself, in this order: address, port, last port, protocol, decap.
func TestCompareFrontends(t *testing.T) {
	a, b := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("203.0.113.11")
	sorted := []Frontend{
		{a, 80, 0, TCP, false}, {a, 80, 0, TCP, true}, {a, 80, 0, UDP, false}, {a, 80, 89, TCP, false},
		{a, 81, 0, TCP, false}, {b, 80, 0, TCP, false},
	}
	mixed := []Frontend{sorted[5], sorted[1], sorted[3], sorted[0], sorted[4], sorted[2]}
	slices.SortFunc(mixed, CompareFrontends)
	must.Equal(t, sorted, mixed)
	for i, x := range sorted {
		for j, y := range sorted {
			must.True(t, (CompareFrontends(x, y) == 0) == (i == j), "%s and %s", x, y)
		}
	}
}
