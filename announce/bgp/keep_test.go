package bgp_test

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
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

// A speaker that ends for a restart loses no route, also with BFD, whose end is a planned one.
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
