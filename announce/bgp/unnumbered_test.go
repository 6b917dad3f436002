package bgp_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// newUnnumbered returns a bench whose link to the router has only link-local addresses. Both sides have a global
// address on the loopback interface.
func newUnnumbered(t *testing.T) (b *bench, h *lab.Host) {
	b = newBench(t)
	h = b.link("frr")
	for i, end := range []*lab.Host{b.host, h} {
		a := [][2]netip.Addr{b.ours[0], b.theirs[0]}[i]
		for _, args := range [][]string{
			{"addr", "del", a[0].String() + "/30", "dev", "eth0"},
			{"addr", "del", a[1].String() + "/64", "dev", "eth0"},
			{"addr", "add", a[0].String() + "/32", "dev", "lo"}, {"link", "set", "lo", "up"},
		} {
			must.Get(end.Run(t.Context(), "ip", args...))(t)
		}
	}
	return b, h
}

// linkLocal returns the link-local address of eth0.
func linkLocal(t *testing.T, h *lab.Host) (a netip.Addr) {
	t.Helper()
	labtest.Until(t, "a link-local address", func() error {
		out, err := h.Run(t.Context(), "ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link")
		for _, word := range strings.Fields(out) {
			if p, parsed := netip.ParsePrefix(word); parsed == nil {
				a = p.Addr()
				return nil
			}
		}
		return fmt.Errorf("%q: %v", out, err)
	})
	return a
}

// forgeAdvertisements sends router advertisements from an address that does not respond, one per second until the test
// ends.
func forgeAdvertisements(t *testing.T, h *lab.Host) {
	t.Helper()
	from, to := netip.MustParseAddr("fe80::bad"), netip.MustParseAddr("ff02::1")
	m := must.Get(ndp.MarshalMessageChecksum(&ndp.RouterAdvertisement{CurrentHopLimit: 64}, from, to))(t)
	source, destination := from.As16(), to.As16()
	frame := []byte{0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0xb, 0xad, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(m)), 58, 255}
	frame = slices.Concat(frame, source[:], destination[:], m)
	var c *packet.Conn
	must.Do(t, h.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			c, err = packet.Listen(eth0, packet.Raw, 0, nil)
		}
		return err
	}))
	var sending sync.WaitGroup
	done := make(chan struct{})
	sending.Go(func() {
		for {
			if _, err := c.WriteTo(frame, &packet.Addr{HardwareAddr: frame[:6]}); err != nil {
				t.Errorf("advertisement not sent: %v", err)
				return
			}
			select {
			case <-done:
				return
			case <-time.After(time.Second):
			}
		}
	})
	t.Cleanup(func() { close(done); sending.Wait(); c.Close() })
}

// onEth0 returns the options of a speaker whose peer is on eth0.
func (b *bench) onEth0(p bgp.Peer) bgp.Options {
	p.Interface, p.HoldTime, p.GracefulRestart = "eth0", 9*time.Second, true
	return bgp.Options{ASN: ourASN, RouterID: b.ours[0][0], Peers: []bgp.Peer{p}}
}

// frrOn starts FRR with this AS and a neighbor on eth0.
func (b *bench) frrOn(h *lab.Host, asn uint32) *peers.Router {
	return labtest.Router(b.t, h, peers.FRR, peers.RouterConfig{
		ID: b.theirs[0][0], ASN: asn, HoldTime: 9 * time.Second,
		Neighbors: []peers.Neighbor{{Interface: "eth0", ASN: ourASN}},
	})
}

// A host that advertises itself before and after the router does cannot prevent the session.
func TestForgedRouter(t *testing.T) {
	b, h := newUnnumbered(t)
	ours := linkLocal(t, b.host)
	forgeAdvertisements(t, h)
	c := startChild(t, b.host, b.onEth0(bgp.Peer{ASN: theirASN}))
	c.set(vip6)
	forged := netip.MustParseAddr("fe80::bad%eth0")
	labtest.Until(t, "the forged router is the peer", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Peers) != 1 || a.Peers[0].Peer != forged, "%+v, %v", a.Peers, err)
	})
	r := b.frrOn(h, theirASN)
	labtest.Until(t, "the session is established", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Peers) != 1 || a.Peers[0].State != "established",
			"%+v, %v", a.Peers, err)
	})
	want(t, r, vip6, ours)
}

// An external peer has a session with a router of any AS except this node's, even if the router's AS changes on a
// reload. The peer's AS is reported.
func TestUnnumberedExternal(t *testing.T) {
	b, h := newUnnumbered(t)
	ours := linkLocal(t, b.host)
	c := startChild(t, b.host, b.onEth0(bgp.Peer{External: true}))
	c.set(vip4, vip6)
	for _, asn := range []uint32{theirASN, 4200000001} {
		r := b.frrOn(h, asn)
		theirs := linkLocal(t, h).WithZone("eth0")
		c.until(theirs, "the session is established", func(p lb.PeerStatus) bool {
			return p.State == "established" && p.ASN == asn
		})
		want(t, r, vip6, ours)
		out, err := r.Show(t.Context(), "show bgp ipv6 unicast "+host(vip6).String())
		must.True(t, err == nil && strings.Contains(out, fmt.Sprintf("  %d\n", ourASN)),
			"the route with the AS path %d is not in %s (%v)", ourASN, out, err)
		for _, p := range r.Processes {
			p.Kill()
		}
	}
}

// Router advertisements find a peer on an interface. Both families have link-local next hops, and packets to the VIP
// arrive. A returning router is found again, and a different router replaces the previous one.
func TestUnnumbered(t *testing.T) {
	b, h := newUnnumbered(t)
	ours := linkLocal(t, b.host)
	o := b.onEth0(bgp.Peer{ASN: theirASN})
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	absent := netip.IPv6Unspecified().WithZone("eth0")
	p := c.peer(absent)
	must.True(t, p.Interface == "eth0" && p.LastError == "no router advertisement received on eth0",
		"before the router: %+v", p)
	r := b.frrOn(h, theirASN)
	theirs := linkLocal(t, h).WithZone("eth0")
	labtest.Until(t, "the session is established", func() error {
		out, err := r.Show(t.Context(), "show bgp ipv4 unicast 203.0.113.10/32")
		return labtest.ErrorIf(err != nil || !strings.Contains(out, ours.String()), "%v %s", err, out)
	})
	want(t, r, vip6, ours)
	labtest.Until(t, "the kernel of the router has the route", func() error {
		hops, err := r.NextHops(host(vip4)) // FRR may show an IPv4 address
		return labtest.ErrorIf(err != nil || len(hops) != 1, "next hops %v, %v", hops, err)
	})
	p = c.peer(theirs)
	must.True(t, p.State == "established" && p.Routes == 2 && p.LastError == "" && p.Interface == "eth0", "peer %+v", p)
	for _, route := range c.sent(theirs) {
		must.True(t, route.NextHop == ours, "%v has the next hop %v, want %v", route.Prefix, route.NextHop, ours)
	}
	for _, args := range [][]string{
		{"addr", "add", host(vip4).String(), "dev", "lo"},
		{"route", "add", host(b.theirs[0][0]).String(), "via", "inet6", theirs.WithZone("").String(), "dev", "eth0"},
	} {
		must.Get(b.host.Run(t.Context(), "ip", args...))(t)
	}
	labtest.Until(t, "packets to the VIP arrive", func() error {
		return traffic.From(h).Ping(t.Context(), vip4)
	})
	// No host uses this node as a router.
	must.Row(t, "default routes", "", must.Get(h.Run(t.Context(), "ip", "-6", "route", "show", "default"))(t))
	c.configure(bgp.Options{ASN: ourASN, RouterID: b.ours[0][0]})
	want(t, r, vip6)
	c.configure(o)
	want(t, r, vip6, ours)
	c.terminate()
	want(t, r, vip6)
}

// Routers in a range are peers while they are connected, only with the range's password and AS.
func TestListenRange(t *testing.T) {
	b := newBench(t)
	secret := func(c *peers.RouterConfig) { c.Neighbors[0].Password = "of-the-range" }
	bird, frr := b.router(peers.BIRD, secret), b.router(peers.FRR, secret)
	b.router(peers.BIRD, func(c *peers.RouterConfig) {
		secret(c)
		c.ASN = theirASN + 1
	})
	b.router(peers.BIRD, func(c *peers.RouterConfig) { c.Neighbors[0].Password = "another-one" })
	o := bgp.Options{ASN: ourASN, RouterID: b.ours[0][0], Peers: []bgp.Peer{{
		ListenRange: netip.MustParsePrefix("192.0.2.0/24"), ASN: theirASN, HoldTime: 9 * time.Second,
		GracefulRestart: true, Password: "of-the-range",
	}}}
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	for i, r := range []*peers.Router{bird, frr} {
		want(t, r, vip4, b.ours[i][0])
		want(t, r, vip6, b.ours[i][1])
		p := c.peer(b.theirs[i][0])
		must.True(t, p.State == "established" && p.ASN == theirASN && p.Routes == 2, "%s: peer %+v", r.Kind, p)
	}
	wantReason(t, c, b.theirs[2][0], "as number mismatch expected 64500, received 64501")
	a, err := c.call(request{})
	must.True(t, err == nil && len(a.Peers) == 3,
		"%d peers, want the three with the password: %+v, %v", len(a.Peers), a.Peers, err)
	// A smaller range ends the sessions outside it and keeps the others.
	before := c.peer(b.theirs[0][0]).Since
	o.Peers[0].ListenRange = netip.MustParsePrefix("192.0.2.0/30")
	c.configure(o)
	want(t, frr, vip4)
	want(t, bird, vip4, b.ours[0][0])
	must.True(t, c.peer(b.theirs[0][0]).Since.Equal(before), "the session was reset")
	// The password can change. Without the right one, the router cannot return.
	o.Peers[0].Password = "another-one"
	c.terminate()
	c.o = o
	c.start()
	c.set(vip4, vip6)
	time.Sleep(3 * time.Second)
	must.Row(t, "peers with another password", nil, must.Get(c.call(request{}))(t).Peers)
	o.Peers[0].Password = "of-the-range"
	c.configure(o)
	labtest.Until(t, "the session is established", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Peers) != 1 || a.Peers[0].State != "established",
			"%+v, %v", a.Peers, err)
	})
}
