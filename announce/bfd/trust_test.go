package bfd_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A packet with the address of a neighbour counts only if it comes from the interface that leads to the neighbour, and
// over several hops if its TTL is at least that of the session. Either way, it comes from the device of the session.
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
	// The node does not answer solicitations for the address of another link.
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
		m := must.Get(bfd.New(bfd.Options{Log: slog.New(slog.DiscardHandler)}))(t)
		m.Set([]bfd.Neighbor{test.neighbor})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- node.Do(func() error { return m.Run(ctx) }) }()
		packet := bfd.Packet{State: bfd.Down, Multiplier: 255, MyDiscriminator: 7, DesiredMinTx: time.Second}
		labtest.Until(t, 10*time.Second, name, func() error {
			if err := sendFrom(t, test.from, test.neighbor, test.ttl, packet.Append(nil)); err != nil {
				return err
			}
			time.Sleep(10 * time.Millisecond)
			select {
			case err := <-ended:
				return lab.Permanent(fmt.Errorf("bfd has ended: %w", err))
			default:
			}
			switch s := m.Sessions()[0]; {
			case test.reason == "" && s.State != bfd.Init:
				return fmt.Errorf("session %+v, discarded %v, want init", s, m.Discarded())
			case test.reason != "" && (s.State != bfd.Down || s.Discarded != test.reason):
				return fmt.Errorf("session %+v, discarded %v, want %s", s, m.Discarded(), test.reason)
			case test.reason != "" && m.Discarded()[test.reason] == 0:
				return fmt.Errorf("discarded %v", m.Discarded())
			}
			return nil
		})
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// sendFrom sends a packet with the address of the neighbour.
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
