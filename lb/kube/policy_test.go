package kube

import (
	"fmt"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

func TestPolicyIsExternalTrafficPolicy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   lb.Policy
	}{
		{"unset", func(s *core.Service) { s.Spec.ExternalTrafficPolicy = "" }, lb.PolicyCluster},
		{"Cluster", same, lb.PolicyCluster},
		{"Local", local, lb.PolicyLocal},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := viewOn(aService(tt.change), nil, topology{node: "n1"}, false).service.Policy; got != tt.want {
				t.Errorf("policy %q; want %q", got, tt.want)
			}
		})
	}
}

// Under Local, packets to each port and family without a backend here are dropped when another node has one, and
// refused when none has, whatever is so of the other ports and of the other family (pkg/proxy/service.go).
func TestDropsByPortAndFamily(t *testing.T) {
	port := func(name string, at int32, e *discovery.EndpointSlice) *discovery.EndpointSlice {
		e.Ports = []discovery.EndpointPort{{Name: ptr(name), Port: &at, Protocol: ptr(core.ProtocolTCP)}}
		return e
	}
	v6 := port("http", 8080, slice(0, ep("2001:db8::2", "n2", "rs")))
	v6.AddressType = discovery.AddressTypeIPv6
	s := viewOn(aService(func(s *core.Service) {
		local(s)
		s.Spec.Ports = append(s.Spec.Ports,
			core.ServicePort{Name: "else", Port: 81}, core.ServicePort{Name: "none", Port: 82})
	}), []*discovery.EndpointSlice{
		port("http", 8080, slice(0, ep("10.0.0.1", "n1", "rs"))), v6,
		port("else", 8081, slice(0, ep("10.0.0.2", "n2", "rs"))),
	}, topology{node: "n1"}, false).service
	got := ""
	for _, p := range s.Ports {
		got += fmt.Sprintln(p.Port.Port, len(p.Backends), p.DropWhenEmpty)
	}
	if want := "80 1 [IPv6]\n81 0 [IPv4]\n82 0 []\n"; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
