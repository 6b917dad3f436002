package bgp_test

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/ipv4"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// bfdLimit is more than the 0.3 s necessary on an idle machine, because other tests run as well.
const bfdLimit = 3 * time.Second

// With BFD, a router removes a frozen node's routes before the hold time expires, although graceful restart would keep
// them, and the node detects a cut link. A planned shutdown is neither. The sessions with BIRD are bound to a device.
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

		c := must.Get(r.Host.Dial(t.Context(), "udp", netip.AddrPortFrom(b.ours[0][0], 3784).String()))(t)
		must.Get(c.Write([]byte("no packet of BFD")))(t)
		must.Do(t, c.Close())
		labtest.Until(t, "the packet is counted", func() error {
			a, err := s.call(request{})
			return labtest.ErrorIf(err != nil || a.Discarded["dropped by the kernel"] == 0, "%v, %v", a.Discarded, err)
		})
		must.Do(t, s.Signal(syscall.SIGSTOP))
		took := want(t, r, vip4)
		t.Logf("%s: frozen: route gone after %v", kind, took)
		must.True(t, took <= bfdLimit, "%s noticed the frozen node after %v", kind, took)
		must.Do(t, s.Signal(syscall.SIGCONT))
		t.Logf("%s: goes on: route back after %v", kind, want(t, r, vip4, b.ours[0][0]))
		s.until(b.theirs[0][0], "bfd was up in this session", func(p lb.PeerStatus) bool {
			return p.BFD == "up" && isEstablished(p) && time.Since(p.Since) > time.Second
		})

		begin := time.Now()
		must.Do(t, r.Host.SetDown("eth0"))
		p := s.until(b.theirs[0][0], "the session is lost", func(p lb.PeerStatus) bool { return !isEstablished(p) })
		took = time.Since(begin)
		t.Logf("%s: link cut: session lost after %v", kind, took)
		must.True(t, took <= bfdLimit, "the node noticed the cut after %v", took)
		must.True(t, strings.Contains(p.LastError, "bfd session down: control detection time"),
			"reason %q", p.LastError)
	})
}

// Changed BFD parameters end no session and remove no route. If the router ends the BGP and BFD sessions, that BFD
// failure does not end the next BGP session, but the next failure after BFD has come up does.
func TestBFDOfTheSessionBefore(t *testing.T) {
	const multiplier = 10 // 3 packets may be late on a busy machine
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, func(c *peers.RouterConfig) {
			c.HoldTime = time.Minute
			c.Neighbors[0].BFD, c.Neighbors[0].BFDMultiplier = true, multiplier
		})
		o := b.options()
		o.Peers[0].HoldTime = time.Minute
		o.Peers[0].BFD = bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: multiplier}
		s := startChild(t, b.host, o)
		s.set(vip4)
		peer := b.theirs[0][0]
		both := func(p lb.PeerStatus) bool { return p.BFD == "up" && isEstablished(p) }
		s.until(peer, "both sessions are up", both)
		pause := func() { time.Sleep(5 * time.Second) } // after a shorter session, the next waits until BFD is down
		pause()
		// If both sides connected simultaneously, a collision may end the first session (RFC 4271, section 6.8).
		up := s.until(peer, "both sessions are up still", both)
		ended := up.Flaps
		stop := watchRoute(t, r, vip4, b.ours[0][0])
		for _, c := range []bgp.BFD{{Interval: 300 * time.Millisecond, Multiplier: multiplier + 1}, o.Peers[0].BFD} {
			o.Peers[0].BFD = c
			s.configure(o)
			time.Sleep(2 * time.Second) // a router detects the end of a session within one second
			p := s.peer(peer)
			must.True(t, p.Since.Equal(up.Since) && p.BFD == "up",
				"%+v: bfd %s, up since %v, was since %v: %q", c, p.BFD, p.Since, up.Since, p.Errors)
		}
		stop()
		for _, end := range []func() error{
			func() error { return r.Reset(t.Context(), b.ours[0][0]) },
			func() error {
				if err := s.Signal(syscall.SIGSTOP); err != nil {
					return err
				}
				time.Sleep(2 * multiplier * 100 * time.Millisecond)
				return s.Signal(syscall.SIGCONT)
			},
		} {
			must.Do(t, end())
			ended++
			again := func(p lb.PeerStatus) bool { return isEstablished(p) && p.Flaps == ended }
			s.until(peer, "the next session", again)
			pause()
			p := s.until(peer, "both sessions are up again", both)
			must.Need(t, p.Flaps == ended, "%d sessions have ended, want %d: %+v", p.Flaps, ended, p.Errors)
		}
		must.Do(t, r.Host.SetDown("eth0"))
		p := s.until(peer, "the session is lost", func(p lb.PeerStatus) bool { return !isEstablished(p) })
		must.True(t, strings.Contains(p.LastError, "bfd session down: control detection time"),
			"reason %q", p.LastError)
	})
}

// With a router without BFD, there is a session with its routes, and the status shows that BFD is missing. Packets from
// the router's address, which anybody on the link can send, change neither.
func TestRouterWithoutBFD(t *testing.T) {
	b := newBench(t)
	r := b.router(peers.BIRD, nil)
	o := b.options()
	o.Peers[0].BFD = bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}
	s := startChild(t, b.host, o)
	s.set(vip4)
	want(t, r, vip4, b.ours[0][0])
	const state = "down: no packet from the peer arrives; check that BFD is enabled there, with the same multihop"
	before := s.until(b.theirs[0][0], "the session is up", isEstablished)
	must.True(t, before.LastError == "" && before.BFD == state,
		"at once: reason %q, bfd %q", before.LastError, before.BFD)
	packet := bfd.Packet{State: bfd.Down, Multiplier: 1, MyDiscriminator: 1, DesiredMinTx: time.Second}.Append(nil)
	for _, row := range []struct {
		ttl   int
		state string
	}{
		{255, "init: the peer has received no packet from this node"},
		{254, "down: packets from the peer are discarded: TTL below 255"},
	} {
		c := must.Get(r.Host.Dial(t.Context(), "udp", netip.AddrPortFrom(b.ours[0][0], 3784).String()))(t)
		defer c.Close()
		must.Do(t, ipv4.NewConn(c).SetTTL(row.ttl))
		must.Get(c.Write(packet))(t)
		for _, want := range []string{row.state, state} {
			s.until(b.theirs[0][0], want, func(p lb.PeerStatus) bool { return p.BFD == want })
		}
	}
	p := s.peer(b.theirs[0][0])
	must.True(t, p.Since.Equal(before.Since) && p.Flaps == 0, "the session has ended: %+v", p)
	s.until(b.theirs[0][0], "a reason", func(p lb.PeerStatus) bool {
		return isEstablished(p) && p.LastError == "bfd is "+state
	})
	a, err := s.call(request{})
	must.True(t, err == nil && len(a.Problems) == 1 && a.Problems[0] == "peer 192.0.2.1: bfd is "+state,
		"problems %q, %v", a.Problems, err)
	want(t, r, vip4, b.ours[0][0])
}
