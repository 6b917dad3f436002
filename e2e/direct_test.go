package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// method is a forward method with direct server return.
type method struct {
	name    string
	mode    string // the hook
	forward string // value of forward in the configuration
	extra   string
	outer   netip.Addr // backends use only its family; zero for both families
	keyed   bool       // load balancers and servers have tunnel keys
	moves   bool       // servers and load balancers come and go, which is independent of hook and outer family
}

const ipip, gue = `tunnel = "ipip"`, `tunnel = "gue"`

// methods has each encapsulation, each server family and each hook. The datapath's rows have every combination.
var methods = []method{
	{name: "dsr", mode: "tc", forward: "dsr", moves: true},
	{name: "dsr", mode: "xdp", forward: "dsr"},
	{name: "ipip", mode: "xdp", forward: "tunnel", extra: ipip, moves: true},
	{name: "ipip over IPv6", mode: "tc", forward: "tunnel", extra: ipip, outer: vip6},
	{name: "gue with a key", mode: "tc", forward: "tunnel", extra: gue, keyed: true, moves: true},
	{name: "gue over IPv4", mode: "xdp", forward: "tunnel", extra: gue, outer: vip4},
}

// newDirectSite builds a site whose servers own the VIPs and share a segment with the load balancers. The first active
// servers are configured.
func newDirectSite(t *testing.T, shape lab.Shape, m method, active int) *site {
	shape.Links = lab.LinkOptions{SoftwareChecksums: m.mode == "xdp"}
	s := newBareSite(t, shape)
	s.active = active
	var sources []netip.Addr
	for _, b := range s.Balancers {
		sources = append(sources, b.V4, b.V6)
	}
	for _, n := range s.Servers {
		s.startReceiver(t, n, m, sources)
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	for _, b := range s.Balancers {
		c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, s.directService(m, active))
		c.Mode = m.mode
		if m.keyed {
			for _, n := range s.Servers {
				c.TunnelSources = append(c.TunnelSources, n.V4, n.V6)
			}
			c.TunnelKeyFile = tunnelKeyFile
			writeTunnelKeys(t, b, keyA)
		}
		s.Config = append(s.Config, c)
		s.Agents = append(s.Agents, labtest.Agent(t, b.Host, binary, c))
	}
	s.waitRoutes(t, s.Balancers...)
	n := len(s.directService(m, active).Backends)
	for _, a := range s.Agents {
		labtest.Until(t, "all servers are healthy", func() error {
			healthy, others := backends(t, a, "healthy", n), backends(t, a, "unhealthy", 0)
			return errors.Join(healthy, others, backends(t, a, "unknown", 0))
		})
	}
	return s
}

// startReceiver adds the VIPs to a server, starts its servers there, and starts the decapsulation of its tunnel.
func (s *site) startReceiver(t *testing.T, n lab.Node, m method, sources []netip.Addr) {
	t.Helper()
	n.V4, n.V6 = vip4, vip6 // the servers listen on the VIPs
	for _, vip := range vips {
		must.Do(t, traffic.OwnVIP(n.Host, vip))
	}
	s.web = append(s.web, labtest.HTTP(t, n, 80))
	s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
	labtest.UDPEcho(t, n, 5353)
	switch m.extra {
	case ipip:
		must.Do(t, traffic.EndIPIP(t.Context(), n.Host))
	case gue:
		c := lab.AgentConfig{Name: n.Name(), Interfaces: []string{"eth0"}, Mode: "tc", TunnelSources: sources}
		if m.keyed {
			c.TunnelKeyFile = tunnelKeyFile
			writeTunnelKeys(t, n, keyA)
		}
		s.receivers = append(s.receivers, labtest.Agent(t, n.Host, binary, c))
	}
}

func (s *site) directService(m method, active int) lab.AgentService {
	backends := lab.Backends(s.Servers[:active]...)
	if m.outer.IsValid() {
		var of []lab.AgentBackend
		for _, b := range backends {
			if b.Address.Is4() == m.outer.Is4() {
				of = append(of, b)
			}
		}
		backends = of
	}
	// Even on a busy machine, all load balancers must find the same servers healthy, or they would choose different
	// ones.
	const wait = time.Second
	check := lab.AgentCheck{Type: "http", Path: "/healthz", Interval: wait, Timeout: wait, Rise: 1, Fall: 3}
	return lab.AgentService{
		Name: "web", Addresses: vips, Ports: []string{"80", "9000", "5353/udp"}, Forward: m.forward, Extra: m.extra,
		Backends: backends, Check: check,
	}
}

// TestDirectReturn checks that servers reply to clients directly with dsr, ipip and gue.
func TestDirectReturn(t *testing.T) {
	t.Parallel()
	for _, m := range methods {
		t.Run(m.name+"/"+m.mode, func(t *testing.T) {
			t.Parallel()
			active := 3
			if m.moves {
				active = 2
			}
			s := newDirectSite(t, lab.Shape{Clients: 1, Balancers: 2, Servers: 3}, m, active)
			t.Run("balances evenly", s.balances)
			t.Run("servers see the client's address", s.seesClients)
			t.Run("balances UDP", s.balancesUDP)
			t.Run("carries datagrams of 60 KB", func(t *testing.T) { s.carriesLargeDatagrams(t, m) })
			if m.moves {
				t.Run("keeps connections while servers change", func(t *testing.T) { s.keepsConnections(t, m) })
				t.Run("keeps connections when a balancer terminates", s.balancerTerminates)
			}
			if m.keyed {
				t.Run("rotates the keys", s.rotatesKeys)
			}
			t.Run("path MTU", s.pathMTU)
			t.Run("checks the path of the traffic", func(t *testing.T) { s.checksThePath(t, m) })
		})
	}
}

func (s *site) seesClients(t *testing.T) {
	for _, w := range s.web {
		for from := range w.Clients() {
			must.True(t, from == s.Clients[0].V4 || from == s.Clients[0].V6,
				"%s had a request from %s; want the address of the client", w.Name, from)
		}
	}
}

func (s *site) carriesLargeDatagrams(t *testing.T, m method) {
	for _, vip := range vips {
		if m.forward == "tunnel" { // this datagram is lost while the client learns the path MTU
			s.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 1, 60_000, 200*time.Millisecond)
		}
		s.largeDatagrams(t, vip)
	}
}

// largeDatagrams sends datagrams of 41 fragments. If the kernel moves the sender to another CPU, a fragment may
// overtake the first one, and is then dropped. So a few datagrams may be lost.
func (s *site) largeDatagrams(t *testing.T, vip netip.Addr) {
	const sent, lost = 40, 3
	r := s.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), sent, 60_000, 2*time.Second)
	must.True(t, len(r.Errors) <= lost && len(r.Servers) == s.active, "%s: %s, %v", vip, r, r.Err())
}

// keepsConnections adds and removes servers and kills an agent. Connections must stay on their servers.
func (s *site) keepsConnections(t *testing.T, m method) {
	four := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 100)
	six := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip6, 9000), 100)
	// Routes do not prove that a session is established: the router keeps a killed agent's routes, and removes them if
	// the agent is killed again before its End-of-RIB (RFC 4724, section 4.2).
	established := func() {
		t.Helper()
		b := s.Balancers[0]
		must.Do(t, s.Daemon.WaitEstablished(t.Context(), lab.Ready, b.V4, b.V6))
	}
	for _, active := range []int{3, 2, 3} {
		established()
		s.waitRoutes(t, s.Balancers...) // a router that changes next hops moves flows
		for i, a := range s.Agents {
			s.Config[i].Services = []lab.AgentService{s.directService(m, active)}
			must.Do(t, errors.Join(a.Configure(s.Config[i].TOML()), a.Reload()))
		}
		for _, vip := range vips {
			labtest.Until(t, fmt.Sprintf("%d servers get requests", active), func() error {
				r := s.Load(t, vip, 60)
				return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != active, "%s, %w", r, r.Err())
			})
		}
		labtest.Exchange(t, four, fmt.Sprintf("with %d servers", active))
		labtest.Exchange(t, six, fmt.Sprintf("with %d servers", active))
		if s.active = active; active == 3 {
			continue
		}
		s.Agents[0].Kill()
		must.Do(t, s.Agents[0].Start())
		must.Do(t, s.Agents[0].WaitReady(t.Context(), lab.Ready))
		labtest.Exchange(t, four, "after a kill")
		labtest.Exchange(t, six, "after a kill")
	}
	established()
	for _, a := range s.Agents {
		labtest.Until(t, "none is unhealthy", func() error { return backends(t, a, "unhealthy", 0) })
	}
}

// balancerTerminates checks that another load balancer continues the connections, because all choose servers by the
// packet's hash.
func (s *site) balancerTerminates(t *testing.T) {
	s.waitRoutes(t, s.Balancers...)
	four := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 100)
	six := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip6, 9000), 100)
	must.Do(t, s.Agents[0].Terminate(t.Context(), lab.Ready))
	labtest.Exchange(t, four, "after a balancer has terminated")
	labtest.Exchange(t, six, "after a balancer has terminated")
	must.Do(t, s.Agents[0].Start())
	s.waitRoutes(t, s.Balancers...)
	labtest.Exchange(t, four, "after it has started again")
	labtest.Exchange(t, six, "after it has started again")
}

// checksThePath checks that a server without the VIP fails its check, although it responds at its own address.
func (s *site) checksThePath(t *testing.T, m method) {
	broken := s.Servers[2]
	healthy := len(s.directService(m, 3).Backends)
	for _, a := range s.Agents {
		labtest.Until(t, "all are healthy", func() error { return backends(t, a, "healthy", healthy) })
	}
	for _, vip := range vips {
		must.Do(t, traffic.DisownVIP(broken.Host, vip))
	}
	for _, a := range s.Agents {
		labtest.Until(t, "it fails", func() error { return backends(t, a, "unhealthy", healthy/3) })
	}
	for _, vip := range vips {
		labtest.Until(t, "the datapath has removed the server", func() error {
			r := s.Load(t, vip, 200)
			return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != 2, "%s, %w", r, r.Err())
		})
	}
}

// tunnelKeyFile is the path of the hosts' keys.
const tunnelKeyFile = "/run/tunnel.key"

const keyA, keyB = "the first key of the tests", "the second key of the tests"

func writeTunnelKeys(t *testing.T, n lab.Node, keys ...string) {
	t.Helper()
	must.Do(t, n.WriteFile(tunnelKeyFile, strings.Join(keys, "\n"), 0o600))
}

// rotatesKeys checks that with the documented order of steps, all packets are accepted. Servers with another key reject
// them.
func (s *site) rotatesKeys(t *testing.T) {
	reload := func(agents []*lab.Agent, nodes []lab.Node, keys ...string) {
		t.Helper()
		for i, a := range agents {
			before := loadedAt(t, a)
			writeTunnelKeys(t, nodes[i], keys...)
			must.Do(t, a.Reload())
			labtest.Until(t, "the configuration is reloaded", func() error {
				return labtest.ErrorIf(loadedAt(t, a) == before, "not yet")
			})
		}
	}
	for _, step := range [][]string{{keyA, keyB}, {keyB, keyA}, {keyB}} {
		reload(s.receivers, s.Servers, step...)
		s.checkAnswers(t, step)
		reload(s.Agents, s.Balancers, step...)
		s.checkAnswers(t, step)
	}
	reload(s.receivers, s.Servers, keyA)
	for _, a := range s.Agents {
		labtest.Until(t, "no check gets through", func() error { return backends(t, a, "healthy", 0) })
	}
	reload(s.receivers, s.Servers, keyB)
	s.waitRoutes(t, s.Balancers...)
	s.checkAnswers(t, []string{"again", keyB})
}

// loadedAt returns when an agent loaded its configuration.
func loadedAt(t *testing.T, a *lab.Agent) string {
	t.Helper()
	var status struct {
		Loaded string `json:"loaded"`
	}
	must.Do(t, a.Get(t.Context(), "/v1/status", &status))
	return status.Loaded
}

func (s *site) checkAnswers(t *testing.T, keys []string) {
	t.Helper()
	for _, vip := range vips {
		r := s.Load(t, vip, 40)
		must.True(t, r.Err() == nil, "%s, keys %q: %s, %v", vip, keys, r, r.Err())
	}
}
