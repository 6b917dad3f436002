package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A router keeps the routes of a speaker that does not return for RestartTime, and no longer.
func TestRestartTime(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		o := b.options()
		o.RestartTime = 4 * time.Second
		c := startChild(t, b.host, o)
		c.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		c.Kill()
		if took := want(t, r, vip4); took < o.RestartTime-time.Second || took > o.RestartTime+5*time.Second {
			t.Errorf("the route stayed for %v; want %v", took, o.RestartTime)
		}
	})
}

// A speaker that ends for a restart loses no route, even with BFD, which ends as planned.
func TestRestartKeepsTheRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		variants := []bool{false}
		if kind == peers.FRR { // BIRD 2.0 takes AdminDown for a failure
			variants = append(variants, true)
		}
		for _, withBFD := range variants {
			t.Run(fmt.Sprintf("bfd %t", withBFD), func(t *testing.T) {
				b := newBench(t)
				r := b.router(kind, func(c *peers.RouterConfig) { c.Neighbors[0].BFD = withBFD })
				o := b.options()
				if withBFD {
					o.Peers[0].BFD = bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}
				}
				c := startChild(t, b.host, o)
				c.set(vip4, vip6)
				want(t, r, vip4, b.ours[0][0])
				want(t, r, vip6, b.ours[0][1])
				ready := func(p lb.PeerStatus) bool {
					return p.State == "established" && (!withBFD || p.BFD == "up")
				}
				c.until(b.theirs[0][0], "the sessions are up", ready)
				stop4, stop6 := watchRoute(t, r, vip4, b.ours[0][0]), watchRoute(t, r, vip6, b.ours[0][1])
				c.end(syscall.SIGUSR1)
				<-time.After(2 * time.Second)
				c.start()
				c.set(vip4, vip6)
				c.until(b.theirs[0][0], "the sessions are up again", ready)
				must.Do(t, r.WaitEstablished(context.Background(), timeout, b.ours[0][0]))
				<-time.After(time.Second) // time for the router to remove stale routes
				stop4()
				stop6()
			})
		}
	})
}

// After the time of graceful restart, a router that has it keeps the routes as stale ones for the long-lived time (RFC
// 9494), and then removes them.
func TestLongLivedGracefulRestart(t *testing.T) {
	const longLived = 8 * time.Second
	stale := func(t *testing.T, show func() (string, error), word string) {
		t.Helper()
		labtest.Until(t, timeout, "the route is stale", func() error {
			out, err := show()
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, word), "the output is %s", out))
		})
		labtest.Until(t, longLived+timeout, "the route is removed", func() error {
			if out, err := show(); err == nil && strings.Contains(out, word) { // birdc fails when there is no route
				return fmt.Errorf("the output is %s", out)
			}
			return nil
		})
	}
	t.Run("bird", func(t *testing.T) {
		b, h, o := oneLink(t)
		r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; graceful restart aware; long lived graceful restart aware; "+
			bothFamilies, "")
		o.RestartTime, o.LongLivedRestartTime = time.Second, longLived
		c := startChild(t, b.host, o)
		c.set(vip4)
		r.await("show route all for "+vip4.String(), "BGP.as_path: 64512")
		c.Kill()
		stale(t, func() (string, error) { return r.birdc("show route all for " + vip4.String()) }, "(65535,6)")
	})
	t.Run("frr", func(t *testing.T) {
		b := newBench(t)
		r := b.router(peers.FRR, nil)
		if out, err := r.Run(t.Context(), "vtysh", "--vty_socket", "/run/frr", "-d", "bgpd", "-c", "configure terminal",
			"-c", "router bgp 64500", "-c", "bgp long-lived-graceful-restart stale-time 3600"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		o := b.options()
		o.RestartTime, o.LongLivedRestartTime = time.Second, longLived
		c := startChild(t, b.host, o)
		c.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		c.Kill()
		show := func() (string, error) { return r.Show(t.Context(), "show bgp ipv4 unicast "+vip4.String()) }
		stale(t, show, "llgr-stale")
		want(t, r, vip4)
	})
}
