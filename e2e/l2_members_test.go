package e2e

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const gossipKeyFile = "/run/steelyard-lab/gossip.key"

// newMembers makes balancers that share addresses by [l2] members. Their servers reply to clients directly (dsr), so
// that a connection survives a change of the balancer.
func newMembers(t *testing.T, balancers int) *labtest.Members {
	s := newBareSite(t, lab.Shape{Clients: 1, Balancers: balancers, Servers: 2})
	m := &labtest.Members{Site: &s.Site}
	for i := range 4 {
		m.VIPs = append(m.VIPs, netip.MustParseAddr(fmt.Sprintf("203.0.113.%d", 10+i)),
			netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%d", 10+i)))
	}
	for _, n := range m.Servers {
		for i := 0; i < len(m.VIPs); i += 2 {
			for _, vip := range m.VIPs[i : i+2] {
				must.Do(t, traffic.OwnVIP(n.Host, vip))
			}
			n.V4, n.V6 = m.VIPs[i], m.VIPs[i+1] // the servers listen on the VIPs
			s.web = append(s.web, labtest.HTTP(t, n, 80))
		}
	}
	for _, p := range []string{"203.0.113.1/24", "2001:db8:1::1/64"} {
		must.Do(t, m.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)))
	}
	service := s.directService(method{forward: "dsr"}, 2)
	service.Addresses, service.Ports = m.VIPs, []string{"80"}
	for i, b := range m.Balancers {
		c := lab.AgentConfig{
			Name: fmt.Sprintf("lb%d", i+1), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc",
			L2: []string{"eth0"}, L2SecretFile: gossipKeyFile, Services: []lab.AgentService{service},
		}
		for _, other := range m.Balancers {
			if other.Host != b.Host {
				c.L2Members = append(c.L2Members, other.V4)
			}
		}
		must.Do(t, b.WriteFile(gossipKeyFile, "a secret of the members\n", 0o600))
		m.Config = append(m.Config, c)
		m.Agents = append(m.Agents, labtest.Agent(t, b.Host, binary, c))
	}
	m.Settled(t, m.Agents...)
	return m
}

// TestMembersTakeOver: each address has one owner, and another member takes over from one that fails. A member that
// comes back takes nothing back, nor does one that starts later. On a busy machine that may be all but one, so what
// each has is only printed.
func TestMembersTakeOver(t *testing.T) {
	m := newMembers(t, 3)
	spread := map[*lab.Agent]int{}
	for _, a := range m.Settled(t, m.Agents...) {
		spread[a]++
	}
	t.Logf("addresses of each member: %v", spread)
	must := func(err error) {
		t.Helper()
		must.Do(t, err)
	}
	signal := func(s syscall.Signal) func(*testing.T, *lab.Agent) {
		return func(_ *testing.T, a *lab.Agent) { must(a.Process().Signal(s)) }
	}
	start := func(_ *testing.T, a *lab.Agent) { must(a.Start()) }
	end := func(t *testing.T, a *lab.Agent) { must(a.Terminate(t.Context(), 10*time.Second)) }
	for _, k := range []labtest.TakeOver{
		{Name: "killed", Fail: func(_ *testing.T, a *lab.Agent) { a.Kill() }, Back: start},
		{Name: "stopped by SIGSTOP", Fail: signal(syscall.SIGSTOP), Back: signal(syscall.SIGCONT)},
		{Name: "link down",
			Fail: func(_ *testing.T, a *lab.Agent) { must(m.Switch.SetDown(m.Port(a))) },
			Back: func(_ *testing.T, a *lab.Agent) { must(m.Switch.SetUp(m.Port(a))) }},
		{Name: "power off", Fail: func(_ *testing.T, a *lab.Agent) { must(a.PowerOff()) },
			Back: func(t *testing.T, a *lab.Agent) {
				must(a.PowerOn())
				must(a.WriteFile(gossipKeyFile, "a secret of the members\n", 0o600))
				must(a.Start())
			}},
		{Name: "planned end", Fail: end, Back: start, Planned: true},
	} {
		t.Run(k.Name, func(t *testing.T) {
			for _, vip := range m.VIPs[:2] {
				m.TakesOver(t, vip, k)
			}
		})
	}
}
