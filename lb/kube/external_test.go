package kube

import (
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The owner of a Service with externalIPs that no pool permits is told, once, whatever the type of the Service is.
func TestExternalIPNotPermitted(t *testing.T) {
	const want = "Warning ExternalIPNotPermitted 198.51.100.1 of spec.externalIPs is not announced: no pool permits " +
		"it; a [[pool]] that has the address and is for this Service needs external_ips = true"
	for _, tt := range []struct {
		ips  []string
		want string
	}{
		{[]string{"203.0.113.1", "198.51.100.1"}, want}, // the pool of the first one permits it
		{[]string{"203.0.113.1"}, ""},
		{nil, ""},
	} {
		term, _, events := testTerm(t, wanting("web", func(s *core.Service) {
			s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, tt.ips
		}))
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		got := ""
		for len(events.Events) > 0 {
			got += <-events.Events
		}
		if got != tt.want {
			t.Errorf("%v: %q; want %q", tt.ips, got, tt.want)
		}
	}
}

// An endpoint with an address that no host has is none: packets to it would reach nobody.
func TestEndpointsOfHosts(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1": true, "2001:db8::1": true,
		"239.1.1.1": false, "255.255.255.255": false, "ff02::1": false, "0.0.0.0": false,
	} {
		s := &discovery.EndpointSlice{Endpoints: []discovery.Endpoint{{Addresses: []string{addr}}}}
		if got := len(slimSlice(s).endpoints) == 1; got != want {
			t.Errorf("%s is an endpoint: %t; want %t", addr, got, want)
		}
	}
}
