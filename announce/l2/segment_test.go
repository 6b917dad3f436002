package l2

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// exchange sends frames from the neighbour, and returns the frames from us that it has received after the last one was
// answered or a while.
func (n *neighbour) exchange(etherType int, frames ...[]byte) (answers [][]byte) {
	n.t.Helper()
	ours := ourMAC(n.t)
	must.Do(n.t, n.do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		c, err := packet.Listen(ifi, packet.Raw, etherType, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		for _, f := range frames {
			if _, err := c.WriteTo(f, &packet.Addr{HardwareAddr: f[:6]}); err != nil {
				return err
			}
		}
		if err := c.SetReadDeadline(time.Now().Add(replyTimeout)); err != nil {
			return err
		}
		for {
			b := make([]byte, 2000)
			size, _, err := c.ReadFrom(b)
			if err != nil {
				return nil // the time is over
			}
			advertised := size >= 78 && b[54] == icmpAdvertise && string(b[62:78]) == string(vip6.AsSlice())
			if (advertised || etherType == unix.ETH_P_ARP) && string(b[6:12]) == string(ours) {
				answers = append(answers, b[:size])
			}
		}
	}))
	return answers
}

// request is the frame of an ARP request for vip4, with VLAN tags.
func (n *neighbour) request(to net.HardwareAddr, vlans ...uint16) []byte {
	from := n.link.Attrs().HardwareAddr
	p, err := arp.NewPacket(arp.OperationRequest, from, netip.MustParseAddr("192.0.2.1"), make([]byte, 6), vip4)
	must.Do(n.t, err)
	payload := must.Get(p.MarshalBinary())(n.t)
	frame := append(append([]byte{}, to...), from...)
	for _, id := range vlans {
		frame = append(frame, 0x81, 0, byte(id>>8), byte(id))
	}
	return append(append(frame, 8, 6), payload...)
}

// solicit is the frame of a solicitation for vip6.
func (n *neighbour) solicit(from, to netip.Addr, mac net.HardwareAddr) []byte {
	b, err := neighbourFrame(&ndp.NeighborSolicitation{TargetAddress: vip6}, n.link.Attrs().HardwareAddr, mac, from, to)
	must.Do(n.t, err)
	return b
}

// Only what is for this host is answered: not the request of a VLAN that has no interface here, to which the reply
// would go without the tag, and not unicast to another MAC address that a promiscuous interface receives.
func TestFramesForOthers(t *testing.T) {
	n := newNeighbour(t)
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.SetPromiscOn(ours))
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	until(t, "replies", func() bool { return n.resolve(vip4) != nil && n.resolve(vip6) != nil })
	time.Sleep(100 * time.Millisecond) // gratuitous frames
	group := must.Get(ndp.SolicitedNodeMulticast(vip6))(t)
	global := netip.MustParseAddr("2001:db8::1")
	for _, tt := range []struct {
		name      string
		etherType int
		frame     []byte
		answers   int
	}{
		{"broadcast", unix.ETH_P_ARP, n.request(ethernet.Broadcast), 1},
		{"unicast", unix.ETH_P_ARP, n.request(ourMAC(t)), 1},
		{"unicast to another host", unix.ETH_P_ARP, n.request(otherMAC), 0},
		{"priority tag", unix.ETH_P_ARP, n.request(ethernet.Broadcast, 0), 1},
		{"VLAN without an interface", unix.ETH_P_ARP, n.request(ethernet.Broadcast, 7), 0},
		{"multicast", unix.ETH_P_IPV6, n.solicit(global, group, multicastMAC(group)), 1},
		{"unicast by NDP", unix.ETH_P_IPV6, n.solicit(global, vip6, ourMAC(t)), 1},
		{"unicast by NDP to another host", unix.ETH_P_IPV6, n.solicit(global, vip6, otherMAC), 0},
		// No route leads to this host. Its MAC address is known.
		{"a host of another prefix", unix.ETH_P_IPV6,
			n.solicit(netip.MustParseAddr("2001:db8:77::1"), group, multicastMAC(group)), 1},
	} {
		if got := n.exchange(tt.etherType, tt.frame); len(got) != tt.answers {
			t.Errorf("%s: %d answers; want %d", tt.name, len(got), tt.answers)
		} else if tt.answers > 0 && string(got[0][:6]) != string(n.link.Attrs().HardwareAddr) {
			t.Errorf("%s: answered to %x", tt.name, got[0][:6])
		}
	}
}

// Interfaces of one family only, and an IPv6 interface without a link-local address, serve VIPs.
func TestInterfacesOfOneFamily(t *testing.T) {
	n := newNeighbour(t)
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	all := must.Get(netlink.AddrList(ours, netlink.FAMILY_ALL))(t)
	remove := func(match func(netlink.Addr) bool) {
		for _, a := range all {
			if match(a) {
				must.Do(t, netlink.AddrDel(ours, &a))
			}
		}
	}
	remove(func(a netlink.Addr) bool { return a.IP.To4() != nil })
	check := func(name string) {
		a := newAnnouncer(t, &lines{}, "eth0")
		must.Run(t, a.Run)
		set(t, a, vip4, vip6)
		until(t, name, func() bool { return n.resolve(vip4) != nil && n.resolve(vip6) != nil })
		set(t, a)
	}
	check("replies without an IPv4 address")
	remove(func(a netlink.Addr) bool { return a.IP.IsLinkLocalUnicast() })
	check("replies without a link-local address")
}

// A socket holds a limited number of multicast groups; of more VIPs, all are reported to switches nevertheless.
func TestManyGroups(t *testing.T) {
	newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	a.o.Repeat = []time.Duration{}
	must.Run(t, a.Run)
	until(t, "sockets", func() bool { return a.responders[0].isOpen() })
	var many []netip.Addr
	const count = 6000
	for i := range count {
		many = append(many, netip.MustParseAddr(fmt.Sprintf("2001:db8:9::%x:%x", i>>12, i&0xfff|0x1000)))
	}
	groups := map[netip.Addr]bool{}
	for _, vip := range many {
		g, _ := ndp.SolicitedNodeMulticast(vip)
		groups[g] = true
	}
	joined := func() int {
		text := must.Get(os.ReadFile("/proc/thread-self/net/igmp6"))(t)
		return strings.Count(string(text), " ff0200000000000000000001ff")
	}
	before := joined()
	set(t, a, many...)
	if got := joined() - before; got != len(groups) {
		t.Errorf("%d groups joined; want %d", got, len(groups))
	}
	set(t, a)
	if got := joined() - before; got != 0 {
		t.Errorf("%d groups left over", got)
	}
}

// Of two interfaces in one segment, the first one replies.
func TestTwoInterfacesInOneSegment(t *testing.T) {
	n := newNeighbour(t)
	// The neighbour bridges its end with that of a second interface of ours.
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br0"
	must.Do(t, n.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	bridge := must.Get(n.nl.LinkByName("br0"))(t)
	attrs = netlink.NewLinkAttrs()
	attrs.Name = "eth1"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth1", PeerNamespace: netlink.NsFd(int(n.ns))}
	must.Do(t, netlink.LinkAdd(veth))
	second := must.Get(netlink.LinkByName("eth1"))(t)
	t.Cleanup(func() { netlink.LinkDel(second) })
	peer := must.Get(n.nl.LinkByName("eth1"))(t)
	for _, l := range []netlink.Link{n.link, peer} {
		must.Do(t, n.nl.LinkSetMaster(l, bridge))
		must.Do(t, n.nl.LinkSetUp(l))
	}
	must.Do(t, n.nl.LinkSetUp(bridge))
	must.Do(t, netlink.LinkSetUp(second))
	must.Do(t, n.nl.AddrDel(n.link, address(t, addresses[0])))
	must.Do(t, n.nl.AddrAdd(bridge, address(t, addresses[0])))
	n.link = bridge

	log := &lines{}
	a := newAnnouncer(t, log, "eth0", "eth1")
	must.Run(t, a.Run)
	until(t, "sockets", func() bool { return a.responders[0].isOpen() && a.responders[1].isOpen() })
	set(t, a, vip4)
	until(t, "the second interface is silent", func() bool { return log.count("in the same segment") == 1 })
	counter := func(name string) float64 { return testutil.ToFloat64(a.metrics.replies.WithLabelValues(name)) }
	before := counter("eth1")
	for range 5 {
		until(t, "a reply", func() bool { return n.resolve(vip4).String() == ourMAC(t).String() })
	}
	if counter("eth1") != before || counter("eth0") < 5 {
		t.Errorf("%v replies on eth1, %v on eth0", counter("eth1"), counter("eth0"))
	}
	// When the first one fails, the second one replies.
	first := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetDown(first))
	until(t, "a reply of the second interface", func() bool {
		return n.resolve(vip4).String() == second.Attrs().HardwareAddr.String()
	})
}

// A frame with the MAC address of another interface of this node, which any host can send, silences no interface.
func TestForgedOwnAddress(t *testing.T) {
	n := newNeighbour(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "other0"
	must.Do(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "other1"}))
	other := must.Get(netlink.LinkByName("other0"))(t)
	t.Cleanup(func() { netlink.LinkDel(other) })
	peer := must.Get(netlink.LinkByName("other1"))(t)
	must.Do(t, netlink.LinkSetUp(other))
	must.Do(t, netlink.LinkSetUp(peer))

	log := &lines{}
	a := newAnnouncer(t, log, "other0", "eth0")
	must.Run(t, a.Run)
	until(t, "sockets", func() bool { return a.responders[0].isOpen() && a.responders[1].isOpen() })
	set(t, a, vip4)
	until(t, "a reply", func() bool { return n.resolve(vip4) != nil })
	p := must.Get(arp.NewPacket(arp.OperationReply, other.Attrs().HardwareAddr, netip.MustParseAddr("192.0.2.1"),
		ourMAC(t), netip.MustParseAddr("192.0.2.1")))(t)
	payload := must.Get(p.MarshalBinary())(t)
	frame := append(append(append([]byte{}, ethernet.Broadcast...), n.link.Attrs().HardwareAddr...), 8, 6)
	n.exchange(unix.ETH_P_ARP, append(frame, payload...), append(frame, payload...))
	if got := n.exchange(unix.ETH_P_ARP, n.request(ethernet.Broadcast)); len(got) != 1 {
		t.Errorf("%d answers after a forged frame, %d warnings", len(got), log.count("in the same segment"))
	}
}
