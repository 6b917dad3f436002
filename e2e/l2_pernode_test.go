package e2e

import (
	"errors"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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
