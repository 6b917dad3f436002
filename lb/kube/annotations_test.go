package kube

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An unknown annotation with our prefix causes an Event, once for each set of them.
func TestUnknownAnnotations(t *testing.T) {
	for _, tt := range []struct {
		annotations []string
		want        string
	}{
		{nil, ""},
		{[]string{"steelyard.dev/pool", "metallb.io/adress-pool", "example.com/pool"}, ""},
		{[]string{"steelyard.dev/pools", "steelyard.dev/adresses"},
			"Warning UnknownAnnotation steelyard.dev/adresses, steelyard.dev/pools has no effect; " +
				"the annotations are steelyard.dev/addresses, steelyard.dev/pool, steelyard.dev/share, " +
				"steelyard.dev/share-with, steelyard.dev/address-per-node, steelyard.dev/algorithm, " +
				"steelyard.dev/announce-from, steelyard.dev/port-ranges, steelyard.dev/probe-interval, " +
				"steelyard.dev/probe-timeout, steelyard.dev/probe-rise, steelyard.dev/probe-fall"},
	} {
		s := wanting("web", func(s *core.Service) {
			given("203.0.113.1")(s)
			s.Finalizers, s.Annotations = []string{finalizer}, map[string]string{}
			for _, name := range tt.annotations {
				s.Annotations[name] = ""
			}
			slim(s)
		})
		term, _, events := testTerm(t, s)
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		must.Row(t, tt.annotations, tt.want, strings.Join(drained(events), "\n"))
	}
}

// A wrong value of an annotation causes an Event.
func TestWrongAnnotation(t *testing.T) {
	s := wanting("web", func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Finalizers, s.Annotations = []string{finalizer}, map[string]string{algorithm[0]: "fastest"}
		s.Annotations[from[0]] = "pods"
	})
	term, _, events := testTerm(t, s)
	must.Do(t, term.reconcile(t.Context(), webName))
	must.Equal(t, []string{`Warning WrongAnnotation steelyard.dev/algorithm: unknown algorithm "fastest"; allowed: ` +
		"maglev, round-robin, random, source-hash, least-connections; " +
		`steelyard.dev/announce-from is "pods"; write "endpoints"`}, drained(events))
}

// A wrong value of an annotation is named, and does not change the previous setting.
func TestSettings(t *testing.T) {
	before := settings{
		algorithm: lb.AlgorithmSourceHash, fromEndpoints: true, ranges: map[lb.Port]uint16{sip: 5069},
		interval: time.Second, timeout: 500 * time.Millisecond, rise: 2, fall: 3,
	}
	for _, tt := range []struct {
		name, value string
		change      func(*settings) // to the settings without annotations
		err         string
	}{
		{"algorithm", "round-robin", func(x *settings) { x.algorithm = lb.AlgorithmRoundRobin }, ""},
		{"algorithm", "fastest", func(x *settings) { x.algorithm = before.algorithm },
			`steelyard.dev/algorithm: unknown algorithm "fastest"; allowed: ` +
				"maglev, round-robin, random, source-hash, least-connections"},
		{"announce-from", "endpoints", func(x *settings) { x.fromEndpoints = true }, ""},
		{"announce-from", "pods", func(x *settings) { x.fromEndpoints = true },
			`steelyard.dev/announce-from is "pods"; write "endpoints"`},
		{"probe-interval", "200ms", func(x *settings) { x.interval = 200 * time.Millisecond }, ""},
		{"probe-interval", "100ms", func(x *settings) { x.interval = time.Second },
			`steelyard.dev/probe-interval is "100ms"; write a duration from 200ms to 1m0s`},
		{"probe-interval", "61s", func(x *settings) { x.interval = time.Second },
			`steelyard.dev/probe-interval is "61s"; write a duration from 200ms to 1m0s`},
		{"probe-timeout", "50ms", func(x *settings) { x.timeout = 50 * time.Millisecond }, ""},
		{"probe-timeout", "1", func(x *settings) { x.timeout = 500 * time.Millisecond },
			`steelyard.dev/probe-timeout is "1"; write a duration from 10ms to 1m0s`},
		{"probe-rise", "10", func(x *settings) { x.rise = 10 }, ""},
		{"probe-rise", "11", func(x *settings) { x.rise = 2 },
			`steelyard.dev/probe-rise is "11"; write a number from 1 to 10`},
		{"probe-fall", "1", func(x *settings) { x.fall = 1 }, ""},
		{"probe-fall", "0", func(x *settings) { x.fall = 3 },
			`steelyard.dev/probe-fall is "0"; write a number from 1 to 10`},
		{"port-ranges", "5060-5070/UDP", func(x *settings) { x.ranges = map[lb.Port]uint16{sip: 5070} }, ""},
		{"port-ranges", "5060/UDP", func(x *settings) { x.ranges = before.ranges },
			`steelyard.dev/port-ranges: "5060/UDP" is not a range; write one such as 10000-10999/UDP`},
	} {
		s := aService(withPorts)
		s.Annotations = map[string]string{ourPrefix + tt.name: tt.value}
		want := settings{}
		tt.change(&want)
		got, err := settingsOf(s, before)
		must.Row(t, tt.name+" "+tt.value, fmt.Sprint(want), fmt.Sprint(got))
		must.Row(t, "error", tt.err, text(err))
	}
	s := aService(same)
	s.Annotations = map[string]string{probeInterval[0]: "1s", probeTimeout[0]: "2s"}
	got, err := settingsOf(s, before)
	must.Equal(t, "steelyard.dev/probe-timeout is longer than steelyard.dev/probe-interval", text(err))
	must.Equal(t, before.timeout, got.timeout)
}

var sip = lb.Port{Port: 5060, Protocol: lb.UDP}

// withPorts gives a Service the ports 5060/UDP, 5060/TCP and 10000/UDP.
func withPorts(s *core.Service) {
	s.Spec.Ports = []core.ServicePort{
		{Name: "sip", Port: 5060, Protocol: core.ProtocolUDP, TargetPort: intstr.FromInt32(5060)},
		{Name: "sip-tcp", Port: 5060, Protocol: core.ProtocolTCP, TargetPort: intstr.FromInt32(5060)},
		{Name: "rtp", Port: 10000, Protocol: core.ProtocolUDP, TargetPort: intstr.FromInt32(60000)},
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestRangesOf(t *testing.T) {
	many := ""
	for i := range 17 {
		many += fmt.Sprintf("%d-%d/TCP ", 100+10*i, 101+10*i)
	}
	for _, tt := range []struct{ value, want string }{
		{"10000-10999/UDP", ""}, {"10000-10999/udp, 5060-5061/TCP 5060-5061/UDP", ""},
		{"10000-10000/UDP", `"10000-10000/UDP" is not a range; write one such as 10000-10999/UDP`},
		{"10000-10999", `"10000-10999" is not a range; write one such as 10000-10999/UDP`},
		{"10000-70000/UDP", `"10000-70000/UDP" is not a range; write one such as 10000-10999/UDP`},
		{"10000-10999/TCP", "10000-10999/TCP does not begin with a port of the Service"},
		{"10001-10999/UDP", "10001-10999/UDP does not begin with a port of the Service"},
		{"5060-10000/UDP", "5060-10000/UDP contains port 10000/UDP of the Service"},
		{"10000-15536/UDP", "10000-15536/UDP ends after port 65535 of the pods"},
		{"12-13/TCP, " + strings.Repeat("x", 100), "12-13/TCP does not begin with a port of the Service"},
		{"10000-10999/UDP 10000-10001/UDP", "10000-10001/UDP occurs twice"},
		{"5060-30000/TCP", "a Service can have 16 ranges with 20000 ports together"},
		{many, "a Service can have 16 ranges with 20000 ports together"},
	} {
		s := aService(withPorts)
		for i := range 17 {
			s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Port: int32(100 + 10*i), Protocol: core.ProtocolTCP})
		}
		s.Annotations = map[string]string{portRanges[0]: tt.value}
		if tt.want != "" {
			tt.want = portRanges[0] + ": " + tt.want
		}
		_, err := rangesOf(s)
		must.Row(t, tt.value, tt.want, text(err))
	}
}

// A range is served at the ports of pods with the same distance, unless a pod lacks some of these.
func TestRangeIsTranslated(t *testing.T) {
	s := aService(withPorts)
	s.Annotations = map[string]string{portRanges[0]: "5060-5069/UDP"}
	set, err := settingsOf(s, settings{})
	must.Do(t, err)
	high, usual := slice(65530, ep("10.0.0.2", "n1", "rs")), slice(5060, ep("10.0.0.1", "n1", "rs"))
	for _, x := range []*discovery.EndpointSlice{high, usual} {
		x.Ports[0].Name, x.Ports[0].Protocol = new("sip"), new(core.ProtocolUDP)
	}
	endpoints := slimmed([]*discovery.EndpointSlice{of("web", high), of("web", usual)})
	v := translate(s, set, addressesOf(s), endpoints, topology{node: "n1"}, false, false, 100)
	first := v.service.Ports[0]
	must.Equal(t, "5060-5069/udp", first.Name())
	must.Equal(t, 1, len(first.Backends))
	must.Equal(t, netip.MustParseAddr("10.0.0.1"), first.Backends[0].Addr)
	must.Equal(t, "5060/tcp", v.service.Ports[1].Name())
	must.Equal(t, rangePlaces+2, placesOf(v.service.Ports))
}

// A Service with ranges does not share its address. While another Service has a port there, it has no ranges.
func TestRangesAreNotShared(t *testing.T) {
	ranged := func(s *core.Service) {
		withPorts(s)
		s.Annotations = map[string]string{portRanges[0]: "10000-10999/UDP", wantShare[0]: "key"}
	}
	_, err := rangesOf(aService(ranged))
	must.Equal(t, portRanges[0]+": a Service with ranges cannot share addresses; remove "+wantShare[0], text(err))

	f := newFixture(t, func(o *Options) { o.Boundary = &lb.Boundary{Log: slog.New(slog.DiscardHandler)} })
	s := aService(func(s *core.Service) {
		ranged(s)
		delete(s.Annotations, wantShare[0])
	})
	f.have(t, node("n1", "192.0.2.1"), s)
	rtp := func() string {
		f.reconcile(nameOf(s), fakeSink{f.recorded})
		ports := f.put[nameOf(s)].Ports
		return ports[len(ports)-1].Name()
	}
	must.Row(t, "alone", "10000-10999/udp", rtp())
	other := aService(func(s *core.Service) { // another controller has written the address
		s.Name, s.UID, s.Spec.Ports = "other", "2", []core.ServicePort{{Port: 10500, Protocol: core.ProtocolUDP}}
	})
	f.have(t, other)
	must.Row(t, "with another Service", "10000/udp", rtp())
	must.Row(t, "troubles", 1, len(f.o.Boundary.Troubles()))
	must.Do(t, f.services.Delete(other))
	must.Row(t, "alone again", "10000-10999/udp", rtp())
	must.Row(t, "troubles", 0, len(f.o.Boundary.Troubles()))
	s.Annotations[portRanges[0]] = "10000-10999"
	must.Row(t, "with a wrong value", "10000-10999/udp", rtp())
	s.UID = "3"
	must.Row(t, "another Service of this name", "10000/udp", rtp())
}

// A Service's annotations override the node's [probe] section.
func TestProbeOfService(t *testing.T) {
	node := lb.CheckSpec{Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 1}
	must.Equal(t, node, settings{}.probe(node))
	want := lb.CheckSpec{Interval: 200 * time.Millisecond, Timeout: 200 * time.Millisecond, Rise: 2, Fall: 4}
	must.Equal(t, want, settings{interval: 200 * time.Millisecond, fall: 4}.probe(node))
}
