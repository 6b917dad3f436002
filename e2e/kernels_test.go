//go:build kernels

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Tests with the tag kernels run on Debian's kernel in a virtual machine (make test-kernels) that may be 30 times
// slower than this one, so they measure no time. Some need devices that few kernels have.

// TestAppliance covers the life of a standalone load balancer with BIRD.
func TestAppliance(t *testing.T) {
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			s := newSlowSite(t, mode, plain, lab.AgentService{})
			t.Run("is attached as configured", func(t *testing.T) { s.attached(t, mode) })
			t.Run("balances", s.balancesSlowly)
			t.Run("balances fragments", s.balancesFragments)
			t.Run("continues while netem delays, loses and reorders packets", s.survivesNetem)
			t.Run("works beside IPVS", s.besideIPVS)
			t.Run("removes a failed server", s.removesFailedServer)
			t.Run("keeps connections when it is killed and started again", s.keepsWhenKilled)
			t.Run("withdraws when all servers fail", s.withdraws)
			t.Run("withdraws before it exits, and cleanup leaves nothing", s.exits)
		})
	}
}

// uplink is the interface that the agent uses. build creates it from eth0, with what the router needs.
type uplink struct {
	name  string
	build func(s *site, t *testing.T)
}

var plain = uplink{"eth0", func(*site, *testing.T) {}}

// TestUplinks covers VLAN devices and bonds as uplinks.
func TestUplinks(t *testing.T) {
	for _, u := range []uplink{
		{"eth0.10", func(s *site, t *testing.T) {
			lb, router := s.Balancers[0], s.Topology.Router
			for _, c := range []struct {
				h      *lab.Host
				parent string
			}{{lb.Host, "eth0"}, {router, lb.Port}} {
				ip(t, c.h, "link add link %[1]s name %[1]s.10 type vlan id 10", c.parent)
				move(t, c.h, c.parent, c.parent+".10")
			}
			defaultRoutes(t, lb)
		}},
		{"bond0", func(s *site, t *testing.T) {
			lb := s.Balancers[0]
			ip(t, lb.Host, "link add bond0 type bond mode active-backup miimon 100")
			ip(t, lb.Host, "link set eth0 down")
			ip(t, lb.Host, "link set eth0 master bond0")
			move(t, lb.Host, "eth0", "bond0")
			defaultRoutes(t, lb)
		}},
	} {
		t.Run(u.name, func(t *testing.T) {
			s := newSlowSite(t, "auto", u, lab.AgentService{})
			t.Run("balances", s.balancesSlowly)
			t.Run("balances fragments", s.balancesFragments)
		})
	}
}

// TestLinuxEndsTunnels covers servers that decapsulate with the kernel's devices, as in docs/forwarding.md.
func TestLinuxEndsTunnels(t *testing.T) {
	for name, tunnel := range map[string]string{"ipip": ipip, "gue": gue} {
		t.Run(name, func(t *testing.T) {
			s := newSlowSite(t, "auto", plain, lab.AgentService{Forward: "tunnel", Extra: tunnel})
			t.Run("balances", s.balancesSlowly)
			t.Run("servers see the client's address", s.seesClients)
		})
	}
}

// newSlowSite returns a site with one load balancer, two servers and generous timeouts.
func newSlowSite(t *testing.T, mode string, u uplink, service lab.AgentService) *site {
	s := newBareSite(t, lab.Shape{
		Clients: 1, Balancers: 1, Servers: 2, Wired: true, Links: lab.LinkOptions{SoftwareChecksums: true},
	})
	u.build(s, t)
	service.Name, service.Addresses, service.Backends = "web", vips, lab.Backends(s.Servers...)
	service.Ports = []string{"80:8080", "9000", "5353/udp"}
	service.Check = lab.AgentCheck{
		Type: "http", Path: "/healthz", Port: 8080, Rise: 1, Fall: 4, // a busy machine is slow
		Interval: 4 * time.Second, Timeout: 4 * time.Second,
	}
	port, tunnel := uint16(8080), service.Forward == "tunnel"
	if tunnel {
		service.Ports, service.Check.Port, port = []string{"80", "9000", "5353/udp"}, 0, 80
	}
	for _, n := range s.Servers {
		if tunnel {
			n = linuxReceiver(t, n, service.Extra)
		}
		s.web = append(s.web, labtest.HTTP(t, n, port))
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
		labtest.UDPEcho(t, n, 5353)
	}
	router := s.RouterConfig()
	router.HoldTime = time.Minute
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, router)
	c := lab.BGPAgent(s.Balancers[0], labtest.ASN, labtest.RouterASN, service)
	c.Mode, c.Interfaces, c.LogLevel = mode, []string{u.name}, "info"
	for i := range c.Peers {
		c.Peers[i].HoldTime = time.Minute
	}
	s.Config = append(s.Config, c)
	s.Agents = append(s.Agents, labtest.Agent(t, s.Balancers[0].Host, binary, c))
	s.waitRoutes(t, s.Balancers...)
	s.waitHealthy(t, 4)
	return s
}

// linuxReceiver adds the VIPs and the kernel's tunnel devices to a server. It returns the node with the VIPs as its
// addresses, on which servers listen.
func linuxReceiver(t *testing.T, n lab.Node, tunnel string) lab.Node {
	n.V4, n.V6 = vip4, vip6
	for _, vip := range vips {
		must.Do(t, traffic.OwnVIP(n.Host, vip))
	}
	for _, module := range []string{"ipip", "ip6_tunnel", "sit", "fou", "fou6"} {
		inHost(t, n.Host, "modprobe", module)
	}
	for _, device := range []string{"tunl0", "ip6tnl0", "sit0"} {
		ip(t, n.Host, "link set %s up", device)
	}
	if tunnel == gue {
		ip(t, n.Host, "fou add port 6090 gue")
		ip(t, n.Host, "-6 fou add port 6090 gue")
	}
	must.Do(t, n.Host.Sysctl(map[string]string{"net.ipv4.conf.tunl0.rp_filter": "0"}))
	return n
}

func (s *site) waitHealthy(t *testing.T, n int) {
	t.Helper()
	labtest.Until(t, fmt.Sprintf("%d backends are healthy", n),
		func() error { return backends(t, s.Agents[0], "healthy", n) })
}

// answers fails the test unless all requests to each VIP are answered, by this number of servers.
func (s *site) answers(t *testing.T, requests, servers int) {
	t.Helper()
	for _, vip := range vips {
		load := traffic.Load{URL: labtest.URL(vip), Requests: requests, Timeout: 20 * time.Second}
		r := s.Client().Load(t.Context(), load)
		must.True(t, r.Err() == nil && len(r.Servers) == servers,
			"%s: %s, %v; want %d servers", vip, r, r.Err(), servers)
	}
}

func (s *site) balancesSlowly(t *testing.T) {
	s.answers(t, 100, 2)
	for _, vip := range vips {
		err := s.Client().Ping(t.Context(), vip)
		must.True(t, err == nil, "ping %s: %v", vip, err)
		r := s.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 30, 0, 10*time.Second)
		must.True(t, r.Err() == nil && len(r.Servers) == 2, "UDP to %s: %s, %v", vip, r, r.Err())
	}
}

// balancesFragments allows for two lost datagrams per VIP. With two emulated CPUs, fragments may be reordered, and a
// later fragment that arrives first is dropped (fragment_not_found).
func (s *site) balancesFragments(t *testing.T) {
	for _, vip := range vips {
		r := s.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 20, 5000, 10*time.Second)
		if r.Err() != nil {
			t.Logf("fragments to %s: %s; packet counters:\n%s", vip, r, labtest.PacketCounters(s.Agents[0]))
		}
		must.True(t, len(r.Errors) <= 2 && len(r.Servers) == 2, "fragments to %s: %s, %v", vip, r, r.Err())
	}
}

// survivesNetem has a round-trip time of 100 ms, 1 % packet loss and some reordering.
func (s *site) survivesNetem(t *testing.T) {
	conns := s.connect(t)
	const netem = "qdisc %s dev %s root netem delay 50ms loss 1%% reorder 25%% 50%% limit 10000"
	for _, c := range []struct {
		h   *lab.Host
		dev string
	}{{s.Clients[0].Host, "eth0"}, {s.Topology.Router, "clients"}} {
		inHost(t, c.h, "tc", strings.Fields(fmt.Sprintf(netem, "add", c.dev))...)
		defer inHost(t, c.h, "tc", "qdisc", "del", "dev", c.dev, "root")
	}
	s.answers(t, 60, 2)
	for range 5 {
		conns.exchange(t, "under netem")
	}
}

// besideIPVS has IPVS serve another address on the same machine. Its packets are masqueraded, so that replies return
// through it.
func (s *site) besideIPVS(t *testing.T) {
	lb, other := s.Balancers[0], netip.MustParseAddr("203.0.113.20")
	inHost(t, lb.Host, "modprobe", "ip_vs_rr")
	ip(t, lb.Host, "address add %s/32 dev lo", other)
	inHost(t, lb.Host, "ipvsadm", "-A", "-t", other.String()+":80", "-s", "rr")
	for _, n := range s.Servers {
		inHost(t, lb.Host, "ipvsadm", "-a", "-t", other.String()+":80", "-r", n.V4.String()+":8080", "-m")
	}
	inHost(t, lb.Host, "nft", `table ip ipvs { chain post { type nat hook postrouting priority 100;
		ip saddr 198.51.100.0/24 tcp dport 8080 masquerade; }; }`)
	must.Do(t, errors.Join(s.Topology.Router.AddRoute(labtest.HostRoute(other), lb.V4),
		lb.Sysctl(map[string]string{"net.ipv4.vs.conntrack": "1", "net.ipv4.conf.eth0.forwarding": "1"})))
	r := s.Client().Load(t.Context(), traffic.Load{URL: labtest.URL(other), Requests: 50, Timeout: 20 * time.Second})
	must.True(t, r.Err() == nil && len(r.Servers) == 2, "IPVS: %s, %v", r, r.Err())
	s.answers(t, 50, 2)
}

type manyConns []*traffic.Conns

// connect opens long-lived connections over both families.
func (s *site) connect(t *testing.T) (all manyConns) {
	for _, vip := range vips {
		all = append(all, labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip, 9000), 20))
	}
	return all
}

func (m manyConns) exchange(t *testing.T, when string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, c := range m {
		errs := c.Exchange(ctx)
		must.True(t, len(errs) == 0, "%s: %d connections failed: %v", when, len(errs), errs)
	}
}

func (s *site) removesFailedServer(t *testing.T) {
	failed := s.Servers[1]
	must.Do(t, failed.PowerOff())
	s.waitHealthy(t, 2)
	s.answers(t, 50, 1)
	must.Do(t, failed.PowerOn())
	s.waitHealthy(t, 4)
	s.answers(t, 100, 2)
}

// keepsWhenKilled checks that connections continue without an agent and with the next one, and that the routes stay.
func (s *site) keepsWhenKilled(t *testing.T) {
	conns, a := s.connect(t), s.Agents[0]
	a.Kill()
	conns.exchange(t, "without an agent")
	s.answers(t, 50, 2)
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	s.waitHealthy(t, 4)
	conns.exchange(t, "with the new agent")
	s.answers(t, 50, 2)
	s.waitRoutes(t, s.Balancers...)
}

func (s *site) withdraws(t *testing.T) {
	for _, w := range s.web {
		must.Do(t, w.Stop())
	}
	s.waitRoutes(t)
	for _, w := range s.web {
		must.Do(t, w.Start())
	}
	s.waitRoutes(t, s.Balancers...)
	s.waitHealthy(t, 4)
	s.answers(t, 50, 2)
}

func (s *site) exits(t *testing.T) {
	a := s.Agents[0]
	must.Do(t, a.Process().Signal(syscall.SIGTERM))
	must.Do(t, a.Process().Wait(t.Context())) // status 0
	for _, vip := range vips {
		must.Row(t, "next hops", nil, must.Get(s.Topology.Router.NextHops(labtest.HostRoute(vip)))(t))
	}
	must.Get(a.CLI(t.Context(), "cleanup"))(t)
	lb := s.Balancers[0].Host
	must.True(t, !strings.Contains(inHost(t, lb, "ls", "/sys/fs/bpf"), "steelyard"), "still pinned")
	out := ip(t, lb, "-details link show eth0") + inHost(t, lb, "tc", "qdisc")
	must.True(t, !strings.Contains(out, "xdp") && !strings.Contains(out, "clsact"), "still attached: %s", out)
}

// move moves an interface's addresses to another interface and sets that up.
func move(t *testing.T, h *lab.Host, from, to string) {
	t.Helper()
	var addrs []string
	for line := range strings.Lines(ip(t, h, "-oneline address show dev %s scope global", from)) {
		addrs = append(addrs, strings.Fields(line)[3])
	}
	ip(t, h, "address flush dev %s", from)
	ip(t, h, "link set %s up", to)
	for _, a := range addrs {
		ip(t, h, "address add %s dev %s", a, to)
	}
}

func defaultRoutes(t *testing.T, n lab.Node) {
	t.Helper()
	must.Do(t, errors.Join(n.AddRoute(lab.Default, n.Gateway4), n.AddRoute(lab.Default6, n.Gateway6)))
}

// ip runs ip(8) on a host, which must succeed.
func ip(t *testing.T, h *lab.Host, format string, args ...any) string {
	t.Helper()
	return inHost(t, h, "ip", strings.Fields(fmt.Sprintf(format, args...))...)
}

// inHost runs a program on a host, which must succeed.
func inHost(t *testing.T, h *lab.Host, name string, args ...string) string {
	t.Helper()
	out := must.Get(h.Run(context.Background(), name, args...))(t)
	return out
}
