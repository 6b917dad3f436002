package bgp_test

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
)

// bfdLimit is more than the 0.3 s that it takes on a machine that is not busy with other tests.
const bfdLimit = 3 * time.Second

// With BFD a router removes the routes of a node that is frozen although the hold time has not passed and graceful
// restart would keep them, and the node notices a link that is cut. A planned end of the node is none of both. The
// sessions with BIRD are bound to a device.
func TestBFD(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, func(c *peers.RouterConfig) {
			c.HoldTime = time.Minute
			c.Neighbors[0].BFD = true
		})
		o := b.options()
		o.Peers[0].HoldTime = time.Minute
		o.Peers[0].BFD = bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}
		if kind == peers.BIRD {
			o.Peers[0].Device = "eth0"
		}
		s := startChild(t, b.host, o)
		s.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		s.until(b.theirs[0][0], "bfd is up", func(p lb.PeerStatus) bool { return p.BFD == "up" })

		if c, err := r.Host.Dial(t.Context(), "udp", netip.AddrPortFrom(b.ours[0][0], 3784).String()); err != nil {
			t.Fatal(err)
		} else if _, err = c.Write([]byte("no packet of BFD")); err != nil || c.Close() != nil {
			t.Fatal(err)
		}
		labtest.Until(t, timeout, "the packet is counted", func() error {
			if a, err := s.call(request{}); err != nil || a.Discarded["malformed"] != 1 {
				return fmt.Errorf("%v, %v", a.Discarded, err)
			}
			return nil
		})
		if err := s.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		took := want(t, r, vip4)
		t.Logf("%s: frozen: route gone after %v", kind, took)
		if took > bfdLimit {
			t.Errorf("%s has noticed the frozen node after %v", kind, took)
		}
		if err := s.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: goes on: route back after %v", kind, want(t, r, vip4, b.ours[0][0]))

		begin := time.Now()
		if err := r.Host.SetDown("eth0"); err != nil {
			t.Fatal(err)
		}
		p := s.until(b.theirs[0][0], "the session is lost", func(p lb.PeerStatus) bool { return !isEstablished(p) })
		took = time.Since(begin)
		t.Logf("%s: link cut: session lost after %v", kind, took)
		if took > bfdLimit {
			t.Errorf("the node has noticed the cut after %v", took)
		}
		if !strings.Contains(p.LastError, "bfd session down: control detection time") {
			t.Errorf("reason %q", p.LastError)
		}
	})
}
