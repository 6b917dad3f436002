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

func TestDrainsWith(t *testing.T) {
	d := Drains{}.With("a", true).With("b", true).With("a", true)
	must.True(t, slices.Equal(d.Services, []string{"b", "a"}) && !d.Node, "drains %+v; want b and a", d)
	e := d.With("b", false)
	must.True(t, slices.Equal(e.Services, []string{"a"}) && slices.Equal(d.Services, []string{"b", "a"}),
		"without b: %+v; want a; before: %+v; want b and a", e, d)
	for name, tt := range map[string]struct {
		d    Drains
		want string
	}{
		"b": {d, drained}, "c": {d, ""}, "d": {d.With("", true), drained}, "e": {d.With("", true).With("", false), ""},
	} {
		if got := tt.d.reason(name); got != tt.want {
			t.Errorf("%s with %+v: %q; want %q", name, tt.d, got, tt.want)
		}
	}
}

// The log names no port of a backend that serves each port of the service.
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
