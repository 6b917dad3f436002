package packets

import (
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
)

const (
	hookXDP, hookTC = "XDP", "tc"
	flows64k        = 1 << 16
	flows1M         = 1 << 20
)

// Loads, by the flows to which packets belong.
const (
	load1   = "1 flow"
	load64k = "64k flows"
	load1M  = "1M flows"
	loadSYN = "new SYN"
	loadUDP = "UDP, 64k flows"
)

// Loads are the table's columns.
var Loads = []string{load1, load64k, load1M, loadSYN, loadUDP}

var (
	knownTCP = []string{load1, load64k, load1M}
	known    = []string{load1, load64k, load1M, loadUDP}
	all      = Loads
)

// path is a packet's path through the datapath.
type path struct {
	name     string
	node     string // "" for none
	hook     string
	program  func(*node) *ebpf.Program
	loads    []string
	frame    func(proto uint8) dptest.Packet
	ipAt     int
	vary     vary
	services int
	// The expected result, and the addresses of the sent packet. Some packets are checked before the measurement. Zero
	// values accept anything.
	want     uint32
	from, to netip.Prefix
}

func xdp(n *node) *ebpf.Program   { return n.xdp }
func tcIn(n *node) *ebpf.Program  { return n.tcIn }
func tcOut(n *node) *ebpf.Program { return n.tcOut }

// toVIP returns a client's packet. The wrapper program replaces its source.
func toVIP(vip netip.Addr, proto uint8) dptest.Packet {
	p := dptest.Packet{Src: netip.MustParseAddrPort("10.0.0.0:1024"), Dst: netip.AddrPortFrom(vip, 80), Proto: proto,
		DF: true}
	if vip.Is6() {
		p.Src = netip.MustParseAddrPort("[2001:db8:9::1]:1024")
	}
	return p
}

func clientTo(vip netip.Addr) func(uint8) dptest.Packet {
	return func(proto uint8) dptest.Packet { return toVIP(vip, proto) }
}

// fromServer returns a server's packet. The wrapper program replaces its addresses.
func fromServer(proto uint8) dptest.Packet {
	return dptest.Packet{Src: netip.AddrPortFrom(server4(0), 80), Dst: netip.AddrPortFrom(self4, 80), Proto: proto}
}

// tunnelled returns a packet that another node forwards to this one.
func tunnelled(proto uint8) dptest.Packet {
	inner := toVIP(vipLocal, proto)
	inner.Flags, inner.Payload = dptest.ACK, make([]byte, 2)
	return dptest.Packet{Src: netip.AddrPortFrom(server4(0), 50000), Dst: netip.AddrPortFrom(self4, 6090),
		Proto: dptest.UDP, Payload: dptest.GUE(inner)}
}

// Offsets of the first IP header, and of tunnelled's inner header.
const (
	outerAt = 14
	innerAt = outerAt + 20 + 8 + 4
)

func toThisNode(proto uint8) dptest.Packet {
	p := toVIP(self4, proto)
	p.Dst = netip.AddrPortFrom(self4, 22)
	return p
}

func fromThisNode(proto uint8) dptest.Packet {
	p := toThisNode(proto)
	p.Src, p.Dst = p.Dst, p.Src
	return p
}

var (
	onLink  = netip.MustParsePrefix("192.0.2.0/24")
	onLink6 = netip.MustParsePrefix("2001:db8::/64")
	clients = netip.MustParsePrefix("10.0.0.0/12")
	pods    = netip.MustParsePrefix("10.244.0.0/16")
	vips    = netip.MustParsePrefix("100.64.0.0/10")
)

// paths are the table's rows.
var paths = []path{
	{name: "ipip", node: nodeEdge, hook: hookXDP, program: xdp, loads: all, frame: clientTo(vipIPIP),
		vary: varyClient, want: xdpTX, to: onLink},
	{name: "ipip, IPv6", node: nodeEdge, hook: hookXDP, program: xdp, loads: known, frame: clientTo(vip6),
		vary: varyClient, want: xdpTX, to: onLink6},
	{name: "gue", node: nodeEdge, hook: hookXDP, program: xdp, loads: all, frame: clientTo(vipGUE),
		vary: varyClient, want: xdpTX, to: onLink},
	{name: "dsr", node: nodeEdge, hook: hookXDP, program: xdp, loads: all, frame: clientTo(vipDSR),
		vary: varyClient, want: xdpTX, to: vips},
	{name: "spread", node: nodeKubernetes, hook: hookXDP, program: xdp, loads: all, frame: clientTo(vipSpread),
		vary: varyClient, want: xdpTX, to: onLink},
	{name: "nat", node: nodeEdge, hook: hookXDP, program: xdp, loads: known, frame: clientTo(vipNAT),
		vary: varyClient, want: xdpTX, to: onLink},
	{name: "nat, reply", node: nodeEdge, hook: hookXDP, program: xdp, loads: known, frame: fromServer,
		vary: varyRecorded, want: xdpTX, to: clients},
	{name: "nat, no established flows", node: nodeNew, hook: hookXDP, program: xdp, loads: []string{loadSYN},
		frame: clientTo(vipNAT), vary: varyClient, want: xdpTX, to: onLink},
	{name: "nat, ports exhausted", node: nodeNew, hook: hookXDP, program: xdp, loads: []string{loadSYN},
		frame: clientTo(vipFull), vary: varyClient},
	{name: "nat, tc", node: nodeEdge, hook: hookTC, program: tcIn, loads: known, frame: clientTo(vipNAT),
		vary: varyClient, want: tcRedirect, to: onLink},
	{name: "delivery here, XDP part", node: nodeKubernetes, hook: hookXDP, program: xdp, loads: all,
		frame: clientTo(vipLocal), vary: varyClient, want: xdpPass, to: vips},
	{name: "delivery here, tc part", node: nodeKubernetes, hook: hookTC, program: tcIn, loads: known,
		frame: clientTo(vipLocal), vary: varyClient, want: tcUnspec, to: pods},
	{name: "tunnel to a pod, tc", node: nodeKubernetes, hook: hookTC, program: tcIn, loads: knownTCP,
		frame: tunnelled, ipAt: innerAt, vary: varyClient, want: tcUnspec, to: pods},
	{name: "answer of a pod, tc out", node: nodeKubernetes, hook: hookTC, program: tcOut, loads: known,
		frame: fromServer, vary: varyRecorded, want: tcUnspec, from: vips, to: clients},
	{name: "foreign in, XDP", node: nodeKubernetes, hook: hookXDP, program: xdp, loads: all, frame: toThisNode,
		vary: varyClient, want: xdpPass, to: onLink},
	{name: "foreign in, tc", node: nodeKubernetes, hook: hookTC, program: tcIn, loads: all, frame: toThisNode,
		vary: varyClient, want: tcUnspec, to: onLink},
	{name: "foreign out, tc", node: nodeKubernetes, hook: hookTC, program: tcOut, loads: all, frame: fromThisNode,
		vary: varyServer, want: tcUnspec, from: onLink, to: clients},
	{name: "ipip, 100 services", node: nodeEdge + "100", hook: hookXDP, program: xdp, loads: []string{load64k},
		frame: clientTo(vipIPIP), vary: varyClient, services: 100, want: xdpTX, to: onLink},
	{name: "ipip, 10,000 services", node: nodeEdge + "10000", hook: hookXDP, program: xdp, loads: []string{load64k},
		frame: clientTo(vipIPIP), vary: varyClient, services: 10_000, want: xdpTX, to: onLink},
	{name: "nat, 100 services", node: nodeEdge + "100", hook: hookXDP, program: xdp, loads: []string{load64k},
		frame: clientTo(vipNAT), vary: varyClient, services: 100, want: xdpTX, to: onLink},
	{name: "nat, 10,000 services", node: nodeEdge + "10000", hook: hookXDP, program: xdp, loads: []string{load64k},
		frame: clientTo(vipNAT), vary: varyClient, services: 10_000, want: xdpTX, to: onLink},
	{name: "spread, 100 services", node: nodeKubernetes + "100", hook: hookXDP, program: xdp,
		loads: []string{load64k}, frame: clientTo(vipSpread), vary: varyClient, services: 100, want: xdpTX, to: onLink},
	{name: "spread, 10,000 services", node: nodeKubernetes + "10000", hook: hookXDP, program: xdp,
		loads: []string{load64k}, frame: clientTo(vipSpread), vary: varyClient, services: 10_000, want: xdpTX,
		to: onLink},
}
