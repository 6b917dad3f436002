package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// site is a router, load balancers that announce to it, and servers behind them.
type site struct {
	labtest.Site
	// receivers are the agents on servers that remove GUE headers.
	receivers []*lab.Agent
	active    int // number of configured servers
	check     lab.AgentCheck
	web       []*traffic.HTTPServer
	echo      []*traffic.TCPEcho
}

// detection is how long the quick check takes to detect a failed server: fall × interval + timeout.
const detection = 2*200*time.Millisecond + 150*time.Millisecond

// The patient check is for tests that do not measure how fast failed servers are detected, because servers, routers,
// clients and other tests share two CPUs.
var (
	quick = lab.AgentCheck{
		Type: "http", Path: "/healthz", Port: 8080, Interval: 200 * time.Millisecond, Timeout: 150 * time.Millisecond,
		Rise: 1, Fall: 2,
	}
	patient = lab.AgentCheck{
		Type: "http", Path: "/healthz", Port: 8080, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 20,
	}
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vip6 = netip.MustParseAddr("2001:db8:1::10")
	vips = []netip.Addr{vip4, vip6}
)

// variants runs f with each router and each hook, but not each combination, because no rule depends on both.
func variants(t *testing.T, f func(t *testing.T, kind peers.RouterKind, mode string)) {
	for i, kind := range peers.RouterKinds {
		mode := []string{"tc", "xdp"}[i]
		t.Run(fmt.Sprintf("%s/%s", kind, mode), func(t *testing.T) { f(t, kind, mode) })
	}
}

// newBareSite builds a network without servers, routing daemon and agents.
func newBareSite(t *testing.T, shape lab.Shape) *site {
	return &site{Site: labtest.Site{Topology: labtest.Topology(t, shape)}, check: patient}
}

// newSite builds a site whose agents announce both VIPs. The first active of its three servers are configured.
func newSite(t *testing.T, kind peers.RouterKind, mode string, balancers, active int) *site {
	return newCheckedSite(t, kind, mode, balancers, active, patient)
}

func newCheckedSite(
	t *testing.T, kind peers.RouterKind, mode string, balancers, active int, check lab.AgentCheck,
) *site {
	s := newBareSite(t, lab.Shape{
		Clients: 1, Balancers: balancers, Servers: 3, Wired: true,
		Links: lab.LinkOptions{SoftwareChecksums: mode == "xdp"},
	})
	s.active, s.check = active, check
	for _, n := range s.Servers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
		labtest.UDPEcho(t, n, 5353)
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, kind, s.RouterConfig())
	for _, b := range s.Balancers {
		c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, s.services(active)...)
		c.Mode = mode
		s.Config = append(s.Config, c)
		s.Agents = append(s.Agents, labtest.Agent(t, b.Host, binary, c))
	}
	s.waitRoutes(t, s.Balancers...)
	return s
}

func (s *site) services(active int) []lab.AgentService {
	return []lab.AgentService{{
		Name: "web", Addresses: vips, Ports: []string{"80:8080", "9000", "5353/udp"},
		Backends: lab.Backends(s.Servers[:active]...), Check: s.check,
	}}
}

// waitRoutes waits until the router's next hops for both VIPs are exactly these nodes.
func (s *site) waitRoutes(t *testing.T, via ...lab.Node) {
	t.Helper()
	s.WaitRouted(t, vips, via...)
}

// checkAnswered fails the test unless all n requests to a VIP are answered.
func (s *site) checkAnswered(t *testing.T, n int) {
	t.Helper()
	for _, vip := range vips {
		// With nat, a server may have the source port in TIME_WAIT from a previous flow and reject the SYN. The timeout
		// allows two retransmissions.
		r := s.Client().Load(t.Context(), traffic.Load{URL: labtest.URL(vip), Requests: n, Timeout: 4 * time.Second})
		must.True(t, r.Err() == nil, "%s: %v", vip, r.Err())
	}
}

// dial opens a TCP connection to a port of a VIP. It returns how long this took, and the error.
func (s *site) dial(t *testing.T, vip netip.Addr, port uint16) (time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	start := time.Now()
	c, err := s.Client().Dial(ctx, "tcp", netip.AddrPortFrom(vip, port).String())
	if err == nil {
		c.Close()
	}
	return time.Since(start), err
}
