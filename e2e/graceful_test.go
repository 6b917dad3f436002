package e2e

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// pair is two load balancers, each behind its own router. The first router prefers the first load balancer. The second
// router also prefers the path through the first router, and therefore does not announce its own. So a withdrawal
// without graceful shutdown leaves the first router without a route until the second one has reacted.
//
//	client ── r1 ── r2
//	          │      │
//	          a      b
//	          └server┘
type pair struct {
	client, r1, r2, a, b, server *lab.Host
	agent                        *lab.Agent
}

func newPair(t *testing.T, kind peers.RouterKind) *pair {
	t.Helper()
	l := labtest.New(t)
	p := &pair{}
	for name, h := range map[string]**lab.Host{
		"client": &p.client, "r1": &p.r1, "r2": &p.r2, "a": &p.a, "b": &p.b, "server": &p.server,
	} {
		*h = labtest.Host(t, l, name)
	}
	link := func(a *lab.Host, nameA, addrA string, b *lab.Host, nameB, addrB string) {
		t.Helper()
		must.Do(t, l.Link(lab.End{Host: a, Name: nameA, Addresses: []netip.Prefix{netip.MustParsePrefix(addrA)}},
			lab.End{Host: b, Name: nameB, Addresses: []netip.Prefix{netip.MustParsePrefix(addrB)}}, lab.LinkOptions{}))
	}
	link(p.client, "eth0", "198.51.100.11/24", p.r1, "eth0", "198.51.100.1/24")
	link(p.r1, "eth1", "10.1.0.1/30", p.r2, "eth0", "10.1.0.2/30")
	link(p.r1, "eth2", "192.0.2.1/30", p.a, "eth0", "192.0.2.2/30")
	link(p.r2, "eth1", "192.0.2.5/30", p.b, "eth0", "192.0.2.6/30")
	link(p.a, "eth1", "10.2.1.1/24", p.server, "eth0", "10.2.1.2/24")
	link(p.b, "eth1", "10.2.2.1/24", p.server, "eth1", "10.2.2.2/24")
	for _, r := range []struct {
		h        *lab.Host
		dst, via string
	}{
		{p.client, "0.0.0.0/0", "198.51.100.1"}, {p.a, "0.0.0.0/0", "192.0.2.1"}, {p.b, "0.0.0.0/0", "192.0.2.5"},
		{p.r2, "198.51.100.0/24", "10.1.0.1"},
	} {
		must.Do(t, r.h.AddRoute(netip.MustParsePrefix(r.dst), netip.MustParseAddr(r.via)))
	}
	must.Get(traffic.ServeUDPEcho(p.server, "server", netip.MustParseAddrPort("10.2.1.2:5353"),
		netip.MustParseAddrPort("10.2.2.2:5353")))(t)
	neighbor := func(a string, asn uint32, transit bool) peers.Neighbor {
		return peers.Neighbor{Address: netip.MustParseAddr(a), ASN: asn, Transit: transit}
	}
	labtest.Router(t, p.r1, kind, peers.RouterConfig{
		ID: netip.MustParseAddr("192.0.2.1"), ASN: 64501,
		Neighbors: []peers.Neighbor{neighbor("192.0.2.2", 64511, false), neighbor("10.1.0.2", 64502, true)},
	})
	labtest.Router(t, p.r2, kind, peers.RouterConfig{
		ID: netip.MustParseAddr("192.0.2.5"), ASN: 64502,
		Neighbors: []peers.Neighbor{neighbor("192.0.2.6", 64512, false), neighbor("10.1.0.1", 64501, true)},
	})
	p.start(t, p.b, "192.0.2.6", 64512, "192.0.2.5", 64502, "10.2.2.2", "prepend = 3")
	p.wait(t, p.r1, "10.1.0.2")
	p.agent = p.start(t, p.a, "192.0.2.2", 64511, "192.0.2.1", 64501, "10.2.1.2", "")
	p.wait(t, p.r1, "192.0.2.2")
	p.wait(t, p.r2, "10.1.0.1")
	return p
}

// start starts an agent with one peer and one server.
func (p *pair) start(
	t *testing.T, h *lab.Host, address string, asn uint32, peer string, peerASN uint32, server, extra string,
	bgp ...string,
) *lab.Agent {
	t.Helper()
	c := lab.AgentConfig{
		Name: h.Name(), Address: netip.MustParseAddr(address), Interfaces: []string{"eth0"}, Mode: "tc", ASN: asn,
		Peers: []lab.AgentPeer{{
			Address: netip.MustParseAddr(peer), ASN: peerASN, HoldTime: 9 * time.Second, Extra: extra,
		}},
		Services: []lab.AgentService{{
			Name: "echo", Addresses: []netip.Addr{vip4}, Ports: []string{"5353/udp"},
			Backends: []lab.AgentBackend{{Address: netip.MustParseAddr(server)}}, Check: lab.AgentCheck{Type: "none"},
		}},
		LogLevel: "debug", BGP: bgp,
	}
	return labtest.Agent(t, h, binary, c)
}

func (p *pair) wait(t *testing.T, router *lab.Host, via string) {
	t.Helper()
	to := netip.MustParseAddr(via)
	_, err := router.WaitNextHops(t.Context(), lab.Ready, labtest.HostRoute(vip4), to)
	must.Need(t, err == nil, "%s: %v", router, err)
}

// numbered sends a numbered datagram every millisecond until stop is called. stop returns how many were sent, and which
// were not answered.
func (p *pair) numbered(t *testing.T) (stop func() (sent int, lost []int)) {
	t.Helper()
	c := must.Get(p.client.Dial(t.Context(), "udp", netip.AddrPortFrom(vip4, 5353).String()))(t)
	var wg sync.WaitGroup
	quit := make(chan struct{})
	n, answered := 0, map[int]bool{}
	wg.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				n++
				_, _ = c.Write([]byte(strconv.Itoa(n)))
			}
		}
	})
	received := make(chan struct{})
	go func() {
		defer close(received)
		buf := make([]byte, 512)
		for {
			m, err := c.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if _, number, _ := strings.Cut(string(buf[:m]), " "); err == nil {
				i, _ := strconv.Atoi(number)
				answered[i] = true
			}
		}
	}()
	return func() (int, []int) {
		close(quit)
		wg.Wait()
		time.Sleep(time.Second) // wait for the last responses
		c.Close()
		<-received
		var lost []int
		for i := 1; i <= n; i++ {
			if !answered[i] {
				lost = append(lost, i)
			}
		}
		return n, lost
	}
}

// Before a drain or the end of an agent withdraws its route, routers have chosen another one, so no packet is lost.
// With graceful_shutdown = "0s" the route is withdrawn immediately.
func TestGracefulShutdown(t *testing.T) {
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel() // only with each other, because packets are lost if a router is late
			p := newPair(t, kind)
			node := func(command string) func() error {
				return func() error {
					_, err := p.agent.CLI(t.Context(), command, "--node")
					return err
				}
			}
			terminate := func() error { return p.agent.Process().Signal(syscall.SIGTERM) }
			t.Run("drain", func(t *testing.T) { p.gives(t, node("drain"), "route withdrawn", true) })
			must.Do(t, node("undrain")())
			p.wait(t, p.r1, "192.0.2.2")
			p.wait(t, p.r2, "10.1.0.1")
			t.Run("SIGTERM", func(t *testing.T) { p.gives(t, terminate, "announcements stopped", true) })
			if kind != peers.BIRD {
				return
			}
			const now = `graceful_shutdown = "0s"`
			p.agent = p.start(t, p.a, "192.0.2.2", 64511, "192.0.2.1", 64501, "10.2.1.2", "", now)
			p.wait(t, p.r1, "192.0.2.2")
			t.Run("at once", func(t *testing.T) { p.gives(t, terminate, "announcements stopped", false) })
		})
	}
}

// gives makes the agent give up its route until its log contains the text logged.
func (p *pair) gives(t *testing.T, up func() error, logged string, lossless bool) {
	stop := p.numbered(t)
	time.Sleep(200 * time.Millisecond)
	began := time.Now()
	must.Do(t, up())
	p.wait(t, p.r1, "10.1.0.2")
	t.Logf("the router has chosen the other balancer after %v", time.Since(began))
	labtest.Until(t, "the route is withdrawn", func() error {
		return labtest.ErrorIf(!p.agent.Process().Log.Contains(logged), "not yet")
	})
	time.Sleep(500 * time.Millisecond)
	sent, lost := stop()
	t.Logf("%d of %d packets lost", len(lost), sent)
	must.True(t, !lossless || len(lost) == 0, "%d of %d packets lost: %v", len(lost), sent, lost[:min(len(lost), 20)])
}
