//go:build kernels

package bgp_test

import (
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Two sessions are in a VRF, one is not. This node opens the first one, and the router the second. Both return after
// the VRF was deleted and created again, the second one with its BFD session. The test runs on Debian's kernel
// (e2e/kernels), because others may have no VRF.
func TestVRF(t *testing.T) {
	const slowly = 20 * time.Second
	b := newBench(t)
	var routers []*peers.Router
	for i := range 3 {
		routers = append(routers, b.router(peers.BIRD, func(c *peers.RouterConfig) {
			c.HoldTime, c.Neighbors[0].Passive = slowly, i == 0
			c.Neighbors[0].BFD, c.Neighbors[0].BFDMultiplier = i == 1, 50
		}))
	}
	run := func(command string) {
		t.Helper()
		must.Get(b.host.Run(t.Context(), "ip", strings.Fields(command)...))(t)
	}
	add := func() {
		run("link add red type vrf table 10")
		run("link set red up")
		run("link set eth0 master red")
		run("link set eth1 master red")
	}
	o := b.options()
	for i := range o.Peers {
		o.Peers[i].HoldTime = slowly
	}
	o.Peers[0].Device, o.Peers[1].Device, o.Peers[1].Passive = "eth0", "red", true
	o.Peers[1].BFD = bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 50} // the machine may be emulated
	c := startChild(t, b.host, o)
	c.set(vip4)
	want(t, routers[0], vip4, b.ours[0][0])
	want(t, routers[2], vip4, b.ours[2][0])
	since := c.established(b.theirs[2][0])
	o.Peers[0].Device = "red"
	c.configure(o)
	wantReason(t, c, b.theirs[0][0], "bind to device red: no such device")

	add()
	before := []time.Time{c.established(b.theirs[0][0]), c.established(b.theirs[1][0])}
	for i, r := range routers {
		want(t, r, vip4, b.ours[i][0])
	}
	bfdUp := func(p lb.PeerStatus) bool { return p.BFD == "up" }
	c.until(b.theirs[1][0], "bfd is up", bfdUp)
	run("link del red")
	for i, since := range before {
		c.until(b.theirs[i][0], "the session is lost", func(p lb.PeerStatus) bool {
			return p.State != "established" && p.Since.After(since)
		})
	}
	add()
	for i, r := range routers {
		c.established(b.theirs[i][0])
		want(t, r, vip4, b.ours[i][0])
	}
	c.until(b.theirs[1][0], "bfd is up again", bfdUp)
	c.kept(b.theirs[2][0], since)
}
