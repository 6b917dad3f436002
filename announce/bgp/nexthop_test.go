package bgp

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestHas(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, row := range []struct {
		n      nextHops
		v4, v6 bool
	}{
		{nextHops{}, false, false},
		{nextHops{addr4: v4}, true, false},
		{nextHops{addr6: v6}, false, true},
		{nextHops{addr4: v4, addr6: v6}, true, true},
	} {
		if row.n.has(v4) != row.v4 || row.n.has(v6) != row.v6 {
			t.Errorf("%+v: has IPv4 %t, IPv6 %t, want %t, %t", row.n, row.n.has(v4), row.n.has(v6), row.v4, row.v6)
		}
	}
}

// The loopback interface has no global address: the next hop of the other family is that of the options, or missing.
func TestNextHopsFrom(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	with, without := Options{NextHopV4: v4, NextHopV6: v6}, Options{}
	loopback4 := netip.MustParseAddr("127.0.0.1")
	if got, want := with.nextHopsFrom(loopback4), (nextHops{addr4: loopback4, addr6: v6}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	const none = "IPv6 routes are not sent: no IPv6 next hop, lo has no global IPv6 address"
	want := nextHops{addr4: loopback4, reason6: none}
	if got := without.nextHopsFrom(loopback4); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	unknown := netip.MustParseAddr("2001:db8:ffff::1")
	want = nextHops{addr6: unknown, reason4: "IPv4 routes are not sent: no interface has 2001:db8:ffff::1"}
	if got := without.nextHopsFrom(unknown); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	// A link-local address is no next hop.
	linkLocal := netip.MustParseAddr("fe80::1%none0")
	if got, want := with.nextHopsFrom(linkLocal), (nextHops{addr4: v4, addr6: v6}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestMissing(t *testing.T) {
	failed := errors.New("no route")
	if got := missing(netip.MustParseAddr("192.0.2.1"), "IPv4", "eth0", failed); got != "" {
		t.Errorf("%q although there is an address", got)
	}
	if got, want := missing(netip.Addr{}, "IPv4", "eth0", failed), "IPv4 routes are not sent: no route"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// An address is found on its interface, together with the global ones there; with a zone only on that interface.
func TestInterfaceOf(t *testing.T) {
	tested := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	all := must.Get(net.InterfaceAddrs())(t)
	for _, a := range all { // the first global one, if this node has any
		if addr := netip.MustParsePrefix(a.String()).Addr(); addr.IsGlobalUnicast() {
			tested = append(tested, addr)
			break
		}
	}
	for _, addr := range tested {
		name, global, err := interfaceOf(addr)
		if err != nil || (name == "lo") != addr.IsLoopback() {
			t.Errorf("%v: interface %q, %v", addr, name, err)
		}
		if slices.Contains(global, addr) != addr.IsGlobalUnicast() {
			t.Errorf("%v: global addresses %v", addr, global)
		}
	}
	if _, _, err := interfaceOf(netip.MustParseAddr("::1%none0")); err == nil {
		t.Error("an address was found on an interface that does not exist")
	}
}
