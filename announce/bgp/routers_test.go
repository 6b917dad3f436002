package bgp_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
)

const (
	ourASN   = 64512
	theirASN = 64500
	patience = 20 * time.Second
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vip6 = netip.MustParseAddr("2001:db8:1::10")
)

// bench is a speaker's host wired to routers: 192.0.2.0/30 and 2001:db8:2:0::/64 to the first, and so on.
type bench struct {
	t       *testing.T
	lab     *lab.Lab
	host    *lab.Host
	routers []*peers.Router
	ours    [][2]netip.Addr // our addresses towards each router, IPv4 and IPv6
	theirs  [][2]netip.Addr
}

// newBench makes the test run beside others: most of them wait for timers most of the time.
func newBench(t *testing.T) *bench {
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	return &bench{t: t, lab: l, host: labtest.Host(t, l, "speaker")}
}

// wire adds a host linked to the speaker's.
func (b *bench) wire(name string) *lab.Host {
	b.t.Helper()
	h := labtest.Host(b.t, b.lab, name)
	n := len(b.ours)
	at := func(side int) [2]netip.Prefix {
		return [2]netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/30", 4*n+side)),
			netip.MustParsePrefix(fmt.Sprintf("2001:db8:2:%d::%d/64", n, side)),
		}
	}
	theirs, ours := at(1), at(2)
	err := b.lab.Link(
		lab.End{Host: b.host, Name: fmt.Sprintf("eth%d", n), Addresses: ours[:]},
		lab.End{Host: h, Name: "eth0", Addresses: theirs[:]}, lab.LinkOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	b.ours = append(b.ours, [2]netip.Addr{ours[0].Addr(), ours[1].Addr()})
	b.theirs = append(b.theirs, [2]netip.Addr{theirs[0].Addr(), theirs[1].Addr()})
	return h
}

// router adds a router that peers with the speaker over IPv4.
func (b *bench) router(kind peers.RouterKind, change func(*peers.RouterConfig)) *peers.Router {
	b.t.Helper()
	h := b.wire(string(kind))
	n := len(b.ours) - 1
	c := peers.RouterConfig{
		ID: b.theirs[n][0], ASN: theirASN, HoldTime: 9 * time.Second,
		Neighbors: []peers.Neighbor{{Address: b.ours[n][0], ASN: ourASN}},
	}
	if change != nil {
		change(&c)
	}
	r := labtest.Router(b.t, h, kind, c)
	b.routers = append(b.routers, r)
	return r
}

// options are those of a speaker that peers with every router over IPv4.
func (b *bench) options() bgp.Options {
	o := bgp.Options{ASN: ourASN, RouterID: b.ours[0][0]}
	for _, a := range b.theirs {
		o.Peers = append(o.Peers, bgp.Peer{Address: a[0], ASN: theirASN, HoldTime: 9 * time.Second, GracefulRestart: true})
	}
	return o
}

// want waits until the kernel of r has exactly this next hop for vip, or none.
func want(t testing.TB, r *peers.Router, vip netip.Addr, via ...netip.Addr) time.Duration {
	t.Helper()
	took, err := r.WaitNextHops(context.Background(), patience, host(vip), via...)
	if err != nil {
		t.Fatalf("%s: %v", r.Kind, err)
	}
	return took
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func eachRouter(t *testing.T, f func(t *testing.T, kind peers.RouterKind)) {
	t.Parallel()
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) { f(t, kind) })
	}
}

// Both families over one IPv4 session, each with this machine's address as next hop; what is withdrawn goes, alone.
func TestRouterGetsAndLosesRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		c := startChild(t, b.host, b.options())
		other := netip.MustParseAddr("203.0.113.11")
		c.set(vip4, vip6, other)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		want(t, r, other, b.ours[0][0])
		if p := c.peer(b.theirs[0][0]); p.State != "established" || p.Routes != 3 || p.LastError != "" {
			t.Errorf("peer %+v, want established with 3 routes and nothing wrong", p)
		}
		c.set(other)
		want(t, r, vip4)
		want(t, r, vip6)
		want(t, r, other, b.ours[0][0])
		c.set(vip4)
		c.terminate()
		if took := want(t, r, vip4); took > time.Second {
			t.Errorf("after a clean end the route stayed %v", took)
		}
	})
}

// steady polls the kernel of r for vip until stop is called, which fails the test when the route was ever away.
func steady(t *testing.T, r *peers.Router, vip, via netip.Addr) (stop func()) {
	t.Helper()
	quit, done := make(chan struct{}), make(chan struct{})
	polls, away := 0, ""
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			default:
			}
			hops, err := r.NextHops(host(vip))
			if err != nil || !slices.Equal(hops, []netip.Addr{via}) {
				away = fmt.Sprintf("at poll %d next hops are %v (%v)", polls, hops, err)
				return
			}
			polls++
			time.Sleep(200 * time.Microsecond) // leave the processors to the others
		}
	}()
	return func() {
		t.Helper()
		close(quit)
		<-done
		if away != "" {
			t.Errorf("%s lost the route to %v: %s", r.Kind, vip, away)
		} else if polls < 100 {
			t.Errorf("%s was asked only %d times", r.Kind, polls)
		}
	}
}

// The speaker is killed, and started again by someone who knows only after a while what to announce. Neither router
// may take the route out of its kernel at any moment. Then it ends in order, and the route goes at once.
func TestKilledSpeakerKeepsItsRoutes(t *testing.T) {
	b := newBench(t)
	for _, kind := range peers.RouterKinds {
		b.router(kind, nil)
	}
	c := startChild(t, b.host, b.options())
	c.set(vip4, vip6)
	for i, r := range b.routers {
		want(t, r, vip4, b.ours[i][0])
		want(t, r, vip6, b.ours[i][1])
	}
	for round := range 3 {
		var stops []func()
		for i, r := range b.routers {
			stops = append(stops, steady(t, r, vip4, b.ours[i][0]), steady(t, r, vip6, b.ours[i][1]))
		}
		c.Kill()
		c.start()
		<-time.After(3 * time.Second) // health checks that have not answered yet
		c.set(vip4, vip6)
		for i, r := range b.routers {
			err := r.WaitEstablished(context.Background(), patience, b.ours[i][0])
			if err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(2 * time.Second) // routers have had every chance to drop what they held
		for _, stop := range stops {
			stop()
		}
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	c.terminate()
	for _, r := range b.routers {
		for _, vip := range []netip.Addr{vip4, vip6} {
			if took := want(t, r, vip); took > time.Second {
				t.Errorf("%s kept %v for %v after a clean end", r.Kind, vip, took)
			}
		}
	}
}

// After a restart one router is there at once and the other only later: that the first session is up must not make the
// second router forget. (gobgp v3 takes the mark of the restart from all peers when one session is up.)
func TestLateRouterKeepsItsRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, late peers.RouterKind) {
		b := newBench(t)
		b.router(peers.BIRD, nil)
		r := b.router(late, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4)
		want(t, r, vip4, b.ours[1][0])
		stop := steady(t, r, vip4, b.ours[1][0])
		c.Kill()
		labtest.Until(t, patience, "the router notices", func() error {
			peers, err := r.Peers(context.Background())
			if err == nil && peers[b.ours[1][0]].Established {
				err = fmt.Errorf("the session is up")
			}
			return err
		})
		b.ip("route", "add", "blackhole", host(b.theirs[1][0]).String())
		c.start()
		c.set(vip4)
		labtest.Until(t, patience, "the first session", func() error {
			if p := c.peer(b.theirs[0][0]); p.State != "established" {
				return fmt.Errorf("%+v", p)
			}
			return nil
		})
		b.ip("route", "del", "blackhole", host(b.theirs[1][0]).String())
		if err := r.WaitEstablished(context.Background(), patience, b.ours[1][0]); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Second) // the router has had every chance to drop what it held
		stop()
	})
}

// The connection breaks without a word while the speaker lives: the router keeps the route until the next session, whose
// OPEN must say once more that forwarding went on.
func TestBrokenConnectionKeepsRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4, vip6)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		stop4, stop6 := steady(t, r, vip4, b.ours[0][0]), steady(t, r, vip6, b.ours[0][1])
		if out, err := b.host.Run(context.Background(), "ss", "-K", "dst", b.theirs[0][0].String()); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		labtest.Until(t, patience, "the speaker notices", func() error {
			if !c.Log.Contains("bgp session down") {
				return fmt.Errorf("no line in the log")
			}
			return nil
		})
		labtest.Until(t, patience, "the session is back", func() error {
			if p := c.peer(b.theirs[0][0]); p.State != "established" || p.Routes != 2 {
				return fmt.Errorf("%+v", p)
			}
			return nil
		})
		<-time.After(2 * time.Second) // the router has had every chance to drop what it held
		stop4()
		stop6()
	})
}

// ip changes the routes of the speaker's host.
func (b *bench) ip(args ...string) {
	b.t.Helper()
	if out, err := b.host.Run(context.Background(), "ip", args...); err != nil {
		b.t.Fatalf("%v\n%s", err, out)
	}
}

// Killed without graceful restart: the routes do go, so the tests above can fail.
func TestKilledSpeakerWithoutGracefulRestart(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		o := b.options()
		o.Peers[0].GracefulRestart = false
		c := startChild(t, b.host, o)
		c.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		c.Kill()
		if took := want(t, r, vip4); took > 2*time.Second {
			t.Errorf("the route stayed for %v", took)
		}
	})
}

// What is no longer wanted after a restart goes when the speaker is back, and what is stays.
func TestRestartWithOtherRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4, vip6)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		stop := steady(t, r, vip6, b.ours[0][1])
		c.Kill()
		c.start()
		c.set(vip6)
		want(t, r, vip4)
		stop()
	})
}

// The router ends the session: it comes back by itself, with the routes, and the log says so once.
func TestSessionComesBack(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		if err := r.Reset(context.Background(), b.ours[0][0]); err != nil {
			t.Fatal(err)
		}
		labtest.Until(t, patience, "the speaker notices", func() error {
			if c.Log.Contains("bgp session down") {
				return nil
			}
			return fmt.Errorf("no line in the log")
		})
		labtest.Until(t, patience, "the session is back", func() error {
			if p := c.peer(b.theirs[0][0]); p.State != "established" {
				return fmt.Errorf("%+v", p)
			}
			return nil
		})
		want(t, r, vip4, b.ours[0][0])
		downs := 0
		for _, line := range c.Log.Lines() {
			if strings.Contains(line, "bgp session down") && strings.Contains(line, "administrative") {
				downs++
			}
		}
		if downs != 1 {
			t.Errorf("%d lines say that and why the session went down, want 1", downs)
		}
	})
}
