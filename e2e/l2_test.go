package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestAnnouncesByARPAndNDP: without BGP, neighbours on the segment resolve the VIPs by ARP and NDP.
func TestAnnouncesByARPAndNDP(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			links := lab.LinkOptions{SoftwareChecksums: mode == "xdp"}
			s := newBareSite(t, lab.Shape{Clients: 1, Servers: 3, Links: links})
			for _, n := range s.Servers {
				s.web = append(s.web, labtest.HTTP(t, n, 8080))
			}
			// The prefixes of the VIPs are on the segment, so that the router resolves the VIPs there.
			for _, p := range []string{"203.0.113.1/24", "2001:db8:1::1/64"} {
				must.Do(t, s.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)))
			}
			b := s.Balancers[0]
			c := lab.AgentConfig{
				Name: "lb1", Address: b.V4, Interfaces: []string{"eth0"}, Mode: mode,
				L2: []string{"eth0"}, Services: s.services(3),
			}
			a := labtest.Agent(t, b.Host, binary, c)
			for _, vip := range vips {
				labtest.Until(t, lab.Ready, "the VIP replies to ping", func() error {
					return s.Client().Ping(t.Context(), vip)
				})
				r := s.Load(t, vip, 1000)
				if r.Err() != nil {
					t.Fatal(r.Err())
				}
				labtest.CheckEven(t, r, 3)
			}
			must.Do(t, a.Terminate(t.Context(), lab.Ready))
		})
	}
}

// TestTwoMachinesWithOneAddress: of two machines with the same file, one answers for the address and the other one says
// why it does not; when the first one is killed, the second one answers.
func TestTwoMachinesWithOneAddress(t *testing.T) {
	t.Parallel()
	s := newBareSite(t, lab.Shape{Clients: 1, Balancers: 2, Servers: 1})
	s.web = append(s.web, labtest.HTTP(t, s.Servers[0], 8080))
	for _, p := range []string{"203.0.113.1/24", "2001:db8:1::1/64"} {
		must.Do(t, s.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)))
	}
	var agents []*lab.Agent
	for i, b := range s.Balancers {
		agents = append(agents, labtest.Agent(t, b.Host, binary, lab.AgentConfig{
			Name: fmt.Sprintf("lb%d", i+1), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc",
			L2: []string{"eth0"}, Services: s.services(1),
		}))
	}
	// announced returns the addresses that an agent announces.
	announced := func(a *lab.Agent) (list []netip.Addr) {
		var routes []lb.RouteStatus
		must.Do(t, a.Get(t.Context(), "/v1/routes", &routes))
		for _, r := range routes {
			if r.Announced {
				list = append(list, r.Address)
			} else if !strings.Contains(r.Reason, "answers for it since") {
				return nil
			}
		}
		return list
	}
	for _, vip := range vips {
		labtest.Until(t, lab.Ready, "one machine has the address, and the other one does not", func() error {
			first, second := announced(agents[0]), announced(agents[1])
			if slices.Contains(first, vip) == slices.Contains(second, vip) || len(first)+len(second) != len(vips) {
				return fmt.Errorf("announced are %v and %v", first, second)
			}
			return s.Client().Ping(t.Context(), vip)
		})
	}
	owner, other := agents[0], agents[1]
	if !slices.Contains(announced(owner), vip4) {
		owner, other = other, owner
	}
	owner.Kill()
	labtest.Until(t, lab.Ready, "the other machine takes over", func() error {
		got := announced(other)
		return labtest.ErrorIf(len(got) != len(vips), "announced are %v", got)
	})
	for _, vip := range vips {
		labtest.Until(t, lab.Ready, "requests are answered", func() error {
			_, err := s.Client().Get(t.Context(), labtest.URL(vip))
			return err
		})
	}
}

// TestAddressPerMember: after a reload, a service that had eight fixed addresses has one of each family for each of
// three members, on different ones. The address of a member that is killed moves, and another one comes to it when it
// has returned, without a lost request.
func TestAddressPerMember(t *testing.T) {
	m := newMembers(t, 3)
	m.VIPs = m.VIPs[:6]
	for i, a := range m.Agents {
		s := &m.Config[i].Services[0]
		s.Addresses, s.Extra = nil, "pool = \"lan\"\naddress_per_node = true"
		s.Check = lab.AgentCheck{Type: "none"} // on a busy machine, checks fail
		m.Config[i].Extra = "[[pool]]\nname = \"lan\"\naddresses = [\"203.0.113.10-203.0.113.12\", " +
			"\"2001:db8:1::10-2001:db8:1::12\"]\n"
		must.Do(t, errors.Join(a.Configure(m.Config[i].TOML()), a.Reload()))
	}
	m.Apart(t, m.Agents...)
	killed := m.Settled(t, m.Agents...)[m.VIPs[0]]
	killed.Kill()
	m.Settled(t, m.Others(killed)...)
	var stops []func() (time.Duration, int)
	for i := 0; i < len(m.VIPs); i += 2 { // the IPv4 ones: one of them moves
		stops = append(stops, m.Gap(t, m.VIPs[i], 5*time.Second))
	}
	must.Do(t, killed.Start())
	m.Apart(t, m.Agents...)
	for i, stop := range stops {
		if longest, lost := stop(); lost > 0 || longest > labtest.TakeOverLimit {
			t.Errorf("%s: %d requests lost, none answered for %s", m.VIPs[2*i], lost, longest)
		}
	}
}
