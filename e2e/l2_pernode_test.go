package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// apart waits until each of these agents has one of m's addresses of each family.
func (m *members) apart(t *testing.T, agents ...*lab.Agent) {
	t.Helper()
	labtest.Until(t, time.Minute, "each member has an address of each family", func() error {
		owners, err := m.owners(t, agents...)
		if err != nil {
			return err
		}
		for _, is4 := range []bool{true, false} {
			has := map[*lab.Agent][]netip.Addr{}
			for vip, a := range owners {
				if vip.Is4() == is4 {
					has[a] = append(has[a], vip)
				}
			}
			if len(has) != len(agents) {
				return fmt.Errorf("%v", has)
			}
		}
		return nil
	})
}

// TestAddressPerMember: after a reload, a service that had eight fixed addresses has one of each family for each of
// three members, on different ones. The address of a member that is killed moves, and another one comes to it when it
// has returned, without a lost request.
func TestAddressPerMember(t *testing.T) {
	m := newMembers(t, 3)
	m.vips = m.vips[:6]
	for i, a := range m.agents {
		s := &m.config[i].Services[0]
		s.Addresses, s.Extra = nil, "pool = \"lan\"\naddress_per_node = true"
		s.Check = lab.AgentCheck{Type: "none"} // on a busy machine, checks fail
		m.config[i].Extra = "[[pool]]\nname = \"lan\"\naddresses = [\"203.0.113.10-203.0.113.12\", " +
			"\"2001:db8:1::10-2001:db8:1::12\"]\n"
		if err := errors.Join(a.Configure(m.config[i].TOML()), a.Reload()); err != nil {
			t.Fatal(err)
		}
	}
	m.apart(t, m.agents...)
	killed := m.settled(t, m.agents...)[m.vips[0]]
	killed.Kill()
	m.settled(t, m.others(killed)...)
	var stops []func() (time.Duration, int)
	for i := 0; i < len(m.vips); i += 2 { // the IPv4 ones: one of them moves
		stops = append(stops, m.gap(t, m.vips[i], 5*time.Second))
	}
	if err := killed.Start(); err != nil {
		t.Fatal(err)
	}
	m.apart(t, m.agents...)
	for i, stop := range stops {
		if longest, lost := stop(); lost > 0 || longest > takeOverLimit {
			t.Errorf("%s: %d requests lost, none answered for %s", m.vips[2*i], lost, longest)
		}
	}
}

// TestAddressPerNodeOfACluster: a Service with the annotation gets an address of each family per node, on different
// nodes, and one again without it.
func TestAddressPerNodeOfACluster(t *testing.T) {
	s := newSegmentCluster(t)
	before := s.m.vips
	annotate := func(value string) {
		t.Helper()
		api := s.api.CoreV1().Services("default")
		labtest.Until(t, 10*time.Second, "the Service is changed", func() error {
			service, err := api.Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			service.Annotations = map[string]string{"steelyard.dev/address-per-node": value}
			_, err = api.Update(t.Context(), service, meta.UpdateOptions{})
			return err
		})
	}
	wait := func(n int) (vips []netip.Addr) {
		t.Helper()
		labtest.Until(t, 30*time.Second, fmt.Sprintf("the Service has %d addresses", n), func() error {
			service, err := s.api.CoreV1().Services("default").Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			vips = nil
			for _, i := range service.Status.LoadBalancer.Ingress {
				vips = append(vips, netip.MustParseAddr(i.IP))
			}
			if len(vips) != n {
				return fmt.Errorf("it has %v", vips)
			}
			return nil
		})
		return vips
	}
	annotate("true")
	s.m.vips = wait(2 * len(s.agents))
	if !slices.Equal(s.m.vips[:2], before[:2]) {
		t.Errorf("addresses %v; want those of before first: %v", s.m.vips, before[:2])
	}
	second := before[2:]
	s.deleteService(t, "second")
	s.m.apart(t, s.agents...)
	s.waitAnswered(t, s.m.vips...)
	annotate("false")
	if got := wait(2); !slices.Equal(got, before[:2]) {
		t.Errorf("addresses %v; want %v", got, before[:2])
	}
	s.m.vips = before[:2]
	s.createService(t, "second", func(*core.Service) {})
	if got := s.waitAddresses(t, "second"); len(got) != len(second) {
		t.Errorf("addresses of the other Service: %v", got)
	}
}
