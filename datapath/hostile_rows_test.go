package datapath

import (
	"errors"
	"net/netip"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

func init() { rows = append(rows, hostileRows...) }

// hostileRows has packets that an attacker may send.
var hostileRows = []row{
	{name: "from a VIP to itself, UDP", state: dns, in: from(udp, "vip", 80),
		did: "dropped", reason: "source_is_local"},
	{name: "from a VIP to itself, TCP", state: web, in: from(tcp(dptest.SYN), "vip", 80),
		did: "dropped", reason: "source_is_local"},
	{name: "from another VIP", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.Name, s.VIPs = "other", []netip.Addr{fx.addr("elsewhere")} }, "b1")
		dns(fx)
	}, in: from(udp, "elsewhere", 80), did: "dropped", reason: "source_is_local"},
	{name: "from this node", state: web, in: from(tcp(dptest.SYN), "self", 40000),
		did: "dropped", reason: "source_is_local"},
	{name: "from this node, dsr", state: dsr, in: from(tcp(dptest.SYN), "self", 40000),
		did: "dropped", reason: "source_is_local"},
	{name: "from another address of this node, gue", state: gue, in: from(tcp(dptest.SYN), "loopback", 40000),
		did: "dropped", reason: "source_is_local"},
	{name: "from this node, no flow", state: web, in: from(tcp(dptest.ACK), "self", 40000),
		did: "dropped", reason: "source_is_local"},
	{name: "ping from a VIP", state: web, in: from(icmp(8, 128), "vip", 0), did: "dropped", reason: "source_is_local"},
	{name: "no such port, from a VIP", state: web, in: from(udp, "vip", 7), did: "dropped", reason: "source_is_local"},

	{name: "from the unspecified address", state: web, in: martian("0.0.0.0", "::"),
		did: "dropped", reason: "malformed"},
	{name: "from the loopback address", state: web, in: martian("127.0.0.1", "::1"),
		did: "dropped", reason: "malformed"},
	{name: "from a multicast address", state: web, in: martian("224.0.0.1", "ff02::1"),
		did: "dropped", reason: "malformed"},
	{name: "from the broadcast address", state: web, in: martian("255.255.255.255", "::7f00:1"),
		did: "dropped", reason: "malformed"},
	{name: "from a mapped address", state: web, in: martian("127.1.2.3", "::ffff:192.0.2.100"),
		did: "dropped", reason: "malformed"},

	{name: "decapsulated for a VIP that this node both has and balances", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.VIPs = []netip.Addr{fx.addr("loopback")} }, "b1", "b2")
	}, in: tunnelFrom("router"), did: "passed", reason: "decapsulated", check: decapsulated, option: acceptTunnels},
	{name: "decapsulated for a VIP that this node only balances", state: web, in: tunnelFor("vip", "router"),
		did: "dropped", reason: "decap_not_local", option: acceptTunnels},

	{name: "decapsulated for an address of an uplink", state: web, in: tunnelFor("self", "router"),
		did: "dropped", reason: "decap_not_local", option: acceptTunnels},
	{name: "decapsulated for a VIP that is an address of an uplink", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.VIPs = []netip.Addr{fx.addr("self")} }, "b1", "b2")
	}, in: tunnelFor("self", "router"), did: "dropped", reason: "decap_not_local", option: acceptTunnels},
	{name: "decapsulated for an address of lo and of an uplink", state: func(fx *fixture) {
		web(fx)
		fx.do(func() error {
			return errors.Join(fx.host.AddAddress("lo", hostPrefix(fx.addr("self").String())), fx.d.tunnels.Refresh())
		})
	}, in: tunnelFor("self", "router"), did: "dropped", reason: "decap_not_local", option: acceptTunnels, alone: true},

	{name: "decapsulated for the address of this node, which only lo has", state: web,
		in: tunnelFor("loopback", "router"), did: "dropped", reason: "decap_not_local", option: func(o *Options) {
			acceptTunnels(o)
			o.Own = []netip.Addr{netip.MustParseAddr("203.0.113.50"), netip.MustParseAddr("2001:db8:1::50")}
		}},

	{name: "decapsulated for an IPv4-mapped address of lo", state: web, in: tunnelForMapped,
		did: "dropped", reason: "decap_not_local", option: acceptTunnels},

	{name: "congestion in the tunnel", state: web, in: congested("loopback", 0xa9, 0xab), did: "passed",
		reason: "decapsulated", check: hasTOS(0xab), option: acceptTunnels},
	{name: "congestion in the tunnel and before", state: web, in: congested("loopback", 3, 3), did: "passed",
		reason: "decapsulated", check: hasTOS(3), option: acceptTunnels},
	{name: "no congestion in the tunnel, but before", state: web, in: congested("loopback", 3, 2), did: "passed",
		reason: "decapsulated", check: hasTOS(3), option: acceptTunnels},
	{name: "congestion in the tunnel, and no ECN inside", state: web, in: congested("loopback", 0xa8, 0xab),
		did: "dropped", reason: "congestion_not_ect", option: acceptTunnels},
}

// congested is a tunnel packet with these traffic classes, inner and outer.
func congested(to string, inside, outside uint8) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		inner := fx.fromClient(dptest.TCP, dptest.SYN)
		inner.Dst, inner.TOS = fx.at(to, 80), inside
		return dptest.Packet{Src: fx.at("router", 50000), Dst: fx.at("self", 6090), Proto: dptest.UDP, TOS: outside,
			Payload: dptest.GUE(inner)}
	}
}

func hasTOS(want uint8) checkFunc {
	return func(_ *fixture, _, out dptest.Packet) error {
		return wrong(out.TOS != want, "traffic class %#x; want %#x", out.TOS, want)
	}
}

// from is a packet with another source.
func from(in func(*fixture) dptest.Packet, name string, port uint16) func(*fixture) dptest.Packet {
	return change(in, func(fx *fixture, p *dptest.Packet) { p.Src = fx.at(name, port) })
}

// martian is a SYN from an address that is never on the wire.
func martian(v4, v6 string) func(*fixture) dptest.Packet {
	return change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) {
		a := netip.MustParseAddr(v4)
		if fx.v6 {
			a = netip.MustParseAddr(v6)
		}
		p.Src = netip.AddrPortFrom(a, 40000)
	})
}
