package bfd_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// Two routers with the same addresses, on different devices, have independent sessions. The second device is created
// later, then deleted and created again.
func TestDevices(t *testing.T) {
	const multiplier = 10 // 3 packets may be late on a busy machine
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	node := labtest.Host(t, l, "node")
	var routers []*peers.Router
	link := func(n int, router *lab.Host) {
		t.Helper()
		must.Do(t, l.Link(end(node, fmt.Sprintf("eth%d", n), 2), end(router, "eth0", 1), lab.LinkOptions{}))
	}
	start := func(n int, kind peers.RouterKind, h *lab.Host) {
		t.Helper()
		link(n, h)
		routers = append(routers, startRouter(t, h, kind, multiplier))
	}
	start(0, peers.BIRD, labtest.Host(t, l, "bird"))
	var neighbors []bfd.Neighbor
	for _, device := range []string{"eth0", "eth1"} {
		for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
			n := fast(netip.MustParseAddr(a))
			n.Device, n.Multiplier = device, multiplier
			neighbors = append(neighbors, n)
		}
	}
	m, _ := monitor(t, node, bfd.Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}, neighbors...)
	var up []time.Time // when the sessions with the first router came up
	are := func(first, second bfd.State, problem string) {
		t.Helper()
		labtest.Until(t, fmt.Sprintf("%v and %v, %q", first, second, problem), func() error {
			up = nil
			for i, s := range m.Sessions() {
				want, because := first, ""
				if i < 2 {
					up = append(up, s.Since)
				} else {
					want, because = second, problem
				}
				if s.State != want || s.Problem != because {
					return fmt.Errorf("session %d: %+v, discarded: %v", i, s, m.Discarded())
				}
			}
			return nil
		})
	}
	const missing = "bind to device eth1: no such device"
	are(bfd.Up, bfd.Down, missing)
	before := up
	second := labtest.Host(t, l, "frr")
	start(1, peers.FRR, second)
	are(bfd.Up, bfd.Up, "")
	signalAll(t, syscall.SIGSTOP, routers[1])
	are(bfd.Up, bfd.Down, "")
	signalAll(t, syscall.SIGCONT, routers[1])
	are(bfd.Up, bfd.Up, "")
	must.Get(node.Run(t.Context(), "ip", "link", "del", "eth1"))(t)
	are(bfd.Up, bfd.Down, missing)
	link(1, second)
	are(bfd.Up, bfd.Up, "")
	for i, since := range before {
		must.True(t, up[i].Equal(since),
			"session %d with the first router is up since %v, was since %v", i, up[i], since)
	}
	signalAll(t, syscall.SIGSTOP, routers[0])
	are(bfd.Down, bfd.Up, "")
	signalAll(t, syscall.SIGCONT, routers[0])
}

// A changed interval and multiplier take effect on both sides without ending the session.
func TestChangeWhileUp(t *testing.T) {
	const multiplier = 10 // 3 packets may be late on a busy machine
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		p := newPairOf(t, kind, multiplier)
		child := p.start(t, "192.0.2.1", multiplier)
		p.sees(t, "192.0.2.2", "up")
		p.hears(t, 100*time.Millisecond, multiplier)
		before := p.since(t)
		change := func(s syscall.Signal, interval time.Duration, multiplier int) {
			t.Helper()
			send(t, s, child)
			p.hears(t, interval, multiplier)
			time.Sleep(2 * time.Second) // a detection time that is too short would expire
			must.True(t, !p.ended(t, before), "%v × %d: the session has ended at the router", interval, multiplier)
			must.True(t, !child.Log.Contains("bfd session down"), "%v × %d: the end is logged", interval, multiplier)
		}
		change(syscall.SIGUSR1, slowInterval, slowMultiplier)
		change(syscall.SIGUSR2, 100*time.Millisecond, multiplier)
		change(syscall.SIGUSR1, slowInterval, slowMultiplier)
		// With the previous parameters, both sides would detect a failure within a second.
		signalAll(t, syscall.SIGSTOP, p.daemon)
		took := labtest.Until(t, "the monitor notices", func() error {
			return labtest.ErrorIf(!child.Log.Contains("bfd session down"), "log:\n%s", child.Log.Tail(20))
		})
		must.True(t, took >= 3*time.Second, "the monitor has noticed the router after %v", took)
		t.Logf("%s frozen: noticed after %v", kind, took)
		signalAll(t, syscall.SIGCONT, p.daemon)
		labtest.Until(t, "the router notices that it was frozen", func() error {
			return labtest.ErrorIf(!p.ended(t, before), "the session has not ended there")
		})
		p.sees(t, "192.0.2.2", "up")
		p.hears(t, slowInterval, slowMultiplier)
		send(t, syscall.SIGSTOP, child)
		took = p.sees(t, "192.0.2.2", "down")
		must.True(t, took >= 3*time.Second, "%s has noticed the node after %v", kind, took)
		t.Logf("node frozen: %s has noticed after %v", kind, took)
		send(t, syscall.SIGCONT, child)
	})
}

func send(t *testing.T, s syscall.Signal, to ...*lab.Process) {
	t.Helper()
	for _, p := range to {
		must.Do(t, p.Signal(s))
	}
}

// hears waits until the router has learned the node's interval and multiplier.
func (p pair) hears(t *testing.T, interval time.Duration, multiplier int) {
	t.Helper()
	command, want := "show bfd peer 192.0.2.2 json", fmt.Sprintf(
		`(?s)"remote-transmit-interval":%d,.*"remote-detect-multiplier":%d,`, interval.Milliseconds(), multiplier)
	if p.daemon.Kind == peers.BIRD { // the last column is the detection time
		command = "show bfd sessions"
		want = fmt.Sprintf(`(?m)^192\.0\.2\.2 .* %.3f *$`, (time.Duration(multiplier) * interval).Seconds())
	}
	pattern := regexp.MustCompile(want)
	what := fmt.Sprintf("%s hears of %v × %d", p.daemon.Kind, interval, multiplier)
	labtest.Until(t, what, func() error {
		out, err := p.daemon.Show(t.Context(), command)
		return errors.Join(err, labtest.ErrorIf(!pattern.MatchString(out), "want %s:\n%s", want, out))
	})
}

// since returns a number that changes by at least 1 when the router's session has ended and come up again.
func (p pair) since(t *testing.T) float64 {
	t.Helper()
	command, pattern := "show bfd peer 192.0.2.2 counters", `Session (down) (events): (\d+)`
	if p.daemon.Kind == peers.BIRD { // time of day when it came up, in seconds
		command, pattern = "show bfd sessions", `192\.0\.2\.2 +\S+ +\S+ +(\d+):(\d+):([0-9.]+)`
	}
	out, err := p.daemon.Show(t.Context(), command)
	found := regexp.MustCompile(pattern).FindStringSubmatch(out)
	must.Need(t, err == nil && found != nil, "%s: %v\n%s", command, err, out)
	number := func(n int) float64 { x, _ := strconv.ParseFloat(found[n], 64); return x } // 0 if not a number
	return 3600*number(1) + 60*number(2) + number(3)
}

// ended reports whether the router's session has ended since then. BIRD derives the time of day from another clock, so
// its times may differ by a millisecond.
func (p pair) ended(t *testing.T, since float64) bool { return math.Abs(p.since(t)-since) > 0.5 }

// A single-hop session accepts packets only from the interface that leads to the neighbour, a multihop session only
// packets with at least the configured TTL. Both accept packets only from their own device.
func TestForeignPackets(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	node := labtest.Host(t, l, "node")
	router, stranger := labtest.Host(t, l, "router"), labtest.Host(t, l, "stranger")
	for n, other := range []*lab.Host{router, stranger} {
		theirs := []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}
		ours := []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("2001:db8::2/64")}
		if n == 1 {
			ours = []netip.Prefix{netip.MustParsePrefix("203.0.113.2/24"), netip.MustParsePrefix("2001:db8:1::2/64")}
		}
		must.Do(t, l.Link(lab.End{Host: node, Name: fmt.Sprintf("eth%d", n), Addresses: ours},
			lab.End{Host: other, Name: "eth0", Addresses: theirs}, lab.LinkOptions{}))
	}
	// The node does not reply to solicitations for addresses of another link.
	must.Do(t, stranger.AddAddress("eth0", netip.MustParsePrefix("2001:db8:1::1/64")))
	must.Do(t, stranger.AddRoute(netip.MustParsePrefix("2001:db8::2/128"), netip.MustParseAddr("2001:db8:1::2")))
	neighbor := func(address string, minTTL uint8) bfd.Neighbor {
		n := fast(netip.MustParseAddr(address))
		n.Multihop, n.MinTTL = minTTL > 0, minTTL
		return n
	}
	on := func(device string, n bfd.Neighbor) bfd.Neighbor {
		n.Device = device
		return n
	}
	for _, test := range []struct {
		neighbor bfd.Neighbor
		from     *lab.Host
		ttl      int
		reason   string
	}{
		{neighbor("192.0.2.1", 0), stranger, 255, "not from the interface of the neighbor"},
		{neighbor("192.0.2.1", 0), router, 255, ""},
		{neighbor("2001:db8::1", 0), stranger, 255, "not from the interface of the neighbor"},
		{neighbor("2001:db8::1", 0), router, 255, ""},
		{neighbor("192.0.2.1", 254), router, 253, "TTL below min_ttl"},
		{neighbor("192.0.2.1", 254), router, 254, ""},
		{neighbor("2001:db8::1", 254), router, 253, "TTL below min_ttl"},
		{neighbor("2001:db8::1", 254), router, 254, ""},
		{on("eth0", neighbor("192.0.2.1", 0)), stranger, 255, "not from the interface of the neighbor"},
		{on("eth0", neighbor("192.0.2.1", 0)), router, 255, ""},
		{on("eth1", neighbor("192.0.2.1", 0)), router, 255, "not from the interface of the neighbor"},
		{on("eth1", neighbor("192.0.2.1", 0)), stranger, 255, ""},
		{on("eth0", neighbor("192.0.2.1", 254)), stranger, 254, "not from the device of the session"},
		{on("eth0", neighbor("192.0.2.1", 254)), router, 254, ""},
		{on("eth0", neighbor("2001:db8::1", 254)), stranger, 254, "not from the device of the session"},
		{on("eth0", neighbor("2001:db8::1", 254)), router, 254, ""},
	} {
		n := test.neighbor
		name := fmt.Sprintf("%v on %q from %v with TTL %d", n.Addr, n.Device, test.from, test.ttl)
		m, stop := monitor(t, node, bfd.Options{Log: slog.New(slog.DiscardHandler)}, n)
		packet := bfd.Packet{State: bfd.Down, Multiplier: 255, MyDiscriminator: 7, DesiredMinTx: time.Second}
		labtest.Until(t, name, func() error {
			if err := sendFrom(t, test.from, test.neighbor, test.ttl, packet.Append(nil)); err != nil {
				return err
			}
			time.Sleep(10 * time.Millisecond)
			switch s := m.Sessions()[0]; {
			case test.reason == "" && s.State != bfd.Init:
				return fmt.Errorf("session %+v, discarded %v, want init", s, m.Discarded())
			case test.reason != "" && (s.State != bfd.Down || s.Discarded != test.reason):
				return fmt.Errorf("session %+v, discarded %v, want %s", s, m.Discarded(), test.reason)
			case test.reason != "" && m.Discarded()[test.reason] == 0:
				return fmt.Errorf("discarded %v, none for %s", m.Discarded(), test.reason)
			}
			return nil
		})
		stop()
	}
}

// sendFrom sends a packet from the neighbour's address.
func sendFrom(t *testing.T, h *lab.Host, n bfd.Neighbor, ttl int, b []byte) error {
	t.Helper()
	to := "192.0.2.2"
	if n.Addr.Is6() {
		to = "2001:db8::2"
	}
	port := "3784"
	if n.Multihop {
		port = "4784"
	}
	c, err := h.Dial(t.Context(), "udp", net.JoinHostPort(to, port))
	if err != nil {
		return err
	}
	defer c.Close()
	if n.Addr.Is6() {
		err = ipv6.NewConn(c).SetHopLimit(ttl)
	} else {
		err = ipv4.NewConn(c).SetTTL(ttl)
	}
	if err != nil {
		return err
	}
	_, err = c.Write(b)
	return err
}
