package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	testVIP  = netip.MustParseAddr("203.0.113.10")
	testVIP6 = netip.MustParseAddr("2001:db8::10")
)

// backend returns a backend of weight 1 at "10.0.0.1" or "10.0.0.1:9000".
func backend(at string) Backend {
	if ap, err := netip.ParseAddrPort(at); err == nil {
		return Backend{Addr: ap.Addr(), Port: ap.Port(), Weight: 1}
	}
	return Backend{Addr: netip.MustParseAddr(at), Weight: 1}
}

func backends(at ...string) []Backend {
	out := make([]Backend, len(at))
	for i, a := range at {
		out[i] = backend(a)
	}
	return out
}

func TestChecks(t *testing.T) {
	web, tls, dns := Port{80, 0, 8080, TCP}, Port{443, 0, 8443, TCP}, Port{53, 0, 5353, UDP}
	for _, tt := range []struct {
		name   string
		change func(*Service)
		want   string // targets, and the VIP of those that have one
	}{
		{"every TCP port", func(s *Service) {}, "[10.0.0.1:8080 10.0.0.2:9000 10.0.0.1:8443]"},
		{"every UDP port", func(s *Service) {
			s.Check.Type, s.Check.ServicePort = CheckDNS, dns
		}, "[10.0.0.1:5353 10.0.0.2:9000]"},
		{"a program for every port", func(s *Service) {
			s.Check.Type = CheckExec
		}, "[10.0.0.1:8080 10.0.0.2:9000 10.0.0.1:8443 10.0.0.1:5353]"},
		{"no port of the protocol", func(s *Service) {
			s.Check.Type, s.Check.ServicePort, s.Ports = CheckUDP, web, s.Ports[:2]
		}, "[10.0.0.1:8080 10.0.0.2:9000]"},
		{"two ports with one target", func(s *Service) { s.Ports[1].Target = 8080 }, "[10.0.0.1:8080 10.0.0.2:9000]"},
		{"the check's own port", func(s *Service) { s.Check.Port = 7 }, "[10.0.0.1:7 10.0.0.2:7]"},
		{"none", func(s *Service) { s.Check.Type = CheckNone }, "[]"},
		{"no ports", func(s *Service) { s.Ports = nil }, "[]"},
		{"dsr", func(s *Service) {
			s.Method = MethodDSR
		}, "[10.0.0.1:8080 to 203.0.113.10 10.0.0.2:9000 to 203.0.113.10 10.0.0.1:8443 to 203.0.113.10]"},
		{"dsr, the other family has the first VIP", func(s *Service) {
			s.Method, s.VIPs = MethodDSR, []netip.Addr{testVIP6, testVIP}
		}, "[10.0.0.1:8080 to 203.0.113.10 10.0.0.2:9000 to 203.0.113.10 10.0.0.1:8443 to 203.0.113.10]"},
		{"dsr, no VIP of the family", func(s *Service) {
			s.Method, s.VIPs = MethodDSR, []netip.Addr{testVIP6}
		}, "[10.0.0.1:8080 10.0.0.2:9000 10.0.0.1:8443]"},
		{"tunnel to the other family", func(s *Service) {
			s.Method, s.VIPs = MethodTunnel, []netip.Addr{testVIP6}
		}, "[10.0.0.1:8080 to 2001:db8::10 10.0.0.2:9000 to 2001:db8::10 10.0.0.1:8443 to 2001:db8::10]"},
		{"ports with other backends", func(s *Service) {
			s.Ports[1].Backends = backends("10.0.0.2:9000", "10.0.0.3")
		}, "[10.0.0.1:8080 10.0.0.2:9000 10.0.0.3:8443]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &Service{
				Name: "web", VIPs: []netip.Addr{testVIP}, Method: MethodNAT,
				Ports: PortsOn(backends("10.0.0.1", "10.0.0.2:9000"), web, tls, dns),
				Check: CheckSpec{Type: CheckTCP, ServicePort: web},
			}
			tt.change(s)
			got := []string{}
			keys := map[CheckKey]bool{}
			for _, c := range Checks(s) {
				text := c.Target.String()
				if c.VIP.IsValid() {
					text += " to " + c.VIP.String()
				}
				got = append(got, text)
				keys[c.Key] = true
				must.True(t, c.Key.Service == "web" && c.Key.Backend.Addr() == c.Target.Addr() && c.Method == s.Method,
					"check %+v is not of %s", c, s.Name)
			}
			must.True(t, fmt.Sprint(got) == tt.want, "checks %v; want %s", got, tt.want)
			must.Equal(t, len(got), len(keys))
		})
	}
}

func TestStatusRange(t *testing.T) {
	r := StatusRange{200, 299}
	for code, want := range map[int]bool{199: false, 200: true, 250: true, 299: true, 300: false} {
		must.Row(t, code, want, r.Contains(code))
	}
}

// A backend that serves each port of the service is logged without a port.
func TestBackendName(t *testing.T) {
	for _, want := range []string{"10.0.0.2", "10.0.0.2:9000", "2001:db8::2", "[2001:db8::2]:9000"} {
		b := Backend{}
		if at, err := netip.ParseAddrPort(want); err == nil {
			b.Addr, b.Port = at.Addr(), at.Port()
		} else {
			b.Addr = netip.MustParseAddr(want)
		}
		must.Equal(t, want, (CheckKey{Backend: b.ID()}).BackendName())
	}
}

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

// Frontends are ordered by address, port, last port, protocol and decap.
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
