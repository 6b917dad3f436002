package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const gossipKeyFile = "/run/steelyard-lab/gossip.key"

// newMembers creates load balancers that share addresses as [l2] members. Their servers reply to clients directly
// (dsr), so connections survive a change of load balancer.
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

// TestMembersTakeOver checks that each address has one owner, and that another member takes over from a failed one. A
// member that returns takes nothing back, nor does one that starts later. On a busy machine, members may start late and
// own nothing, so the shares are only printed.
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
	start := func(_ *testing.T, a *lab.Agent) { must(a.Start()) }
	end := func(t *testing.T, a *lab.Agent) { must(a.Terminate(t.Context(), 10*time.Second)) }
	for _, k := range []labtest.TakeOver{
		{Name: "killed", Fail: func(_ *testing.T, a *lab.Agent) { a.Kill() }, Back: start},
		{Name: "stopped by SIGSTOP",
			Fail: func(_ *testing.T, a *lab.Agent) { must(a.Process().Signal(syscall.SIGSTOP)) },
			Back: func(t *testing.T, a *lab.Agent) {
				must(a.Process().Signal(syscall.SIGCONT))
				labtest.Until(t, "its status says so", func() error {
					out, err := a.CLI(t.Context(), "status")
					return labtest.ErrorIf(!strings.Contains(out, "CPU time or was suspended"), "%v: %s", err, out)
				})
			}},
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

// TestMembersJoinedSegment has a member and a server behind a link of the segment that goes down. The members on both
// sides then own all addresses. When the link is up again, each address is given up on one side. The router, which
// nobody uses in between, must then have the other side's MAC address.
func TestMembersJoinedSegment(t *testing.T) {
	m := newMembers(t, 2)
	before := m.Settled(t, m.Agents...)
	far := m.Others(before[m.VIPs[0]])[0]
	run := func(host *lab.Host, command ...string) {
		t.Helper()
		must.Get(host.Run(t.Context(), command[0], command[1:]...))(t)
	}
	// The trunk is down from the start.
	run(m.Switch, "ip", "link", "add", "trunk", "type", "veth", "peer", "name", "trunk-far")
	run(m.Switch, "ip", "link", "add", "far", "type", "bridge", "mcast_snooping", "0")
	run(m.Switch, "ip", "link", "set", "far", "up")
	run(m.Switch, "ip", "link", "set", "trunk", "master", "switch")
	run(m.Switch, "ip", "link", "set", "trunk-far", "up", "master", "far")
	for _, vip := range m.VIPs {
		m.Forget(t, vip)
		must.Get(m.Client().Get(t.Context(), labtest.URL(vip)))(t)
	}
	for _, port := range []string{m.Port(far), m.Servers[1].Port} {
		run(m.Switch, "ip", "link", "set", port, "master", "far")
	}
	labtest.Until(t, "the far member has all addresses", func() error {
		routes, err := labtest.RoutesOf(t, far)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if !r.Announced {
				return fmt.Errorf("%s: %s", r.Address, r.Reason)
			}
		}
		return nil
	})
	time.Sleep(8 * time.Second)
	run(m.Switch, "ip", "link", "set", "trunk", "up")
	owners := m.Settled(t, m.Agents...)
	link, err := far.Run(t.Context(), "ip", "-br", "link", "show", "eth0")
	if err != nil || len(strings.Fields(link)) < 3 {
		t.Fatal(err, link)
	}
	mac := strings.Fields(link)[2]
	moved := 0
	labtest.Until(t, "the router has the MAC address of the owner", func() error {
		for _, vip := range m.VIPs {
			if owners[vip] != far {
				continue
			}
			moved++
			out, err := m.Topology.Router.Run(t.Context(), "ip", "neigh", "show", vip.String(), "dev", "segment")
			if err != nil || !strings.Contains(out, mac) {
				return fmt.Errorf("%s: %q, %v; want %s", vip, out, err, mac)
			}
		}
		return nil
	})
	must.True(t, moved > 0, "the far member has no address")
	for _, vip := range m.VIPs {
		must.Get(m.Client().Get(t.Context(), labtest.URL(vip)))(t)
	}
}

// TestMembersSeparated has a firewall drop the messages between two members that share the segment. Each address stays
// on its owner, every request is answered, and each member names the other as the owner of the other addresses.
func TestMembersSeparated(t *testing.T) {
	m := newMembers(t, 2)
	before := m.Settled(t, m.Agents...)
	nft := func(text string) {
		t.Helper()
		must.Get(m.Agents[0].Run(t.Context(), "nft", text))(t)
	}
	since := time.Now()
	nft(`table inet cut { chain in { type filter hook input priority 0; th dport 7946 drop; th sport 7946 drop; }; }`)
	labtest.Until(t, "the members say that they do not reach each other", func() error {
		for i, a := range m.Agents {
			routes, err := labtest.RoutesOf(t, a)
			if err != nil {
				return err
			}
			for _, r := range routes {
				if err := separated(a.Name(), m.Config[1-i].Name, r, before[r.Address] == a, since); err != nil {
					return err
				}
			}
		}
		return nil
	})
	for _, vip := range m.VIPs {
		r := m.Load(t, vip, 200)
		must.True(t, r.Err() == nil, "%s: %v", vip, r.Err())
	}
	nft("delete table inet cut")
	for vip, a := range m.Settled(t, m.Agents...) {
		must.True(t, a == before[vip], "%s has moved from %s to %s", vip, before[vip], a)
	}
}

// separated returns an error unless an owner announces its route, and the other member names the owner.
func separated(member, other string, r lb.RouteStatus, owner bool, since time.Time) error {
	at := fmt.Sprintf("%s at %s: %s, %q", r.Address, member, r.State, r.Reason)
	if owner {
		return labtest.ErrorIf(!r.Announced, "%s; want it announced", at)
	}
	_, text, ok := strings.Cut(r.Reason, "which is not reachable as a member of [l2], has answered for it since ")
	if !ok || !strings.Contains(r.Reason, other+" (") || !strings.Contains(r.Reason, " on eth0)") {
		return fmt.Errorf("%s; want %s named", at, other)
	}
	begin, err := time.Parse(time.RFC3339, text)
	return labtest.ErrorIf(err != nil || begin.Before(since.Truncate(time.Second)),
		"%s; want a time after %s", at, since)
}

// TestAnnouncesByARPAndNDP checks that without BGP, neighbours on the segment can resolve the VIPs with ARP and NDP.
func TestAnnouncesByARPAndNDP(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			links := lab.LinkOptions{SoftwareChecksums: mode == "xdp"}
			s := newBareSite(t, lab.Shape{Clients: 1, Servers: 3, Links: links})
			for _, n := range s.Servers {
				s.web = append(s.web, labtest.HTTP(t, n, 8080))
			}
			// The VIPs' prefixes are on the segment, so that the router resolves the VIPs there.
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
				labtest.Until(t, "the VIP replies to ping", func() error {
					return s.Client().Ping(t.Context(), vip)
				})
				r := s.Load(t, vip, 1000)
				must.Do(t, r.Err())
				labtest.CheckEven(t, r, 3)
			}
			must.Do(t, a.Terminate(t.Context(), lab.Ready))
		})
	}
}

// TestTwoMachinesWithOneAddress checks that of two machines with the same file, one replies for the address, and the
// other says why it does not. If the first one is killed, the second one replies.
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
			} else if !strings.Contains(r.Reason, "has answered for it since") {
				return nil
			}
		}
		return list
	}
	for _, vip := range vips {
		labtest.Until(t, "one machine has the address, and the other one does not", func() error {
			first, second := announced(agents[0]), announced(agents[1])
			if slices.Contains(first, vip) == slices.Contains(second, vip) || len(first)+len(second) != len(vips) {
				return fmt.Errorf("the machines announce %v and %v", first, second)
			}
			return s.Client().Ping(t.Context(), vip)
		})
	}
	owner, other := agents[0], agents[1]
	if !slices.Contains(announced(owner), vip4) {
		owner, other = other, owner
	}
	owner.Kill()
	labtest.Until(t, "the other machine takes over", func() error {
		got := announced(other)
		return labtest.ErrorIf(len(got) != len(vips), "announced are %v", got)
	})
	for _, vip := range vips {
		labtest.Until(t, "requests are answered", func() error {
			_, err := s.Client().Get(t.Context(), labtest.URL(vip))
			return err
		})
	}
}

// TestAddressPerMember checks that a reload changes a service from eight fixed addresses to one of each family per
// member, on three different members. A killed member's address moves. When the member returns, it receives another
// address, without a lost request.
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
	for i := 0; i < len(m.VIPs); i += 2 { // the IPv4 addresses, one of which moves
		stops = append(stops, m.Gap(t, m.VIPs[i], 5*time.Second))
	}
	must.Do(t, killed.Start())
	m.Apart(t, m.Agents...)
	for i, stop := range stops {
		longest, lost := stop()
		must.True(t, lost == 0 && longest <= labtest.TakeOverLimit,
			"%s: %d requests lost, none answered for %s", m.VIPs[2*i], lost, longest)
	}
}
