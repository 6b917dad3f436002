package bgp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
)

// Two nodes with the weights 3 and 1 are next hops with these weights in the kernel of FRR, and follow changes of them
// without a new session. (draft-ietf-idr-link-bandwidth)
func TestWeightedNextHops(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	h := labtest.Host(t, l, "router")
	c := peers.RouterConfig{ID: netip.MustParseAddr("192.0.2.1"), ASN: theirASN, HoldTime: 9 * time.Second}
	var speakers []*child
	var options []bgp.Options
	var hosts []*lab.Host
	for n := range 2 {
		host := labtest.Host(t, l, fmt.Sprintf("speaker%d", n))
		ours := netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*n+2))
		theirs := netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*n+1))
		err := l.Link(lab.End{Host: host, Name: "eth0", Addresses: []netip.Prefix{ours}},
			lab.End{Host: h, Name: fmt.Sprintf("eth%d", n), Addresses: []netip.Prefix{theirs}}, lab.LinkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c.Neighbors = append(c.Neighbors, peers.Neighbor{Address: ours.Addr(), ASN: ourASN})
		hosts = append(hosts, host)
		options = append(options, bgp.Options{
			ASN: ourASN, RouterID: ours.Addr(), Weighted: true,
			Peers: []bgp.Peer{{Address: theirs.Addr(), ASN: theirASN, HoldTime: 9 * time.Second}},
		})
	}
	labtest.Router(t, h, peers.FRR, c)
	for n, host := range hosts {
		speakers = append(speakers, startChild(t, host, options[n]))
	}
	since := make([]time.Time, 2)
	for step, weights := range [][2]int{{3, 1}, {1, 1}, {1, 4}} {
		for n, s := range speakers {
			s.setWeighted(lb.Announcement{VIP: vip4, Weight: weights[n]})
		}
		labtest.Until(t, timeout, fmt.Sprintf("weights %v", weights), func() error {
			got, err := nextHopWeights(h)
			if err != nil || len(got) != 2 || got["192.0.2.2"]*weights[1] != got["192.0.2.6"]*weights[0] {
				return fmt.Errorf("next hops %v, %v", got, err)
			}
			return nil
		})
		for n, s := range speakers {
			at := s.established(options[n].Peers[0].Address)
			if step > 0 && !at.Equal(since[n]) {
				t.Errorf("the session of speaker %d is since %v, was since %v", n, at, since[n])
			}
			since[n] = at
		}
	}
}

// nextHopWeights returns the weights of the next hops of vip4 in the kernel.
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
