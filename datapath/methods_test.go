package datapath

import (
	"bytes"
	"fmt"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// This file has the states, packets and checks of methodRows.

func dsr(fx *fixture)  { fx.serve(func(s *lb.Service) { s.Method = lb.MethodDSR }, "b1", "b2") }
func ipip(fx *fixture) { fx.serve(tunnel(lb.EncapIPIP), "b1", "b2") }
func gue(fx *fixture)  { fx.serve(tunnel(lb.EncapGUE), "b1", "b2") }

func tunnel(e lb.Encap) func(*lb.Service) {
	return func(s *lb.Service) { s.Method, s.Encap = lb.MethodTunnel, e }
}

// crossed is a tunnel whose servers have only addresses of the other family.
func crossed(e lb.Encap) func(*fixture) {
	return func(fx *fixture) {
		fx.serve(func(s *lb.Service) {
			tunnel(e)(s)
			other := v6
			if fx.v6 {
				other = v4
			}
			for _, b := range []string{"b1", "b2"} {
				s.Ports[0].Backends = append(s.Ports[0].Backends,
					lb.Backend{Addr: netip.MustParseAddr(other[b]), Weight: 1})
			}
		})
	}
}

func inTurn(method lb.Method) func(*fixture) {
	return func(fx *fixture) {
		fx.serve(func(s *lb.Service) {
			s.Method, s.Encap, s.Algorithm = method, lb.EncapGUE, lb.AlgorithmRoundRobin
		}, "b1", "b2")
	}
}

// untouched checks that only the hop count has changed.
func untouched(_ *fixture, in, out dptest.Packet) error {
	in.TTL, out.DF = 63, in.DF
	return wrong(fmt.Sprintf("%+v", in) != fmt.Sprintf("%+v", out), "became\n%+v; want\n%+v", out, in)
}

// tunnelled checks that the packet is encapsulated and goes from our address to a backend.
func tunnelled(proto ...uint8) checkFunc {
	return func(fx *fixture, in, out dptest.Packet) error {
		src, dst := out.Src.Addr(), out.Dst.Addr()
		is := func(a netip.Addr, names ...string) bool {
			for _, n := range names {
				if a.String() == v4[n] || a.String() == v6[n] {
					return true
				}
			}
			return false
		}
		if out.Inner == nil || !is(src, "self") || !is(dst, "b1", "b2") ||
			!bytes.Contains(proto, []byte{out.Proto}) || out.TTL != 64 {
			return fmt.Errorf("sent as %+v; want a tunnel packet to b1 or b2", out)
		}
		if out.Proto == dptest.UDP && (out.Dst.Port() != 6090 || out.Src.Port() < 0xc000) {
			return fmt.Errorf("sent from %s to %s; want ports from 49152 to 6090", out.Src, out.Dst)
		}
		return untouched(fx, in, *out.Inner)
	}
}

// after sends a packet in a state. sameServer compares its server with the next packet's.
func after(state func(*fixture), first func(*fixture) dptest.Packet) func(*fixture) {
	return func(fx *fixture) {
		state(fx)
		r := fx.run(first(fx).Frame())
		must.Need(fx.t, r.did == "sent", "the first packet was %s: %s", r.did, r.reason)
		fx.server = server(r)
	}
}

func sameServer(fx *fixture, in, out dptest.Packet) error {
	r := fx.run(in.Frame())
	return wrong(!bytes.Equal(fx.server, server(r)), "went to %x; want %x", server(r), fx.server)
}

// server returns a frame's destination: the server's address or MAC address.
func server(r result) []byte {
	if r.out.Inner != nil || r.out.Src.Port() >= 61000 {
		return r.out.Dst.Addr().AsSlice()
	}
	return r.frame[:6]
}

// tunnelFrom is a tunnel packet to this node whose inner destination is an address of lo.
func tunnelFrom(from string) func(*fixture) dptest.Packet { return tunnelFor("loopback", from) }

func tunnelFor(to, from string) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		inner := fx.fromClient(dptest.TCP, dptest.SYN)
		inner.Dst = fx.at(to, 80)
		return dptest.Packet{Src: fx.at(from, 50000), Dst: fx.at("self", 6090), Proto: dptest.UDP,
			Payload: dptest.GUE(inner)}
	}
}

// tunnelOfOtherFamily carries a packet that, with IPv4, is shorter than an IPv6 header.
func tunnelOfOtherFamily(fx *fixture) dptest.Packet {
	p := tunnelFrom("router")(fx)
	other := fixture{v6: !fx.v6}
	p.Payload = dptest.GUE(dptest.Packet{Src: other.at("client", 1), Dst: other.at("loopback", 2), Proto: dptest.UDP})
	return p
}

// tunnelForMapped carries an IPv6 packet for the IPv4-mapped form of an address of lo.
func tunnelForMapped(fx *fixture) dptest.Packet {
	p, client, lo := tunnelFrom("router")(fx), fixture{v6: true}, fixture{}
	to := netip.AddrPortFrom(netip.AddrFrom16(lo.addr("loopback").As16()), 2)
	p.Payload = dptest.GUE(dptest.Packet{Src: client.at("client", 1), Dst: to, Proto: dptest.UDP})
	return p
}

// reported is a tunnel whose path MTU was reported this long ago.
func reported(ago time.Duration) func(*fixture) {
	return func(fx *fixture) {
		gue(fx)
		for _, b := range []string{"b1", "b2"} {
			fx.put(fx.d.objects.SyPmtu, bpf.ToAddr(fx.addr(b)), bpf.PMTU{Seen: uint64(bpf.Uptime() - ago), Mtu: 1400})
		}
	}
}

// data is a segment with n bytes.
func data(n int) func(*fixture) dptest.Packet {
	return change(tcp(dptest.ACK), func(_ *fixture, p *dptest.Packet) { p.Payload = make([]byte, n) })
}

func decapsulated(fx *fixture, in, out dptest.Packet) error {
	want, err := dptest.Parse(in.Frame())
	if err != nil {
		return err
	}
	return wrong(want.Inner == nil || fmt.Sprintf("%+v", *want.Inner) != fmt.Sprintf("%+v", out),
		"became\n%+v; want\n%+v", out, want.Inner)
}

func acceptTunnels(o *Options) {
	o.TunnelSources = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}
}

// tooBig checks for an ICMP error with this MTU.
func tooBig(mtu uint32) checkFunc {
	return func(fx *fixture, in, out dptest.Packet) error {
		wantType, wantCode, n := uint8(3), uint8(4), 28
		if fx.v6 {
			wantType, wantCode, n = 2, 0, 48
		}
		ok := out.Src.Addr() == in.Dst.Addr() && out.Dst.Addr() == in.Src.Addr() &&
			out.Type == wantType && out.Code == wantCode && out.Rest == mtu &&
			bytes.Equal(out.Payload, in.Frame()[14:14+n])
		return wrong(!ok, "answered with %+v; want MTU %d", out, mtu)
	}
}

// icmpError is an ICMP error from a host about a packet.
func icmpError(from string, about func(fx *fixture) dptest.Packet) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		q := about(fx)
		p := dptest.Packet{Src: fx.at(from, 0), Dst: netip.AddrPortFrom(q.Src.Addr(), 0), Proto: dptest.ICMP,
			Type: 3, Code: 4, Rest: 1400}
		n := 28
		if fx.v6 {
			p.Proto, p.Type, p.Code, n = dptest.ICMPv6, 2, 0, 48
		}
		p.Payload = q.Frame()[14 : 14+n]
		return p
	}
}

func lastSent(fx *fixture) dptest.Packet { return fx.last }

// toTheClient is a server's packet as the client receives it.
func toTheClient(fx *fixture) dptest.Packet {
	return dptest.Packet{Src: fx.at("vip", 80), Dst: fx.at("client", 40000), Proto: dptest.TCP, Flags: dptest.ACK,
		Seq: 5001, Ack: 1001, Payload: []byte("answer")}
}

// reportToServer reports a path MTU for a server's datagram to the client.
func reportToServer(mtu uint32) func(*fixture) dptest.Packet {
	return change(icmpError("router", change(toTheClient, func(_ *fixture, p *dptest.Packet) { p.Proto = dptest.UDP })),
		func(_ *fixture, p *dptest.Packet) { p.Rest = mtu })
}

// errorFor checks that an ICMP error and the packet that it quotes were translated.
func errorFor(
	from, to string, about func(*fixture) dptest.Packet, quoted func(fx *fixture) (src, dst netip.AddrPort),
) checkFunc {
	return func(fx *fixture, in, out dptest.Packet) error {
		q := about(fx)
		q.Src, q.Dst = quoted(fx)
		in.Src, in.Dst, in.TTL, in.Payload = fx.at(from, 0), fx.at(to, 0), 63, q.Frame()[14:14+len(in.Payload)]
		return wrong(fmt.Sprintf("%+v", in) != fmt.Sprintf("%+v", out), "became\n%+v; want\n%+v", out, in)
	}
}

func toVIP(fx *fixture) (src, dst netip.AddrPort)    { return fx.at("client", 40000), fx.at("vip", 80) }
func asServer(fx *fixture) (src, dst netip.AddrPort) { return fx.last.Dst, fx.last.Src }

// sctp is a packet from the client with one chunk.
func sctp(chunk uint8, tag uint32) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		p := fx.fromClient(dptest.SCTP, 0)
		p.Type, p.Ack, p.Seq, p.Payload = chunk, tag, 7, []byte("chunk.")
		return p
	}
}

func sctpReply(chunk uint8) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet {
		p := fx.reply(0)
		p.Type, p.Ack, p.Seq = chunk, 7, 99
		return p
	}
}

func sctpAbort(tag uint32) func(*fixture) dptest.Packet {
	return change(sctpReply(6), func(_ *fixture, p *dptest.Packet) { p.Ack = tag })
}

func sctpService(fx *fixture) { fx.service(lb.SCTP, "b1", "b2") }

var (
	dsrAgain        = after(inTurn(lb.MethodDSR), tcp(dptest.SYN))
	gueAgain        = after(inTurn(lb.MethodTunnel), tcp(dptest.SYN))
	stickyAgain     = after(func(fx *fixture) { fx.serve(sticky, "b1", "b2") }, tcp(dptest.SYN))
	sctpEstablished = with(sctpService, sctp(1, 0), sctpReply(2), sctp(10, 99))
)

func sticky(s *lb.Service) { s.Affinity, s.Algorithm = time.Hour, lb.AlgorithmRoundRobin }

func only(prefix string) func(*fixture) {
	return func(fx *fixture) {
		fx.serve(func(s *lb.Service) {
			p := netip.MustParsePrefix(prefix)
			if fx.v6 {
				p = netip.PrefixFrom(fx.addr("client"), 64).Masked()
				if prefix == "10.0.0.0/8" {
					p = netip.MustParsePrefix("fd00::/8")
				}
			}
			s.Allow = []netip.Prefix{p}
		}, "b1", "b2")
	}
}

func manyPorts(fx *fixture) {
	fx.serve(func(s *lb.Service) {
		s.Ports[0].Port = lb.Port{Port: 8001, Last: 8999, Target: 9001, Protocol: lb.TCP}
	}, "b1")
}

func toPort(port uint16) func(*fixture) dptest.Packet {
	return change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) { p.Dst = fx.at("vip", port) })
}

func atPort(port uint16) checkFunc {
	return func(_ *fixture, _, out dptest.Packet) error {
		return wrong(out.Dst.Port() != port, "went to %s; want port %d", out.Dst, port)
	}
}

// connect opens a connection through the state's service.
func connect(fx *fixture) {
	with(func(*fixture) {}, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK), tcp(dptest.ACK))(fx)
}
