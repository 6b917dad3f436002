package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// row is one packet and its expected result in a given state. Each row runs on XDP and tc, both with explain, for IPv4
// and IPv6.
type row struct {
	name   string
	state  func(fx *fixture) // run before the packet
	in     func(fx *fixture) dptest.Packet
	did    string
	reason string
	check  checkFunc
	option func(*Options)
	alone  bool // it changes the node, or state that reset keeps
}

// checkFunc checks the packet that was sent for another one.
type checkFunc func(fx *fixture, in, out dptest.Packet) error

func tcp(flags uint8) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet { return fx.fromClient(dptest.TCP, flags) }
}

func udp(fx *fixture) dptest.Packet { return fx.fromClient(dptest.UDP, 0) }

func web(fx *fixture)      { fx.service(lb.TCP, "b1", "b2") }
func dns(fx *fixture)      { fx.service(lb.UDP, "b1", "b2") }
func noServer(fx *fixture) { fx.service(lb.TCP) }

// with returns a state in which these packets were run, and sent, after another state.
func with(state func(*fixture), packets ...func(*fixture) dptest.Packet) func(*fixture) {
	return func(fx *fixture) {
		fx.t.Helper()
		state(fx)
		for i, p := range packets {
			r := fx.run(p(fx).Frame())
			must.Need(fx.t, r.did == "sent", "packet %d of the preparation was %s: %s", i, r.did, r.reason)
		}
	}
}

func replies(flags uint8) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet { return fx.reply(flags) }
}

// established is a TCP connection, and answered a UDP flow with an answer.
var (
	established = with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK), tcp(dptest.ACK))
	answered    = with(dns, udp, replies(0), udp)
)

func sentOn(fx *fixture, in, out dptest.Packet) error {
	ok := out.Src.Addr() == fx.addr("self") && out.Src.Port() >= 61000 && out.Dst.Port() == 8080 &&
		(out.Dst.Addr() == fx.addr("b1") || out.Dst.Addr() == fx.addr("b2")) &&
		out.TTL == 63 && bytes.Equal(in.Payload, out.Payload) && in.Flags == out.Flags && in.Seq == out.Seq
	return wrong(!ok, "sent on as %+v", out)
}

func toClient(fx *fixture, in, out dptest.Packet) error {
	ok := out.Src == fx.at("vip", 80) && out.Dst == fx.at("client", 40000) && out.TTL == 63 &&
		bytes.Equal(in.Payload, out.Payload)
	return wrong(!ok, "sent back as %+v", out)
}

// aReset checks for the answer that RFC 9293, 3.10.7.1 requires for a segment without a connection.
func aReset(fx *fixture, in, out dptest.Packet) error {
	want := dptest.Packet{Src: in.Dst, Dst: in.Src, Proto: dptest.TCP, TTL: 64, Flags: dptest.RST}
	if in.Flags&dptest.ACK != 0 {
		want.Seq = in.Ack
	} else {
		want.Flags |= dptest.ACK
		want.Ack = in.Seq + uint32(len(in.Payload))
		if in.Flags&(dptest.SYN|dptest.FIN) != 0 {
			want.Ack++
		}
	}
	return wrong(out.Src != want.Src || out.Dst != want.Dst || out.Flags != want.Flags || out.Seq != want.Seq ||
		out.Ack != want.Ack || len(out.Payload) > 0, "answered with %+v; want %+v", out, want)
}

func unreachable(fx *fixture, in, out dptest.Packet) error {
	wantType, wantCode, frame := uint8(3), uint8(3), in.Frame()
	n := 20 + 8
	if fx.v6 {
		wantType, wantCode, n = 1, 4, 40+8
	}
	ok := out.Src.Addr() == in.Dst.Addr() && out.Dst.Addr() == in.Src.Addr() && out.Type == wantType &&
		out.Code == wantCode &&
		bytes.Equal(out.Payload, frame[14:14+n])
	return wrong(!ok, "answered with %+v", out)
}

func echoReply(fx *fixture, in, out dptest.Packet) error {
	wantType := uint8(0)
	if fx.v6 {
		wantType = 129
	}
	ok := out.Src.Addr() == in.Dst.Addr() && out.Dst.Addr() == in.Src.Addr() && out.Type == wantType &&
		bytes.Equal(out.Payload, in.Payload)
	return wrong(!ok, "answered with %+v", out)
}

func wrong(bad bool, format string, args ...any) error {
	if !bad {
		return nil
	}
	return fmt.Errorf(format, args...)
}

// icmp is an ICMP packet to the VIP with type t4 or, with IPv6, t6.
func icmp(t4, t6 uint8) func(fx *fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		p := dptest.Packet{Src: fx.at("client", 0), Dst: fx.at("vip", 0), Proto: dptest.ICMP, Type: t4,
			Payload: []byte("ping pong")}
		if fx.v6 {
			p.Proto, p.Type, p.Payload = dptest.ICMPv6, t6, make([]byte, 24)
		}
		return p
	}
}

func change(in func(*fixture) dptest.Packet, f func(fx *fixture, p *dptest.Packet)) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		p := in(fx)
		f(fx, &p)
		return p
	}
}

func init() { rows = append(rows, methodRows...) }

var rows = []row{
	{name: "to another host", state: web,
		in:  change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) { p.Dst = fx.at("elsewhere", 80) }),
		did: "passed", reason: "not_ours"},
	{name: "not TCP, to another host", state: web,
		in:  change(icmp(8, 128), func(fx *fixture, p *dptest.Packet) { p.Dst = fx.at("elsewhere", 0) }),
		did: "passed", reason: "not_ours"},
	{name: "SYN opens a flow", state: web, in: tcp(dptest.SYN), did: "sent", reason: "forwarded", check: sentOn},
	{name: "SYN with IP options", state: web,
		in:  change(tcp(dptest.SYN), func(_ *fixture, p *dptest.Packet) { p.Options = true }),
		did: "sent", reason: "forwarded", check: sentOn},
	{name: "SYN again keeps its port", state: with(web, tcp(dptest.SYN)), in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: samePort},
	{name: "SYN-ACK to the client", state: with(web, tcp(dptest.SYN)), in: replies(dptest.SYN | dptest.ACK),
		did: "sent", reason: "forwarded", check: toClient},
	{name: "the right ACK establishes", state: with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK)),
		in: tcp(dptest.ACK), did: "sent", reason: "forwarded", check: isEstablished},
	{name: "an ACK of another number does not", state: with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK)),
		in:  change(tcp(dptest.ACK), func(_ *fixture, p *dptest.Packet) { p.Ack = 77 }),
		did: "dropped", reason: "bad_ack"},
	{name: "an ACK before the server answered", state: with(web, tcp(dptest.SYN)), in: tcp(dptest.ACK),
		did: "dropped", reason: "bad_ack"},
	{name: "RST of the server with other numbers ends no handshake",
		state: with(web, tcp(dptest.SYN), resetBy(replies, 5001), replies(dptest.SYN|dptest.ACK), resetBy(replies, 77)),
		in:    tcp(dptest.ACK), did: "sent", reason: "forwarded", check: isEstablished},
	{name: "the server refuses the SYN", state: with(web, tcp(dptest.SYN),
		change(replies(dptest.RST|dptest.ACK), func(_ *fixture, p *dptest.Packet) { p.Ack = 1006 })),
		in: tcp(dptest.ACK), did: "sent", reason: "no_flow"},
	{name: "the server refuses after its SYN-ACK",
		state: with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK), resetBy(replies, 5001)),
		in:    tcp(dptest.ACK), did: "sent", reason: "no_flow"},
	{name: "data of a known flow", state: established, in: tcp(dptest.ACK | dptest.PSH),
		did: "sent", reason: "forwarded", check: samePort},
	{name: "answer of a known flow", state: established, in: replies(dptest.ACK),
		did: "sent", reason: "forwarded", check: toClient},
	{name: "FIN of both closes", state: with(established, tcp(dptest.FIN|dptest.ACK)),
		in: replies(dptest.FIN | dptest.ACK), did: "sent", reason: "forwarded", check: isClosed},
	{name: "RST of the server closes", state: established, in: resetBy(replies, 5001),
		did: "sent", reason: "forwarded", check: isClosed},
	{name: "RST of the client closes", state: established, in: resetBy(tcp, 1005),
		did: "sent", reason: "forwarded", check: isClosed},
	{name: "RST with another number in the window does not", state: established, in: resetBy(tcp, 1400),
		did: "sent", reason: "forwarded", check: isIn(bpf.FlowEstablished, 1)},
	{name: "a packet after such a RST", state: with(established, resetBy(tcp, 1400)), in: tcp(dptest.ACK),
		did: "sent", reason: "forwarded", check: isLive},
	{name: "a stray packet of the server after such a RST", state: with(established, resetBy(tcp, 1400)),
		in:  change(replies(dptest.ACK), func(_ *fixture, p *dptest.Packet) { p.Seq = 1 << 30 }),
		did: "sent", reason: "forwarded", check: isIn(bpf.FlowEstablished, 1)},
	{name: "RST outside the window does not", state: established, in: resetBy(tcp, 1<<30),
		did: "sent", reason: "forwarded", check: isLive},
	{name: "FIN outside the window does not close",
		in:  change(tcp(dptest.FIN|dptest.ACK), func(_ *fixture, p *dptest.Packet) { p.Seq = 1 << 30 }),
		did: "sent", state: with(established, replies(dptest.FIN|dptest.ACK)), reason: "forwarded",
		check: isIn(bpf.FlowClosing, 0)},
	{name: "SYN does not replace a live flow", state: established, in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: isLive},
	{name: "a new SYN from the port of a closed flow", state: with(established, resetBy(replies, 5001)),
		in: tcp(dptest.SYN), did: "sent", reason: "forwarded", check: otherFlow},
	{name: "ACK of no flow", state: web, in: tcp(dptest.ACK), did: "sent", reason: "no_flow", check: aReset},
	{name: "FIN without ACK, no flow", state: web, in: tcp(dptest.FIN), did: "sent", reason: "no_flow", check: aReset},
	{name: "RST of no flow", state: web, in: tcp(dptest.RST), did: "dropped", reason: "no_flow"},
	{name: "no backend, TCP", state: noServer, in: tcp(dptest.SYN), did: "sent", reason: "no_backend", check: aReset},
	{name: "no backend, UDP", state: func(fx *fixture) { fx.service(lb.UDP) }, in: udp,
		did: "sent", reason: "no_backend", check: unreachable},
	{name: "no such port, TCP", state: web,
		in:  change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) { p.Dst = fx.at("vip", 81) }),
		did: "sent", reason: "no_frontend", check: aReset},
	{name: "no such port, UDP", state: web, in: udp, did: "sent", reason: "no_frontend", check: unreachable},
	{name: "UDP opens a flow", state: dns, in: udp, did: "sent", reason: "forwarded", check: sentOn},
	{name: "UDP answer", state: with(dns, udp), in: replies(0), did: "sent", reason: "forwarded", check: toClient},
	{name: "UDP after an answer", state: with(dns, udp, replies(0)), in: udp,
		did: "sent", reason: "forwarded", check: isEstablished},
	{name: "UDP of a known flow", state: answered, in: udp, did: "sent", reason: "forwarded", check: samePort},
	{name: "ping", state: web, in: icmp(8, 128), did: "sent", reason: "echo_reply", check: echoReply},
	{name: "ping without a backend", state: noServer, in: icmp(8, 128), did: "dropped", reason: "vip_down"},
	{name: "other ICMP", state: web, in: icmp(13, 139), did: "dropped", reason: "unsupported_protocol"},
	{name: "other protocol", state: web, in: change(tcp(0), func(_ *fixture, p *dptest.Packet) { p.Proto = 47 }),
		did: "dropped", reason: "unsupported_protocol"},
	{name: "neighbour solicitation", state: web,
		in:  change(icmp(8, 135), func(_ *fixture, p *dptest.Packet) { p.TTL = 255 }),
		did: "passed", reason: "neighbour_discovery"},
	{name: "neighbour solicitation from beyond the link", state: web, in: icmp(13, 135),
		did: "dropped", reason: "unsupported_protocol"},
	{name: "fragment", state: web, in: change(udp, func(_ *fixture, p *dptest.Packet) { p.Fragment = true }),
		did: "dropped", reason: "fragment_not_found"},
	{name: "no backend on this node, and no other allowed",
		state: func(fx *fixture) { fx.serve(func(s *lb.Service) { s.Ports[0].DropWhenEmpty = bothFamilies }) },
		in:    tcp(dptest.SYN), did: "dropped", reason: "no_local_backend"},
	{name: "TTL expires", state: web, in: change(tcp(dptest.SYN), func(_ *fixture, p *dptest.Packet) { p.TTL = 1 }),
		did: "dropped", reason: "ttl_expired"},
	{name: "no route to the backend", state: func(fx *fixture) { fx.service(lb.TCP, "unrouted") },
		in: tcp(dptest.SYN), did: "sent", reason: "no_route", check: aReset},
	{name: "no route to the backend, UDP", state: func(fx *fixture) { fx.service(lb.UDP, "unrouted") },
		in: udp, did: "dropped", reason: "no_route"},
	{name: "forwarding was switched off", state: func(fx *fixture) { web(fx); fx.stopForwarding() },
		in: tcp(dptest.SYN), did: "dropped", reason: "no_forwarding", alone: true},
	{name: "larger than the MTU", state: func(fx *fixture) { web(fx); fx.shrinkMTU(1280) },
		in:  change(tcp(dptest.SYN), func(_ *fixture, p *dptest.Packet) { p.Payload = make([]byte, 1300) }),
		did: "sent", reason: "too_big", check: tooBig(1280), alone: true},
	{name: "flow table full", state: with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK), fill),
		in: tcp(dptest.ACK), did: "sent", reason: "flows_full", check: aReset,
		option: func(o *Options) { o.MaxFlows = 1 }},
	{name: "share of UDP flows used up", state: with(dns, udp),
		in:  change(udp, func(fx *fixture, p *dptest.Packet) { p.Src = fx.at("client", 40001) }),
		did: "dropped", reason: "udp_share_full", option: func(o *Options) { o.MaxFlows = 4 }, alone: true},
	{name: "source ports used up",
		state: func(fx *fixture) { fx.service(lb.TCP, "b1"); connect(fx) },
		in:    change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) { p.Src = fx.at("client", 40001) }),
		did:   "sent", reason: "snat_exhausted", check: aReset,
		option: func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} }},
}

func samePort(fx *fixture, in, out dptest.Packet) error {
	flows := fx.flows().servers
	for k, f := range flows {
		if bpf.Swap(f.Client.Sport) == in.Src.Port() && bpf.Swap(k.Dport) == out.Src.Port() {
			return wrong(len(flows) != 1, "%d flows; want 1", len(flows))
		}
	}
	return fmt.Errorf("sent from %s, which is in no flow", out.Src)
}

// otherFlow checks that the packet opened a flow beside the ended one, whose port rests.
func otherFlow(fx *fixture, in, out dptest.Packet) error {
	if half := fx.flowsIn(fx.d.objects.FlowTables()[0]); len(half.servers) != 1 {
		return fmt.Errorf("%d half-open flows; want 1", len(half.servers))
	}
	return fx.confirmed().want(1, 0)
}

func isEstablished(fx *fixture, in, out dptest.Packet) error {
	return errors.Join(fx.confirmed().want(1, 1), fx.flows().want(1, 1))
}

// isIn checks the state of both entries of the only flow, and whether a RST marked the sender's entry.
func isIn(state bpf.FlowState, reset uint8) checkFunc {
	return func(fx *fixture, in, out dptest.Packet) error {
		flows := fx.confirmed()
		for _, f := range flows.clients {
			if f.F.State != uint8(state) || f.F.Doubt != reset {
				return fmt.Errorf("client in state %d, reset %d; want %d, %d", f.F.State, f.F.Doubt, state, reset)
			}
		}
		for _, f := range flows.servers {
			if f.F.State != uint8(state) {
				return fmt.Errorf("server in state %d; want %d", f.F.State, state)
			}
		}
		return errors.Join(flows.want(1, 1), fx.flows().want(1, 1))
	}
}

var (
	isClosed = isIn(bpf.FlowClosed, 0)
	isLive   = isIn(bpf.FlowEstablished, 0)
)

// resetBy makes a RST with from, and sets its sequence number to seq.
func resetBy(from func(uint8) func(*fixture) dptest.Packet, seq uint32) func(*fixture) dptest.Packet {
	return change(from(dptest.RST), func(_ *fixture, p *dptest.Packet) { p.Seq = seq })
}

// fill fills the table of established flows, and returns a packet that changes no flow.
func fill(fx *fixture) dptest.Packet {
	must.Do(fx.t, fx.d.objects.SyStreamServers.Put(&bpf.ServerKey{Sport: 1}, &bpf.ServerFlow{}))
	return icmp(8, 128)(fx)
}

func (fx *fixture) stopForwarding() {
	off := map[string]string{"net.ipv4.conf.lo.forwarding": "0", "net.ipv6.conf.lo.forwarding": "0"}
	must.Do(fx.t, fx.host.Sysctl(off))
}

// shrinkMTU sets an MTU on the routes to the backends and to the client.
func (fx *fixture) shrinkMTU(mtu int) {
	fx.do(func() error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, name := range []string{"b1", "b2", "client"} {
			a := fx.addr(name)
			err := netlink.RouteAdd(&netlink.Route{LinkIndex: nic.Attrs().Index, MTU: mtu, MTULock: true,
				Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}})
			if err != nil {
				return err
			}
		}
		return nil
	})
}
