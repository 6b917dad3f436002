package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const (
	ourASN   = 64512
	theirASN = 64500
	timeout  = time.Minute
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vip6 = netip.MustParseAddr("2001:db8:1::10")
)

// bench is a speaker's host with links to routers, 192.0.2.0/30 and 2001:db8:2:0::/64 to the first, and so on.
type bench struct {
	t       *testing.T
	lab     *lab.Lab
	host    *lab.Host
	routers []*peers.Router
	ours    [][2]netip.Addr // our addresses towards each router, IPv4 and IPv6
	theirs  [][2]netip.Addr
}

// newBench runs the test in parallel with others, because they mostly wait for timers.
func newBench(t *testing.T) *bench {
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	return &bench{t: t, lab: l, host: labtest.Host(t, l, "speaker")}
}

func (b *bench) link(name string) *lab.Host {
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
	must.Do(b.t, b.lab.Link(
		lab.End{Host: b.host, Name: fmt.Sprintf("eth%d", n), Addresses: ours[:]},
		lab.End{Host: h, Name: "eth0", Addresses: theirs[:]}, lab.LinkOptions{}))
	b.ours = append(b.ours, [2]netip.Addr{ours[0].Addr(), ours[1].Addr()})
	b.theirs = append(b.theirs, [2]netip.Addr{theirs[0].Addr(), theirs[1].Addr()})
	return h
}

// router adds a router that peers with the speaker over IPv4.
func (b *bench) router(kind peers.RouterKind, change func(*peers.RouterConfig)) *peers.Router {
	b.t.Helper()
	h := b.link(string(kind))
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

// options returns the options of a speaker that peers with every router over IPv4.
func (b *bench) options() bgp.Options {
	o := bgp.Options{ASN: ourASN, RouterID: b.ours[0][0]}
	for _, a := range b.theirs {
		p := bgp.Peer{Address: a[0], ASN: theirASN, HoldTime: 9 * time.Second, GracefulRestart: true}
		o.Peers = append(o.Peers, p)
	}
	return o
}

// want waits until r's kernel has exactly this next hop for vip, or none.
func want(t testing.TB, r *peers.Router, vip netip.Addr, via ...netip.Addr) time.Duration {
	t.Helper()
	return must.Get(r.WaitNextHops(context.Background(), timeout, host(vip), via...))(t)
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func eachRouter(t *testing.T, f func(t *testing.T, kind peers.RouterKind)) {
	t.Parallel()
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) { f(t, kind) })
	}
}

// One IPv4 session, with a password, carries both families, each with this node's address as next hop. Only withdrawn
// routes are removed.
func TestRouterGetsAndLosesRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, func(c *peers.RouterConfig) {
			c.Neighbors[0].Password, c.Neighbors[0].Passive = "secret", kind == peers.BIRD
		})
		o := b.options()
		o.Peers[0].Password = "secret"
		c := startChild(t, b.host, o)
		other := netip.MustParseAddr("203.0.113.11")
		c.set(vip4, vip6, other)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		want(t, r, other, b.ours[0][0])
		p := c.peer(b.theirs[0][0])
		must.True(t, p.State == "established" && p.Routes == 3 && p.LastError == "", "peer %+v", p)
		c.set(other)
		want(t, r, vip4)
		want(t, r, vip6)
		want(t, r, other, b.ours[0][0])
		c.set(vip4)
		c.terminate()
		took := want(t, r, vip4)
		must.True(t, took <= time.Second, "the route stayed %v after a clean exit", took)
	})
}

// watchRoute polls r's kernel for vip until stop is called. stop fails the test if the route was ever missing.
func watchRoute(t *testing.T, r *peers.Router, vip, via netip.Addr) (stop func()) {
	t.Helper()
	quit, done := make(chan struct{}), make(chan struct{})
	polls, missing := 0, ""
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
				missing = fmt.Sprintf("at poll %d next hops are %v (%v)", polls, hops, err)
				return
			}
			polls++
			time.Sleep(200 * time.Microsecond) // leave CPU time for other tests
		}
	}()
	return func() {
		t.Helper()
		close(quit)
		<-done
		if missing != "" {
			t.Errorf("%s lost the route to %v: %s", r.Kind, vip, missing)
		} else if polls < 10 { // a loaded machine polls slowly
			t.Errorf("only %d polls of %s", polls, r.Kind)
		}
	}
}

// The speaker is killed and restarted, and its first Set follows a few seconds later. No router may remove the route
// from its kernel at any time. It must remove routes that are no longer announced after the restart.
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
	for round := range 2 {
		var stops []func()
		for i, r := range b.routers {
			stops = append(stops, watchRoute(t, r, vip4, b.ours[i][0]), watchRoute(t, r, vip6, b.ours[i][1]))
		}
		c.Kill()
		c.start()
		<-time.After(3 * time.Second) // the first health reports take as long
		c.set(vip4, vip6)
		for i, r := range b.routers {
			must.Do(t, r.WaitEstablished(context.Background(), timeout, b.ours[i][0]))
		}
		<-time.After(2 * time.Second) // routers would remove stale routes by now
		for _, stop := range stops {
			stop()
		}
		must.Need(t, !t.Failed(), "in round %d", round)
	}
	var stops []func()
	for i, r := range b.routers {
		stops = append(stops, watchRoute(t, r, vip6, b.ours[i][1]))
	}
	c.Kill()
	c.start()
	c.set(vip6)
	for _, r := range b.routers {
		want(t, r, vip4)
	}
	<-time.After(time.Second) // routers would remove stale routes by now
	for _, stop := range stops {
		stop()
	}
}

// After a restart one router connects immediately and the other later. The first session must not make the second
// router remove the routes. (gobgp v3 clears all peers' restart flags when one session comes up.)
func TestLateRouterKeepsItsRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, late peers.RouterKind) {
		b := newBench(t)
		b.router(peers.BIRD, nil)
		r := b.router(late, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4)
		want(t, r, vip4, b.ours[1][0])
		stop := watchRoute(t, r, vip4, b.ours[1][0])
		c.Kill()
		labtest.Until(t, "the router detects it", func() error {
			peers, err := r.Peers(context.Background())
			return errors.Join(err, labtest.ErrorIf(peers[b.ours[1][0]].Established, "the session is up"))
		})
		b.ip("route", "add", "blackhole", host(b.theirs[1][0]).String())
		c.start()
		c.set(vip4)
		c.established(b.theirs[0][0])
		b.ip("route", "del", "blackhole", host(b.theirs[1][0]).String())
		must.Do(t, r.WaitEstablished(context.Background(), timeout, b.ours[1][0]))
		<-time.After(time.Second) // the router would remove stale routes by now
		stop()
	})
}

// If the connection is lost without a NOTIFICATION while the speaker runs, the router keeps the route until the next
// session, whose OPEN must have the Forwarding State bit.
func TestLostConnectionKeepsRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		c := startChild(t, b.host, b.options())
		c.set(vip4, vip6)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		stop4, stop6 := watchRoute(t, r, vip4, b.ours[0][0]), watchRoute(t, r, vip6, b.ours[0][1])
		must.Get(b.host.Run(context.Background(), "ss", "-K", "dst", b.theirs[0][0].String()))(t)
		labtest.Until(t, "the speaker detects it", func() error {
			return labtest.ErrorIf(!c.Log.Contains("bgp session down"), "no line in the log")
		})
		c.until(b.theirs[0][0], "the session is back", func(p lb.PeerStatus) bool {
			return p.State == "established" && p.Routes == 2
		})
		<-time.After(2 * time.Second) // the router would remove stale routes by now
		stop4()
		stop6()
	})
}

// ip changes the speaker host's routes.
func (b *bench) ip(args ...string) {
	b.t.Helper()
	must.Get(b.host.Run(context.Background(), "ip", args...))(b.t)
}

// A router keeps the routes of a speaker that does not return only for RestartTime. Without graceful restart, it
// removes them immediately.
func TestRestartTime(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, nil)
		o := b.options()
		o.RestartTime = 4 * time.Second
		for _, graceful := range []bool{true, false} {
			o.Peers[0].GracefulRestart = graceful
			c := startChild(t, b.host, o)
			c.set(vip4)
			want(t, r, vip4, b.ours[0][0])
			c.Kill()
			took := want(t, r, vip4)
			least, most := o.RestartTime-time.Second, o.RestartTime+5*time.Second
			if !graceful {
				least, most = 0, 2*time.Second
			}
			must.True(t, took >= least && took <= most,
				"graceful restart %t: the route stayed for %v; want %v to %v", graceful, took, least, most)
		}
	})
}

// A speaker that exits for a restart loses no route, even with BFD, which then shuts down as planned.
func TestRestartKeepsTheRoutes(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		variants := []bool{false}
		if kind == peers.FRR { // BIRD 2.0 treats AdminDown as a failure
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
				ready := func(p lb.PeerStatus) bool { return p.State == "established" && (!withBFD || p.BFD == "up") }
				c.until(b.theirs[0][0], "the sessions are up", ready)
				stop4, stop6 := watchRoute(t, r, vip4, b.ours[0][0]), watchRoute(t, r, vip6, b.ours[0][1])
				c.end(syscall.SIGUSR1)
				<-time.After(2 * time.Second)
				c.start()
				c.set(vip4, vip6)
				c.until(b.theirs[0][0], "the sessions are up again", ready)
				must.Do(t, r.WaitEstablished(context.Background(), timeout, b.ours[0][0]))
				<-time.After(time.Second) // the router would remove stale routes by now
				stop4()
				stop6()
			})
		}
	})
}

// After the graceful restart time, a router with long-lived graceful restart (RFC 9494) keeps the routes as stale for
// the long-lived time, and then removes them.
func TestLongLivedGracefulRestart(t *testing.T) {
	const longLived = 8 * time.Second
	stale := func(t *testing.T, show func() (string, error), word string) {
		t.Helper()
		labtest.Until(t, "the route is stale", func() error {
			out, err := show()
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, word), "the output is %s", out))
		})
		labtest.Until(t, "the route is removed", func() error {
			if out, err := show(); err == nil && strings.Contains(out, word) { // birdc fails if there is no route
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
		out, err := r.Run(t.Context(), "vtysh", "--vty_socket", "/run/frr", "-d", "bgpd", "-c", "configure terminal",
			"-c", "router bgp 64500", "-c", "bgp long-lived-graceful-restart stale-time 3600")
		must.Need(t, err == nil, "%v\n%s", err, out)
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
