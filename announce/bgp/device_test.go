package bgp_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
)

// A session is on its device, whichever side connects; a change of the device concerns this session only. It is over
// IPv4 with BIRD, over IPv6 with FRR.
func TestDevice(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		family, vip := 0, vip4
		if kind == peers.FRR {
			family, vip = 1, vip6
		}
		first := b.router(kind, nil)
		second := b.router(kind, func(c *peers.RouterConfig) { c.Neighbors[0].Address = b.ours[1][family] })
		o, peer, ours := b.options(), b.theirs[1][family], b.ours[1][family]
		o.Peers[0].Device, o.Peers[1].Address, o.Peers[1].Passive = "eth0", peer, true
		c := startChild(t, b.host, o)
		c.set(vip4, vip6)
		want(t, first, vip, b.ours[0][family])
		want(t, second, vip, ours)
		since := c.established(b.theirs[0][0])

		o.Peers[1].Device = "eth1"
		c.configure(o)
		before := c.established(peer)
		want(t, second, vip, ours)
		o.Peers[1].Device = "eth0"
		c.configure(o)
		wantReason(t, c, peer, "the peer connects through eth1, but device is eth0")
		o.Peers[1].Device, o.Peers[1].Passive = "eth1", false // FRR connects again after two minutes only
		c.configure(o)
		if again := c.established(peer); again.Equal(before) {
			t.Error("the session is the one before")
		}
		want(t, second, vip, ours)
		c.kept(b.theirs[0][0], since)
	})
}

// A device that does not exist is the reason why there is no session, until it exists.
func TestDeviceComesLater(t *testing.T) {
	b := newBench(t)
	b.link("other")
	o := b.options()
	later, inRange := netip.MustParseAddr("192.0.2.5"), netip.MustParsePrefix("192.0.2.8/30")
	o.Peers = []bgp.Peer{
		{Address: later, ASN: theirASN, HoldTime: o.Peers[0].HoldTime, Device: "eth1"},
		{ListenRange: inRange, ASN: theirASN, HoldTime: o.Peers[0].HoldTime, Device: "eth2"},
	}
	c := startChild(t, b.host, o)
	c.set(vip4)
	wantReason(t, c, later, "bind to device eth1: no such device")
	labtest.Until(t, timeout, "the range has a problem", func() error {
		a, err := c.call(request{})
		got := strings.Join(a.Problems, "; ")
		return labtest.ErrorIf(err != nil || !strings.Contains(got, "device eth2: no such device"), "%q, %v", got, err)
	})
	for i := range 2 {
		r := b.router(peers.BIRD, nil)
		want(t, r, vip4, b.ours[i+1][0])
	}
	labtest.Until(t, timeout, "no problem is left", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Problems) > 0, "%q, %v", a.Problems, err)
	})
}
