package bgp_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
)

// Routers of a range are peers while they are connected, with its password, and with the AS of the range only.
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
		if p := c.peer(b.theirs[i][0]); p.State != "established" || p.ASN != theirASN || p.Routes != 2 {
			t.Errorf("%s: peer %+v", r.Kind, p)
		}
	}
	wantReason(t, c, b.theirs[2][0], "as number mismatch expected 64500, received 64501")
	a, err := c.call(request{})
	if err != nil || len(a.Peers) != 3 {
		t.Errorf("%d peers, want the three with the password: %+v, %v", len(a.Peers), a.Peers, err)
	}
	// A smaller range ends the sessions of the others, and keeps the rest.
	before := c.peer(b.theirs[0][0]).Since
	o.Peers[0].ListenRange = netip.MustParsePrefix("192.0.2.0/30")
	c.configure(o)
	want(t, frr, vip4)
	want(t, bird, vip4, b.ours[0][0])
	if p := c.peer(b.theirs[0][0]); !p.Since.Equal(before) {
		t.Errorf("the session was reset: %+v", p)
	}
	// The password may be changed. Without the right one the router is not let in again.
	o.Peers[0].Password = "another-one"
	c.terminate()
	c.o = o
	c.start()
	c.set(vip4, vip6)
	time.Sleep(3 * time.Second)
	if a, err := c.call(request{}); err != nil || len(a.Peers) > 0 {
		t.Errorf("peers with another password: %+v, %v", a.Peers, err)
	}
	o.Peers[0].Password = "of-the-range"
	c.configure(o)
	labtest.Until(t, timeout, "the session is established", func() error {
		a, err := c.call(request{})
		return labtest.ErrorIf(err != nil || len(a.Peers) != 1 || a.Peers[0].State != "established",
			"%+v, %v", a.Peers, err)
	})
}
