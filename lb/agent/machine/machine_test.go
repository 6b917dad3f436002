package machine

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func address(t *testing.T, link int, text string) netlink.Addr {
	t.Helper()
	ip, n, err := net.ParseCIDR(text)
	must.Do(t, err)
	return netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: n.Mask}, LinkIndex: link}
}

func network(t *testing.T) *Network {
	link := func(index int, name string) netlink.Link {
		return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index, Name: name}}
	}
	return New(
		[]netlink.Link{link(1, "lo"), link(2, "eth0"), link(3, ipvsDevice)},
		[]netlink.Addr{
			address(t, 1, "198.51.100.9/32"), address(t, 2, "192.0.2.11/24"), address(t, 2, "2001:db8::11/64"),
			address(t, 2, "10.0.0.0/31"), address(t, 2, "fe80::1/64"), address(t, 3, "203.0.113.10/32"),
		},
		[]netlink.Route{
			{Gw: net.ParseIP("192.0.2.1")}, {Gw: net.ParseIP("2001:db8::1")}, {Gw: net.ParseIP("192.0.2.11")},
			{MultiPath: []*netlink.NexthopInfo{{Gw: net.ParseIP("192.0.2.2")}}},
		},
	)
}

func TestTaken(t *testing.T) {
	n := network(t)
	for text, want := range map[string]string{
		"192.0.2.11": "the address of eth0", "2001:db8::11": "the address of eth0", "198.51.100.9": "the address of lo",
		"10.0.0.0": "the address of eth0", "10.0.0.1": "", // RFC 3021
		"192.0.2.0":   "the network address of 192.0.2.0/24 on eth0",
		"192.0.2.255": "the broadcast address of 192.0.2.0/24 on eth0",
		"192.0.2.1":   "the gateway of a route", "192.0.2.2": "the gateway of a route",
		"2001:db8::1": "the gateway of a route", "2001:db8::": "", "192.0.2.12": "",
		"203.0.113.10": "", // kube-proxy's
	} {
		must.Row(t, text+" is", want, n.Taken(netip.MustParseAddr(text)))
	}
	for text, want := range map[string]string{
		"192.0.2.11": "the address of eth0", "192.0.2.1": "", "192.0.2.12": "",
		"192.0.2.255": "the broadcast address of 192.0.2.0/24 on eth0",
	} {
		must.Row(t, fmt.Sprintf("no host: %s is", text), want, n.NoHost(netip.MustParseAddr(text)))
	}
	for text, want := range map[string]bool{
		"192.0.2.11": true, "fe80::1": true, "192.0.2.1": false, "192.0.2.12": false, "192.0.2.255": false,
	} {
		must.Row(t, text+" is an address of this machine", want, n.Own(netip.MustParseAddr(text)))
	}
	r := lb.AddrRange{From: netip.MustParseAddr("192.0.2.2"), To: netip.MustParseAddr("192.0.2.20")}
	a, what := n.TakenIn(r)
	must.True(t, a.String() == "192.0.2.2" && what == "the gateway of a route", "%s, %q", a, what)
	r.From = netip.MustParseAddr("192.0.2.12")
	a, what = n.TakenIn(r)
	must.True(t, what == "", "%s, %q", a, what)
}

func TestLinks(t *testing.T) {
	n := network(t)
	must.True(t, n.HasLink("eth0") && !n.HasLink("eth1"), "links")
	for text, want := range map[string]string{
		"192.0.2.200": "eth0", "2001:db8::7": "eth0", "198.51.100.9": "", "203.0.113.1": "", "fe80::2": "",
	} {
		must.Row(t, text+" is on", want, n.OnLink(netip.MustParseAddr(text)))
	}
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0", EncapType: "none"}}
	eth := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "eth0", EncapType: "ether"}}
	n = New([]netlink.Link{tun, eth}, nil, nil)
	is := n.NotEthernet("tun0")
	must.True(t, is == "none" && n.NotEthernet("eth0") == "" && n.NotEthernet("eth9") == "", "tun0 is %q", is)
	n = network(t)
	must.True(t, n.Equal(network(t)) && !n.Equal(nil) && !n.Equal(New(nil, nil, nil)), "Equal")
}

// Every host has the loopback interface.
func TestRead(t *testing.T) {
	n, err := Read()
	must.True(t, err == nil && n.HasLink("lo"), "%+v, %v", n, err)
}
