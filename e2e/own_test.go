package e2e

import (
	"context"
	"errors"
	"net/netip"
	"slices"
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

// TestBalancersAreServers runs three balancers that are also the servers and clients of their VIPs, as in a control
// plane.
func TestBalancersAreServers(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		t.Parallel()
		s := newOwnSite(t, kind, mode)
		t.Run("clients of all kinds are served", s.ownServed)
		t.Run("a reload adds this machine as a server", s.ownServerAdded)
		t.Run("a server fails", s.ownServerFails)
		t.Run("the last server fails", s.ownServersFail)
		t.Run("cleanup", s.ownCleanup)
	})
}

// newOwnSite builds a site whose three balancers are the servers. Connections of the last one to a VIP end when its
// agent starts, because they would hang after a failure of the balancer that they go through.
func newOwnSite(t *testing.T, kind peers.RouterKind, mode string) *site {
	s := newBareSite(t, lab.Shape{
		Clients: 1, Balancers: 3, Wired: true, Links: lab.LinkOptions{SoftwareChecksums: mode == "xdp"},
	})
	s.check = quick
	s.check.Interval, s.check.Timeout = time.Second, time.Second // a false alarm would end connections
	for _, n := range s.Balancers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, kind, s.RouterConfig())
	var early *traffic.Conns
	for i, b := range s.Balancers {
		c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, lab.AgentService{
			Name: "web", Addresses: vips, Ports: []string{"80:8080", "9000"}, Algorithm: "random",
			Backends: lab.Backends(s.Balancers...), Check: s.check,
		})
		c.Mode = mode
		s.Config = append(s.Config, c)
		if i == 2 {
			s.waitRoutes(t, s.Balancers[:2]...)
			early = labtest.Connect(t, traffic.From(b.Host), netip.AddrPortFrom(vip4, 9000), 5)
		}
		s.Agents = append(s.Agents, labtest.Agent(t, b.Host, binary, c))
	}
	s.waitRoutes(t, s.Balancers...)
	labtest.Until(t, "earlier connections of the machine have ended", func() error {
		early.Exchange(t.Context())
		return labtest.ErrorIf(early.Alive() > 0, "%d are alive", early.Alive())
	})
	return s
}

// ownServed checks that all servers answer the client and each balancer, and that a server sees the address of a client
// whose packets arrive at its own balancer.
func (s *site) ownServed(t *testing.T) {
	for _, vip := range vips {
		clients := []traffic.Client{s.Client()}
		for _, b := range s.Balancers {
			clients = append(clients, traffic.From(b.Host))
		}
		for i, c := range clients {
			r := c.Load(t.Context(), traffic.Load{URL: labtest.URL(vip), Requests: 100, Timeout: 4 * time.Second})
			must.True(t, r.Err() == nil && len(r.Servers) == len(s.Balancers),
				"client %d, %s: %v, %v", i, vip, r, r.Err())
		}
		conn := must.Get(s.Balancers[0].Dial(t.Context(), "tcp", netip.AddrPortFrom(vip, 9000).String()))(t)
		must.Equal(t, netip.AddrPortFrom(vip, 9000).String(), conn.RemoteAddr().String())
		must.Do(t, conn.Close())
	}
	seen := false
	for _, w := range s.web {
		seen = seen || w.Clients()[s.Clients[0].V4] > 0
	}
	must.True(t, seen, "no server has seen the client's address")
	for _, a := range s.Agents {
		labtest.Until(t, "status is OK", func() error { return shows(t, a, "OK", "status") })
	}
}

// ownServerAdded checks that a reload is refused if it adds a backend at an address of the machine and there was none
// at the agent's start, and that a restart serves it.
func (s *site) ownServerAdded(t *testing.T) {
	a, with := s.Agents[2], s.Config[2]
	without := with
	without.Services = slices.Clone(with.Services)
	without.Services[0].Backends = lab.Backends(s.Balancers[:2]...)
	must.Do(t, errors.Join(a.Terminate(t.Context(), lab.Ready), a.Configure(without.TOML()), a.Start()))
	s.waitRoutes(t, s.Balancers...)
	must.Do(t, a.Configure(with.TOML()))
	out, err := a.CLI(t.Context(), "reload")
	must.True(t, err != nil && strings.Contains(out, "a backend is this machine"), "%v\n%s", err, out)
	must.Do(t, errors.Join(a.Terminate(t.Context(), lab.Ready), a.Start()))
	s.waitRoutes(t, s.Balancers...)
	s.ownServed(t)
}

// ownServerFails checks that a balancer's own connections to a failed server end, that those to the other servers
// continue, and that new ones go to these.
func (s *site) ownServerFails(t *testing.T) {
	conns := labtest.Connect(t, traffic.From(s.Balancers[0].Host), netip.AddrPortFrom(vip4, 9000), 60)
	must.Equal(t, len(s.Balancers), len(conns.Servers()))
	rest := conns.Alive() - conns.Servers()[s.echo[1].Name]
	must.Do(t, s.Balancers[1].PowerOff())
	took := labtest.Until(t, "connections to the failed server end, and no others", func() error {
		conns.Exchange(t.Context())
		return labtest.ErrorIf(conns.Alive() != rest, "%d are alive; want %d", conns.Alive(), rest)
	})
	t.Logf("after %s", took)
	r := traffic.From(s.Balancers[0].Host).Load(t.Context(),
		traffic.Load{URL: labtest.URL(vip4), Requests: 50, Timeout: 4 * time.Second})
	must.True(t, r.Err() == nil, "%v", r)
}

// ownServersFail checks that a balancer's own connections are refused while no server is healthy.
func (s *site) ownServersFail(t *testing.T) {
	for _, i := range []int{0, 2} {
		must.Do(t, errors.Join(s.web[i].Stop(), s.echo[i].Stop()))
	}
	labtest.Until(t, "connections are refused", func() error {
		conn, err := s.Balancers[0].Dial(t.Context(), "tcp", netip.AddrPortFrom(vip4, 9000).String())
		if err == nil {
			conn.Close()
		}
		return labtest.ErrorIf(!errors.Is(err, syscall.ECONNREFUSED), "%v", err)
	})
}

// ownCleanup checks that no program balances the machine's connections after cleanup. While one does, they are refused,
// because no server is left.
func (s *site) ownCleanup(t *testing.T) {
	a := s.Agents[0]
	must.Do(t, a.Terminate(t.Context(), lab.Ready))
	connect := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := a.Host.Dial(ctx, "tcp", netip.AddrPortFrom(vip4, 9000).String())
		return err
	}
	must.True(t, errors.Is(connect(), syscall.ECONNREFUSED), "without the agent: %v", connect())
	must.Get(a.CLI(t.Context(), "cleanup"))(t)
	err := connect()
	must.True(t, err != nil && !errors.Is(err, syscall.ECONNREFUSED), "after cleanup: %v", err)
}
