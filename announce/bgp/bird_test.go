package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

type bird struct {
	t    *testing.T
	host *lab.Host
	log  *lab.Log
}

// startBIRD starts BIRD with one neighbour. protocol is the body of its "protocol bgp".
func startBIRD(t *testing.T, h *lab.Host, protocol, more string) *bird {
	t.Helper()
	path, err := exec.LookPath("bird")
	if err != nil {
		must.Need(t, os.Getenv("STEELYARD_CI") == "",
			"bird2 is not installed, and STEELYARD_CI forbids skipping: %v", err)
		t.Skipf("NOT TESTED: bird2 is not installed: %v", err)
	}
	text := fmt.Sprintf(`router id 192.0.2.250;
log stderr all;
protocol device { scan time 1; }
%s
protocol bgp speaker {
  local as 64500;
  connect delay time 1; connect retry time 1; error wait time 1, 2; hold time 9;
  %s
}
`, more, protocol)
	must.Do(t, h.WriteFile("/run/own-bird.conf", text, 0o600))
	args := []string{"-f", "-c", "/run/own-bird.conf", "-s", "/run/own-bird.ctl"}
	p := must.Get(h.Start(lab.Command{Path: path, Args: args}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of bird:\n%s", p.Log.Tail(30))
		}
	})
	b := &bird{t, h, &p.Log}
	labtest.Until(t, "bird is up", func() error { _, err := b.birdc("show status"); return err })
	return b
}

func (b *bird) birdc(command string) (string, error) {
	args := append([]string{"-s", "/run/own-bird.ctl"}, strings.Fields(command)...)
	return b.host.Run(context.Background(), "birdc", args...)
}

// await waits until a command's output contains all of these words, and returns it.
func (b *bird) await(command string, words ...string) string {
	b.t.Helper()
	var out string
	labtest.Until(b.t, fmt.Sprintf("%q in %q", words, command), func() error {
		var err error
		out, err = b.birdc(command)
		return errors.Join(err, lacks(out, words))
	})
	return out
}

// Output of "show route count".
const (
	one4  = "1 of 1 routes for 1 networks in table master4"
	none4 = "0 of 0 routes for 0 networks in table master4"
	none6 = "0 of 0 routes for 0 networks in table master6"
)

const bothFamilies = "ipv4 { import all; export none; }; ipv6 { import all; export none; };"

// oneLink returns a host linked to the speaker's, without a router.
func oneLink(t *testing.T) (*bench, *lab.Host, bgp.Options) {
	b := newBench(t)
	h := b.link("router")
	return b, h, b.options()
}

// A router without IPv6 receives the IPv4 route, also with graceful restart, and the count is right. The status says
// that no router accepts the IPv6 route, as long as there is one. The session has no hold time, and therefore no
// KEEPALIVEs.
func TestIPv4OnlyRouter(t *testing.T) {
	b, h, o := oneLink(t)
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; ipv4 { import all; export none; };", "")
	o.Peers[0].HoldTime = 0
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2")
	r.await("show protocols all speaker", "Established", "Hold timer:       0.000/0")
	c.until(b.theirs[0][0], "one route is counted", func(p lb.PeerStatus) bool {
		return p.State == "established" && p.Routes == 1 &&
			p.LastError == "the peer does not accept IPv6 routes; enable the address family there"
	})
	c.set(vip4)
	c.until(b.theirs[0][0], "no fault", func(p lb.PeerStatus) bool { return p.Routes == 1 && p.LastError == "" })
	c.set()
	if out := r.await("show route", "BIRD"); strings.Contains(out, "203.0.113.10") {
		r.await("show route count", none4)
	}
}

// A session over IPv6 from a configured source carries both families. IPv4 routes have this node's IPv4 address as next
// hop, which a router without RFC 8950 can use.
func TestSessionOverIPv6(t *testing.T) {
	b, h, o := oneLink(t)
	source := netip.MustParseAddr("2001:db8:2::99")
	must.Do(t, b.host.AddAddress("eth0", netip.PrefixFrom(source, 64)))
	r := startBIRD(t, h, "neighbor 2001:db8:2::99 as 64512; "+bothFamilies, "")
	o.Peers[0].Address, o.Peers[0].Source = b.theirs[0][1], source
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2")
	r.await("show route all for 2001:db8:1::10", "BGP.next_hop: 2001:db8:2::99")
	c.terminate()
	r.await("show route count", none4, none6)
}

// Without an IPv6 address towards the router, IPv6 routes have no next hop. They are not sent until there is an
// address, and the status shows the reason.
func TestNoNextHop(t *testing.T) {
	b, h, o := oneLink(t)
	ours6 := netip.PrefixFrom(b.ours[0][1], 64)
	must.Do(t, b.host.DeleteAddress("eth0", ours6))
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; "+bothFamilies, "")
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2")
	c.until(b.theirs[0][0], "the reason", func(p lb.PeerStatus) bool {
		const reason = "IPv6 routes are not sent: no IPv6 next hop, because eth0 has no global IPv6 address"
		return p.Routes == 1 && p.LastError == reason
	})
	must.Do(t, b.host.AddAddress("eth0", ours6))
	r.await("show route all for 2001:db8:1::10", "BGP.next_hop: "+b.ours[0][1].String())
	p := c.peer(b.theirs[0][0])
	must.True(t, p.Routes == 2 && p.LastError == "", "peer %+v", p)
	must.Do(t, b.host.DeleteAddress("eth0", ours6))
	r.await("show route count", one4, none6)
}

func TestTTLSecurity(t *testing.T) {
	b, h, o := oneLink(t)
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; ttl security yes; "+bothFamilies, "")
	c := startChild(t, b.host, o)
	c.set(vip4)
	// The side that connects determines which packet is dropped first. Either side may consider the session established
	// until its hold time expires, but the router must not have the route.
	<-time.After(5 * time.Second)
	out, err := r.birdc("show route for 203.0.113.10")
	must.True(t, err != nil || !strings.Contains(out, "203.0.113.10/32"),
		"the router has a route from a speaker without TTL security:\n%s", out)
	c.terminate()
	// The router has not noticed the end of the connection that it opened, and would keep it for four minutes.
	r.await("restart speaker", "restarted")
	c.o.Peers[0].TTLSecurity = true
	c.start()
	c.set(vip4)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2")
}

// The router is two hops away, so the session needs multihop.
func TestMultihop(t *testing.T) {
	b := newBench(t)
	middle := b.link("middle")
	must.Do(t, middle.Forward())
	far := labtest.Host(t, b.lab, "far")
	near, end := netip.MustParsePrefix("198.51.100.1/30"), netip.MustParsePrefix("198.51.100.2/30")
	must.Do(t, b.lab.Link(lab.End{Host: middle, Name: "eth1", Addresses: []netip.Prefix{near}},
		lab.End{Host: far, Name: "eth0", Addresses: []netip.Prefix{end}}, lab.LinkOptions{}))
	must.Do(t, b.host.AddRoute(lab.Default, b.theirs[0][0]))
	must.Do(t, far.AddRoute(lab.Default, near.Addr()))
	r := startBIRD(t, far, "neighbor 192.0.2.2 as 64512; multihop 3; passive; ipv4 { import all; export none; };", "")
	o := b.options()
	o.Peers[0].Address = end.Addr()
	c := startChild(t, b.host, o)
	c.set(vip4)
	wantReason(t, c, end.Addr(), "no TCP connection")
	c.terminate()
	c.o.Peers[0].Multihop = 2
	c.start()
	c.set(vip4)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2")
}

// One router's routes are not propagated to another, and do not replace ours.
func TestNoRouteIsPropagated(t *testing.T) {
	b := newBench(t)
	sender := startBIRD(t, b.link("sender"),
		"neighbor 192.0.2.2 as 64512; ipv4 { import all; export where source = RTS_STATIC; };",
		"protocol static { ipv4; route 198.51.100.0/24 blackhole; route 203.0.113.10/32 blackhole; "+
			"route 0.0.0.0/0 blackhole; }")
	receiver := startBIRD(t, b.link("receiver"), "neighbor 192.0.2.6 as 64512; "+bothFamilies, "")
	c := startChild(t, b.host, b.options())
	other := netip.MustParseAddr("203.0.113.11")
	c.set(vip4)
	receiver.await("show route count", one4)
	sender.await("show protocols all speaker", "Established", "Routes:")
	c.set(other)
	receiver.await("show route", "203.0.113.11/32")
	receiver.await("show route count", one4, none6)
}

// A router decodes the communities as configured.
func TestCommunitiesAtBIRD(t *testing.T) {
	b, h, o := oneLink(t)
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; "+bothFamilies, "")
	o.Communities, o.LargeCommunities = []uint32{64512<<16 | 100}, [][3]uint32{{64512, 1, 2}}
	o.ExtCommunities = [][8]byte{{0, 2, 252, 0, 0, 0, 0, 100}}
	o.Peers[0].ExtCommunities = [][8]byte{{2, 3, 250, 86, 234, 0, 0, 7}} // set by the policy
	o.Weighted = lb.WeightedAlways
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	for _, vip := range []netip.Addr{vip4, vip6} {
		r.await("show route all for "+vip.String(), "BGP.community: (64512,100)", "BGP.large_community: (64512, 1, 2)",
			"BGP.ext_community:", "(rt, 64512, 100)", "(ro, 4200000000, 7)", "(unknown 0x4004, 64512, 1290693416)",
			"BGP.as_path: 64512")
	}
}

// Two peers on two links have the same link-local address. Each receives the next hop of its own link.
func TestSameLinkLocalPeers(t *testing.T) {
	b := newBench(t)
	ours, theirs := netip.MustParseAddr("fe80::aa"), netip.MustParseAddr("fe80::bb")
	var routers []*bird
	o := bgp.Options{ASN: ourASN}
	for n := range 2 {
		h := b.link(fmt.Sprintf("router%d", n))
		iface := fmt.Sprintf("eth%d", n)
		must.Do(t, b.host.AddAddress(iface, netip.PrefixFrom(ours, 64)))
		must.Do(t, h.AddAddress("eth0", netip.PrefixFrom(theirs, 64)))
		// One router waits for the speaker; the other connects to it.
		direction := []string{"passive;", ""}[n]
		const protocol = "local fe80::bb; neighbor fe80::aa%%eth0 as 64512; %s %s"
		routers = append(routers, startBIRD(t, h, fmt.Sprintf(protocol, direction, bothFamilies), ""))
		o.Peers = append(o.Peers, bgp.Peer{
			Address: theirs.WithZone(iface), ASN: theirASN, HoldTime: 9 * time.Second, GracefulRestart: true,
		})
	}
	o.RouterID, o.Peers[0].Source = b.ours[0][0], ours.WithZone("eth0")
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	for n, r := range routers {
		r.await("show route all for 203.0.113.10", "BGP.next_hop: "+b.ours[n][0].String())
		r.await("show route all for 2001:db8:1::10", "BGP.next_hop: "+b.ours[n][1].String())
	}
	p := c.peer(o.Peers[1].Address)
	must.True(t, p.State == "established" && p.Routes == 2, "peer %+v", p)
}

// FRR accepts both parts of the documented configuration, for a router and for BFD, and both take effect.
func TestDocumentedFRR(t *testing.T) {
	text := must.Get(os.ReadFile("../../docs/bgp.md"))(t)
	_, router, ok := strings.Cut(string(text), "```\n# FRR\n")
	_, withBFD, ok2 := strings.Cut(router, "```\n# FRR (bfdd=yes in /etc/frr/daemons)\n")
	must.Need(t, ok && ok2, "an example is missing")
	b := newBench(t)
	r := b.router(peers.FRR, func(c *peers.RouterConfig) {
		// bfdd runs only if some neighbour has BFD.
		c.Neighbors[0] = peers.Neighbor{Address: netip.MustParseAddr("192.0.2.254"), ASN: ourASN, BFD: true}
	})
	enter := func(config string) {
		t.Helper()
		config, _, _ = strings.Cut(config, "```")
		must.Do(t, r.WriteFile("/run/frr/documented.conf", config, 0o600))
		out, err := r.Run(t.Context(), "vtysh", "--vty_socket", "/run/frr", "-f", "/run/frr/documented.conf")
		must.True(t, err == nil && !strings.Contains(out, "%"), "%v\n%s\n%s", err, config, out)
	}
	enter("no router bgp 64500\nno bfd\n")
	enter(router)
	enter(withBFD)
	o := b.options()
	o.Peers[0].Password, o.Peers[0].BFD = "of-the-file", bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}
	s := startChild(t, b.host, o)
	s.set(vip4)
	both := func(p lb.PeerStatus) bool { return isEstablished(p) && p.BFD == "up" }
	s.until(b.theirs[0][0], "both sessions are up", both)
	want(t, r, vip4, b.ours[0][0])
	if out, err := r.Show(t.Context(), "show bfd peer 192.0.2.2 json"); err != nil ||
		!strings.Contains(out, `"receive-interval":100,`) {
		t.Errorf("the profile is not active: %v\n%s", err, out)
	}
}
