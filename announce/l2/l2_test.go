package l2

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/steelyard-lb/steelyard/announce/announcetest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var (
	vip4, vip6 = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	vips       = []netip.Addr{vip4, vip6, netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::1:10")}
)

// lines is a log that tests can read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

func TestConformance(t *testing.T) {
	announcetest.Run(t, func(t *testing.T) *announcetest.Bench {
		n, log := newNeighbour(t), &lines{}
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of the announcer:\n%s", &log.b)
			}
		})
		return &announcetest.Bench{
			Announcer: newAnnouncer(t, log, "eth0"), VIPs: vips, Bad: netip.MustParseAddr("224.0.0.1"),
			Seen: func() []netip.Addr { return slices.Collect(maps.Keys(n.resolveAll(vips))) },
		}
	})
}

// Gratuitous frames update existing neighbour entries. The neighbour has another MAC address and sends no request.
func TestGratuitousFramesUpdateEntries(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	for _, v := range []netip.Addr{vip4, vip6} {
		must.Do(t, n.nl.NeighSet(&netlink.Neigh{LinkIndex: n.link.Attrs().Index, IP: v.AsSlice(),
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 77}, State: netlink.NUD_STALE}))
	}
	set(t, a, vip4, vip6)
	for _, v := range []netip.Addr{vip4, vip6} {
		until(t, "an updated neighbour entry", func() bool {
			e := n.entry(v)
			return e != nil && bytes.Equal(e.HardwareAddr, ourMAC(t))
		})
	}
	// For each VIP, once at Set, once per repeat, and again if the interface comes up at that moment.
	until(t, "the repeated frames", func() bool {
		return testutil.ToFloat64(a.metrics.gratuitous.WithLabelValues("eth0")) >= 4
	})
}

// A renamed interface is still served, even if it was down in between or gets its old name back.
func TestRenamedInterface(t *testing.T) {
	n := newNeighbour(t)
	log := &lines{}
	a := newAnnouncer(t, log, "eth0")
	var asked atomic.Value // name asked for
	a.Require(func(name string) bool { asked.Store(name); return true })
	must.Run(t, a.Run)
	set(t, a, vip4)
	until(t, "a reply", func() bool { return n.resolve(vip4) != nil })
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetName(ours, "up0"))
	t.Cleanup(func() { netlink.LinkSetName(ours, "eth0") })
	until(t, "the programs of up0 are asked for", func() bool { return asked.Load() == "up0" })
	must.True(t, n.resolve(vip4) != nil && a.usable() && log.count("not served") == 0,
		"no reply by the new name: %v", log)
	must.Do(t, netlink.LinkSetDown(ours))
	until(t, "no reply while it is down", func() bool { return !a.usable() })
	must.Do(t, netlink.LinkSetUp(ours))
	until(t, "a reply again", func() bool { return n.resolve(vip4) != nil })
	must.Do(t, netlink.LinkSetName(ours, "eth0"))
	until(t, "the programs of eth0 are asked for", func() bool { return asked.Load() == "eth0" })
	must.True(t, n.resolve(vip4) != nil, "no reply by the first name")
}

// An interface that was deleted and created again has another index and MAC address. A missing one does not delay
// others.
func TestInterfacesChange(t *testing.T) {
	n := newNeighbour(t)
	log := &lines{}
	a := newAnnouncer(t, log, "missing0", "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	n.resolves("VIPs", vip4, vip6)
	before := ourMAC(t)
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetDown(ours))
	must.Do(t, netlink.LinkSetUp(ours))
	n.resolves("after down and up, VIPs", vip4, vip6)
	must.Do(t, netlink.LinkDel(ours))
	n.connect("eth0")
	until(t, "replies with the new MAC", func() bool {
		mac := n.resolve(vip4)
		return bytes.Equal(mac, ourMAC(t)) && !bytes.Equal(mac, before) && bytes.Equal(n.resolve(vip6), ourMAC(t))
	})
	must.True(t, log.count("missing0") > 0, "the missing interface is not in the log")
}

// Duplicate address detection solicits from the unspecified address (RFC 4862 §5.4), so the reply goes to all nodes.
func TestDuplicateAddressDetectionFails(t *testing.T) {
	n := newNeighbour(t)
	n.announced(&lines{}, vip6)
	addr := must.Get(netlink.ParseAddr(vip6.String() + "/64"))(t)
	must.Do(t, n.nl.AddrAdd(n.link, addr)) // with duplicate address detection
	until(t, "the kernel of the neighbour to find the duplicate", func() bool {
		all := must.Get(n.nl.AddrList(n.link, netlink.FAMILY_V6))(t)
		return slices.ContainsFunc(all, func(x netlink.Addr) bool {
			return x.IP.Equal(vip6.AsSlice()) && x.Flags&unix.IFA_F_DADFAILED != 0
		})
	})
}

// exchange sends frames from the neighbour. It returns our frames that the neighbour received until the last one was
// answered, or for a moment.
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
				return nil // timeout
			}
			advertised := size >= 78 && b[54] == icmpAdvertise && string(b[62:78]) == string(vip6.AsSlice())
			if (advertised || etherType == unix.ETH_P_ARP) && string(b[6:12]) == string(ours) {
				answers = append(answers, b[:size])
			}
		}
	}))
	return answers
}

// request returns an ARP request for vip4 with VLAN tags.
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

// solicit returns a solicitation for vip6.
func (n *neighbour) solicit(from, to netip.Addr, mac net.HardwareAddr) []byte {
	b, err := neighbourFrame(&ndp.NeighborSolicitation{TargetAddress: vip6}, n.link.Attrs().HardwareAddr, mac, from, to)
	must.Do(n.t, err)
	return b
}

// Malformed frames are ignored and end nothing. Frames for others receive no reply: a request in a VLAN without an
// interface here, to which the reply would lack the tag, and unicast to another MAC address that a promiscuous
// interface receives.
func TestFramesForOthers(t *testing.T) {
	n := newNeighbour(t)
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.SetPromiscOn(ours))
	n.announced(&lines{}, vip4, vip6)
	time.Sleep(100 * time.Millisecond) // skip gratuitous frames
	group := must.Get(ndp.SolicitedNodeMulticast(vip6))(t)
	global := netip.MustParseAddr("2001:db8::1")
	sizes, length, sum := n.request(ethernet.Broadcast), n.solicit(global, group, multicastMAC(group)),
		n.solicit(global, group, multicastMAC(group))
	sizes[18], sizes[19] = 200, 200     // sizes of the addresses
	length[18], length[19] = 0xff, 0xff // payload length
	sum[56]++
	for _, tt := range []struct {
		name      string
		etherType int
		frame     []byte
		answers   int
	}{
		{"addresses of 200 bytes", unix.ETH_P_ARP, sizes, 0},
		{"cut off", unix.ETH_P_ARP, sizes[:15], 0},
		{"a length of 65535", unix.ETH_P_IPV6, length, 0},
		{"a wrong checksum", unix.ETH_P_IPV6, sum, 0},
		{"broadcast", unix.ETH_P_ARP, n.request(ethernet.Broadcast), 1},
		{"unicast", unix.ETH_P_ARP, n.request(ourMAC(t)), 1},
		{"unicast to another host", unix.ETH_P_ARP, n.request(otherMAC), 0},
		{"priority tag", unix.ETH_P_ARP, n.request(ethernet.Broadcast, 0), 1},
		{"VLAN without an interface", unix.ETH_P_ARP, n.request(ethernet.Broadcast, 7), 0},
		{"multicast", unix.ETH_P_IPV6, n.solicit(global, group, multicastMAC(group)), 1},
		{"unicast by NDP", unix.ETH_P_IPV6, n.solicit(global, vip6, ourMAC(t)), 1},
		{"unicast by NDP to another host", unix.ETH_P_IPV6, n.solicit(global, vip6, otherMAC), 0},
		// This host has no route, but its MAC address is known.
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

// Interfaces with only one family, and an IPv6 interface without a link-local address, serve VIPs.
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
	check := func() { set(t, n.announced(&lines{}, vip4, vip6)) }
	check()
	remove(func(a netlink.Addr) bool { return a.IP.IsLinkLocalUnicast() })
	check()
}

// A socket has a limited number of multicast groups. With more VIPs, the kernel still reports all of them to switches.
func TestManyGroups(t *testing.T) {
	newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	a.o.Repeat = []time.Duration{}
	must.Run(t, a.Run)
	until(t, "sockets", func() bool { return a.responders[0].isOpen() })
	var many []netip.Addr
	const count = 4000 // a socket has about 2,000
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
	must.Row(t, "groups joined", len(groups), joined()-before)
	set(t, a)
	must.Row(t, "groups left over", 0, joined()-before)
}

// If two interfaces are in one segment, the first one replies.
func TestTwoInterfacesInOneSegment(t *testing.T) {
	n := newNeighbour(t)
	// A bridge at the neighbour connects both of our interfaces.
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
	must.True(t, counter("eth1") == before && counter("eth0") >= 5,
		"%v replies on eth1, %v on eth0", counter("eth1"), counter("eth0"))
	// If the first interface fails, the second one replies.
	first := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetDown(first))
	until(t, "a reply of the second interface", func() bool {
		return n.resolve(vip4).String() == second.Attrs().HardwareAddr.String()
	})
}

// Any host can send a frame with the MAC address of another interface of this node. It does not silence an interface.
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
	must.Row(t, "answers after a forged frame", 1, len(n.exchange(unix.ETH_P_ARP, n.request(ethernet.Broadcast))))
}
