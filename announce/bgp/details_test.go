package bgp_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The details of a session are what both sides have negotiated, and its messages are those that the router counts. A
// session that ends is counted.
func TestSessionDetails(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, func(c *peers.RouterConfig) { c.HoldTime = 12 * time.Second })
		o := b.options()
		o.RestartTime, o.LongLivedRestartTime = 45*time.Second, time.Hour
		o.Peers[0].HoldTime, o.Peers[0].Keepalive = 30*time.Second, 2*time.Second
		c := startChild(t, b.host, o)
		peer := b.theirs[0][0]
		c.set(vip4, vip6)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		p := c.peer(peer)
		s := p.Session
		if p.Flaps != 0 || s == nil {
			t.Fatalf("%+v", p)
		}
		t.Logf("%s: %+v", kind, *s)
		if s.Local != b.ours[0][0] || s.LocalASN != ourASN || s.RouterID != peer || s.Hold != 12 || s.Keepalive != 2 ||
			s.Restart != 45 || !slices.Equal(s.Families, []string{"ipv4", "ipv6"}) || s.ExtendedNextHop {
			t.Errorf("details %+v", *s)
		}
		if s.Sent.Updates < 2 || s.Sent.Messages < s.Sent.Updates+2 || s.Received.Messages < 2 ||
			time.Since(s.Received.Last) > 12*time.Second || time.Since(s.Sent.Last) > 4*time.Second {
			t.Errorf("messages %+v", *s)
		}
		if kind == peers.FRR {
			wantCounted(t, c, r, peer, b.ours[0][0])
		}
		must.Do(t, r.Reset(t.Context(), b.ours[0][0]))
		c.until(peer, "the end of the session is counted", func(p lb.PeerStatus) bool {
			return p.Flaps == 1 && isEstablished(p) && p.Session != nil && p.Session.Sent.Messages < 20
		})
	})
}

// wantCounted compares the counters with those of FRR.
func wantCounted(t *testing.T, c *child, r *peers.Router, peer, neighbor netip.Addr) {
	t.Helper()
	labtest.Until(t, timeout, "FRR has the same counters", func() error {
		out, err := r.Show(t.Context(), "show bgp neighbors "+neighbor.String()+" json")
		if err != nil {
			return err
		}
		var all map[string]struct {
			MessageStats struct{ UpdatesSent, UpdatesRecv, TotalSent, TotalRecv uint64 }
		}
		if err := json.NewDecoder(strings.NewReader(out)).Decode(&all); err != nil {
			return err
		}
		theirs, ours := all[neighbor.String()].MessageStats, c.peer(peer).Session
		if theirs.UpdatesRecv != ours.Sent.Updates || theirs.UpdatesSent != ours.Received.Updates ||
			theirs.TotalRecv != ours.Sent.Messages || theirs.TotalSent != ours.Received.Messages {
			return fmt.Errorf("FRR: %+v; sent %+v, received %+v", theirs, ours.Sent, ours.Received)
		}
		return nil
	})
}
