package lb

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// changed returns a service as read from a file, changed by f.
func changed(f func(*Service)) *Service {
	backends := []Backend{
		{Addr: netip.MustParseAddr("10.0.0.21"), Weight: 1},
		{Addr: netip.MustParseAddr("10.0.0.22"), Port: 9000, Weight: 1},
	}
	s := &Service{
		Name: "web", Source: "file", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
		Ports:     PortsOn(backends, Port{Port: 80, Target: 8080, Protocol: TCP}),
		Algorithm: AlgorithmMaglev, Method: MethodNAT, MinHealthy: 1,
		Check: CheckSpec{Type: CheckTCP, Interval: time.Second},
	}
	f(s)
	return s
}

func TestChanges(t *testing.T) {
	ipv6, more := netip.MustParseAddr("2001:db8::10"), Port{Port: 443, Last: 444, Target: 8443, Protocol: TCP}
	for _, tt := range []struct {
		name string
		f    func(*Service)
		want []string
	}{
		{"nothing", func(*Service) {}, nil},
		{"addresses", func(s *Service) { s.VIPs = []netip.Addr{ipv6} }, []string{
			"+ address 2001:db8::10 of web", "- address 203.0.113.10 of web ends {Service:web Address:203.0.113.10}",
		}},
		{"ports", func(s *Service) { s.Ports = PortsOn(s.Ports[0].Backends, more) }, []string{
			"+ port 443-444/tcp of web", "- port 80/tcp of web ends {Service:web Port:80}",
		}},
		{"target", func(s *Service) { s.Ports[0].Target = 81 }, []string{
			"~ port 80/tcp of web: backend port 8080 -> 81",
		}},
		{"backends", func(s *Service) {
			s.Ports[0].Backends = []Backend{{Addr: netip.MustParseAddr("10.0.0.21"), Weight: 3, Drain: true}}
		}, []string{
			"~ backend 10.0.0.21 of web: weight 1 -> 3, drain false -> true",
			"- backend 10.0.0.22:9000 of web ends {Service:web Backend:10.0.0.22}",
		}},
		{"forward", func(s *Service) { s.Method, s.Encap = MethodTunnel, EncapGUE }, []string{
			`~ service web: forward nat -> tunnel, tunnel "" -> gue ends {Service:web}`,
		}},
		{"algorithm, check", func(s *Service) { s.Algorithm, s.Check.Type = AlgorithmRandom, CheckNone }, []string{
			"~ service web: algorithm maglev -> random, check tcp -> none",
		}},
		{"interval", func(s *Service) { s.Check.Interval = time.Minute }, []string{"~ service web: check"}},
		{"what has no word", func(s *Service) { s.VIPPerNode = true }, []string{"~ service web"}},
		{"name", func(s *Service) { s.Name = "a" }, []string{
			"+ service a: 203.0.113.10; 80/tcp; 2 backends",
			"- service web: 203.0.113.10; 80/tcp; 2 backends ends {Service:web}",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, c := range Changes([]*Service{changed(func(*Service) {})}, []*Service{changed(tt.f)}) {
				got = append(got, c.String()+ending(c.Ends))
			}
			must.Equal(t, tt.want, got)
		})
	}
}

// ending describes the fields of a filter that are set.
func ending(w FlowFilter) (text string) {
	v := reflect.ValueOf(w)
	for i := range v.NumField() {
		if !v.Field(i).IsZero() {
			text += fmt.Sprintf(" %s:%v", v.Type().Field(i).Name, v.Field(i).Interface())
		}
	}
	if text == "" {
		return ""
	}
	return " ends {" + text[1:] + "}"
}

func TestChangeWithConnections(t *testing.T) {
	c := Change{Op: Removed, Object: "service web"}
	for n, want := range map[int]string{
		0: "- service web", 1: "- service web; ends 1 connection", 41: "- service web; ends 41 connections",
		ConnectionsMax: "- service web; ends at least 100000 connections",
	} {
		c.Connections = n
		must.True(t, c.String() == want, "%q; want %q", c, want)
	}
}
