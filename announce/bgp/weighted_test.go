package bgp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// weighted is two speakers with the same router.
type weighted struct {
	lab      *lab.Lab
	router   *lab.Host
	hosts    []*lab.Host
	options  []bgp.Options
	speakers []*child
}

func newWeighted(t *testing.T) *weighted {
	t.Parallel()
	labtest.Root(t)
	w := &weighted{lab: labtest.New(t)}
	w.router = labtest.Host(t, w.lab, "router")
	c := peers.RouterConfig{ID: netip.MustParseAddr("192.0.2.1"), ASN: theirASN, HoldTime: 9 * time.Second}
	for n := range 2 {
		host := labtest.Host(t, w.lab, fmt.Sprintf("speaker%d", n))
		ours := netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*n+2))
		theirs := netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*n+1))
		must.Do(t, w.lab.Link(lab.End{Host: host, Name: "eth0", Addresses: []netip.Prefix{ours}},
			lab.End{Host: w.router, Name: fmt.Sprintf("eth%d", n), Addresses: []netip.Prefix{theirs}},
			lab.LinkOptions{}))
		must.Do(t, host.AddRoute(lab.Default, theirs.Addr()))
		c.Neighbors = append(c.Neighbors, peers.Neighbor{Address: ours.Addr(), ASN: ourASN})
		w.hosts = append(w.hosts, host)
		w.options = append(w.options, bgp.Options{
			ASN: ourASN, RouterID: ours.Addr(), Weighted: lb.WeightedMovable,
			Peers: []bgp.Peer{{Address: theirs.Addr(), ASN: theirASN, HoldTime: 9 * time.Second}},
		})
	}
	labtest.Router(t, w.router, peers.FRR, c)
	for n, host := range w.hosts {
		w.speakers = append(w.speakers, startChild(t, host, w.options[n]))
	}
	return w
}

// announce announces vip4 with a weight from each speaker, and waits until the router's kernel has both.
func (w *weighted) announce(t *testing.T, weights [2]int) {
	t.Helper()
	for n, s := range w.speakers {
		s.setWeighted(lb.Announcement{VIP: vip4, Weight: weights[n], Movable: true})
	}
	labtest.Until(t, fmt.Sprintf("weights %v", weights), func() error {
		got, err := nextHopWeights(w.router)
		wrong := len(got) != 2 || got["192.0.2.2"]*weights[1] != got["192.0.2.6"]*weights[0]
		return errors.Join(err, labtest.ErrorIf(wrong, "next hops %v", got))
	})
}

// Two nodes with the weights 3 and 1 become next hops with these weights in FRR's kernel, follow new weights without a
// new session, and receive their shares of the connections (draft-ietf-idr-link-bandwidth).
func TestWeightedNextHops(t *testing.T) {
	const total = 400
	w := newWeighted(t)
	client := labtest.Host(t, w.lab, "client")
	must.Do(t, w.lab.Link(
		lab.End{Host: client, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.11/24")}},
		lab.End{Host: w.router, Name: "clients", Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}},
		lab.LinkOptions{}))
	must.Do(t, client.AddRoute(lab.Default, netip.MustParseAddr("198.51.100.1")))
	// Hash ports as well, because all connections have the same addresses.
	must.Do(t, w.router.Sysctl(map[string]string{"net.ipv4.fib_multipath_hash_policy": "1"}))
	for _, h := range w.hosts {
		must.Do(t, traffic.OwnVIP(h, vip4))
		must.Get(traffic.ServeTCPEcho(h, h.Name(), netip.AddrPortFrom(vip4, 9000)))(t)
	}
	since := make([]time.Time, 2)
	for step, weights := range [][2]int{{1, 4}, {1, 1}, {3, 1}} {
		w.announce(t, weights)
		for n, s := range w.speakers {
			at := s.established(w.options[n].Peers[0].Address)
			must.True(t, step == 0 || at.Equal(since[n]),
				"the session of speaker %d is since %v, was since %v", n, at, since[n])
			since[n] = at
		}
	}
	servers := labtest.Connect(t, traffic.From(client), netip.AddrPortFrom(vip4, 9000), total).Servers()
	// Six standard deviations of the binomial distribution are 52.
	n := servers["speaker0"]
	must.True(t, n+servers["speaker1"] == total && n >= 300-52 && n <= 300+52, "%d: %v; want 3:1", total, servers)
}

// nextHopWeights returns the weights of vip4's next hops in the kernel.
func nextHopWeights(h *lab.Host) (map[string]int, error) {
	out, err := h.Run(context.Background(), "ip", "-j", "route", "show", host(vip4).String())
	if err != nil {
		return nil, err
	}
	var list []struct {
		NextHops []struct {
			Gateway string
			Weight  int
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, err
	}
	weights := map[string]int{}
	for _, r := range list {
		for _, n := range r.NextHops {
			weights[n.Gateway] = n.Weight
		}
	}
	return weights, nil
}

// wantRoute waits until r's kernel has exactly this next hop for a prefix, or none.
func wantRoute(t *testing.T, r *peers.Router, prefix string, via ...netip.Addr) {
	t.Helper()
	must.Get(r.WaitNextHops(t.Context(), timeout, netip.MustParsePrefix(prefix), via...))(t)
}

// Each router receives only the routes of its pools. A pool with its own prefix length announces such a prefix while it
// has a VIP. If a router's pools change, it loses the routes of the previous pools, and no other route is interrupted.
func TestPoolsOfPeers(t *testing.T) {
	b := newBench(t)
	first, second := b.router(peers.BIRD, nil), b.router(peers.FRR, nil)
	o := b.options()
	pool := func(name, from, to string) bgp.Pool {
		return bgp.Pool{Name: name, Ranges: []lb.AddrRange{{
			From: netip.MustParseAddr(from), To: netip.MustParseAddr(to),
		}}}
	}
	o.Pools = []bgp.Pool{
		pool("wide", "203.0.113.0", "203.0.113.15"), pool("narrow", "203.0.113.16", "203.0.113.31"),
		pool("six", "2001:db8:1::", "2001:db8:1::ffff"),
	}
	o.Pools[0].AggregateV4, o.Pools[2].AggregateV6 = 28, 112
	o.Pools[1].ExtCommunities = [][8]byte{{0, 2, 252, 0, 0, 0, 0, 100}}
	o.Peers[0].Pools, o.Peers[1].Pools = []string{"wide"}, []string{"narrow", "six"}
	c := startChild(t, b.host, o)
	one, two := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	other, six := netip.MustParseAddr("203.0.113.17"), netip.MustParseAddr("2001:db8:1::1")
	c.set(one, two, other, six)
	via := func(n, family int) netip.Addr { return b.ours[n][family] }
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	wantRoute(t, second, "203.0.113.17/32", via(1, 0))
	wantRoute(t, second, "2001:db8:1::/112", via(1, 1))
	must.Row(t, "routes of the first router", 1, c.peer(b.theirs[0][0]).Routes)
	must.Row(t, "routes of the second router", 2, c.peer(b.theirs[1][0]).Routes)
	labtest.Until(t, "the route target", func() error {
		out, err := second.Show(t.Context(), "show bgp ipv4 unicast 203.0.113.17/32")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "RT:64512:100"), "the output is %s", out))
	})

	c.set(two, other, six)
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	c.set(other, six)
	wantRoute(t, first, "203.0.113.0/28")
	c.set(two)
	wantRoute(t, second, "203.0.113.17/32")
	must.True(t, !c.Log.Contains("withdrawals not confirmed"),
		"a withdrawal to a router that had no route was waited for:\n%s", c.Log.Tail(5))

	c.set(two, other, six)
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	wantRoute(t, second, "203.0.113.17/32", via(1, 0))
	since := c.established(b.theirs[0][0])
	stop := watchRoute(t, second, other, via(1, 0))
	o.Peers[1].Pools = []string{"wide", "narrow"}
	c.configure(o)
	wantRoute(t, second, "203.0.113.0/28", via(1, 0))
	wantRoute(t, second, "2001:db8:1::/112")
	stop()
	c.kept(b.theirs[0][0], since)
}
