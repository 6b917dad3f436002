package labtest

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// ASN is the AS number of a Site's load balancers, RouterASN its router's.
const ASN, RouterASN = 64512, 64500

// Site is a network with agents on its load balancers and a routing daemon on its router.
type Site struct {
	*lab.Topology
	Daemon *peers.Router
	Agents []*lab.Agent
	Config []lab.AgentConfig // by agent
}

// RouterConfig returns the configuration of a router whose neighbours are the load balancers, over both families.
func (s *Site) RouterConfig() peers.RouterConfig {
	c := peers.RouterConfig{ID: netip.MustParseAddr("192.0.2.1"), ASN: RouterASN, HoldTime: 9 * time.Second}
	for _, b := range s.Balancers {
		for _, a := range b.At(0) {
			c.Neighbors = append(c.Neighbors, peers.Neighbor{Address: a.Addr(), ASN: ASN})
		}
	}
	return c
}

// WaitRouted waits until the router's next hops for these addresses are exactly these nodes. If it fails, it prints
// every agent's routes.
func (s *Site) WaitRouted(t testing.TB, vips []netip.Addr, via ...lab.Node) {
	t.Helper()
	for _, vip := range vips {
		hops := Hops(vip, via)
		if _, err := s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, HostRoute(vip), hops...); err != nil {
			t.Fatalf("%v%s", err, s.routes())
		}
	}
}

// Hops returns the addresses of these nodes in a VIP's family.
func Hops(vip netip.Addr, via []lab.Node) (hops []netip.Addr) {
	for _, n := range via {
		if vip.Is4() {
			hops = append(hops, n.V4)
		} else {
			hops = append(hops, n.V6)
		}
	}
	return hops
}

// routes returns the output of "steelyard routes" from every agent.
func (s *Site) routes() string {
	var b strings.Builder
	for _, a := range s.Agents {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		out, err := a.CLI(ctx, "routes")
		if err != nil {
			out = err.Error()
		}
		fmt.Fprintf(&b, "\nroutes of %s:\n%s", a, out)
		cancel()
	}
	return b.String()
}

// HostRoute returns the prefix that contains only this address.
func HostRoute(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// URL returns the URL of port 80 of a VIP.
func URL(vip netip.Addr) string { return fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, 80)) }

// Client returns a client that sends from the first client host.
func (s *Site) Client() traffic.Client { return traffic.From(s.Clients[0].Host) }

// Load sends n requests to a VIP, each over its own connection.
func (s *Site) Load(t testing.TB, vip netip.Addr, n int) traffic.Result {
	t.Helper()
	return s.Client().Load(t.Context(), traffic.Load{URL: URL(vip), Requests: n})
}

// Exchange sends a message over every connection and fails the test if a connection fails.
func Exchange(t testing.TB, c *traffic.Conns, when string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if errs := c.Exchange(ctx); len(errs) > 0 {
		t.Errorf("%s: %d connections failed, the first: %v", when, len(errs), errs[0])
	}
}

// CheckEven fails the test if a server's share differs from the mean by more than a fifth.
func CheckEven(t testing.TB, r traffic.Result, servers int) {
	t.Helper()
	if len(r.Servers) != servers {
		t.Errorf("%s; want %d servers", r, servers)
	}
	share := r.Answered() / servers
	for name, n := range r.Servers {
		if n < share*4/5 || n > share*6/5 {
			t.Errorf("%s answered %d of %d; want %d ± 20 %%", name, n, r.Answered(), share)
		}
	}
}

// Metrics returns the lines of an agent's metrics that start with any of these names.
func Metrics(t testing.TB, a *lab.Agent, names ...string) string {
	t.Helper()
	var text string
	must.Do(t, a.Get(t.Context(), "/metrics", &text))
	var lines []string
	for line := range strings.Lines(text) {
		for _, n := range names {
			if strings.HasPrefix(line, n) {
				lines = append(lines, line)
			}
		}
	}
	return strings.Join(lines, "")
}
