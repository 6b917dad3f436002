package datapath

import (
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// methodRows has the rows for dsr and tunnel, for allow lists and affinity, and for edge cases of protocols.
var methodRows = []row{
	{name: "dsr", state: dsr, in: tcp(dptest.SYN), did: "sent", reason: "forwarded", check: untouched},
	{name: "dsr, UDP", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.UDP }, "b1", "b2")
	}, in: udp, did: "sent", reason: "forwarded", check: untouched},
	{name: "dsr, in turn: a flow keeps its server", state: dsrAgain, in: tcp(dptest.ACK),
		did: "sent", reason: "forwarded", check: sameServer},
	{name: "dsr, in turn: no flow", state: inTurn(lb.MethodDSR), in: tcp(dptest.ACK),
		did: "sent", reason: "no_flow", check: aReset},
	{name: "dsr behind a router",
		state: func(fx *fixture) { fx.serve(func(s *lb.Service) { s.Method = lb.MethodDSR }, "far") },
		in:    tcp(dptest.SYN), did: "dropped", reason: "not_on_link"},
	{name: "dsr without a backend",
		state: func(fx *fixture) { fx.serve(func(s *lb.Service) { s.Method = lb.MethodDSR }) },
		in:    tcp(dptest.SYN), did: "sent", reason: "no_backend", check: aReset},
	{name: "ipip", state: ipip, in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: tunnelled(dptest.IPIP, dptest.IPv6)},
	{name: "ipip, the other family", state: crossed(lb.EncapIPIP), in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: tunnelled(dptest.IPIP, dptest.IPv6)},
	{name: "gue", state: gue, in: tcp(dptest.SYN), did: "sent", reason: "forwarded", check: tunnelled(dptest.UDP)},
	{name: "gue, the other family", state: crossed(lb.EncapGUE), in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: tunnelled(dptest.UDP)},
	{name: "gue, in turn: a flow keeps its server", state: gueAgain, in: tcp(dptest.ACK),
		did: "sent", reason: "forwarded", check: sameServer},
	{name: "gue to a server behind a router", state: func(fx *fixture) { fx.serve(tunnel(lb.EncapGUE), "far") },
		in: tcp(dptest.SYN), did: "sent", reason: "forwarded"},
	{name: "gue, TTL expires", state: gue,
		in:  change(tcp(dptest.SYN), func(_ *fixture, p *dptest.Packet) { p.TTL = 1 }),
		did: "dropped", reason: "ttl_expired"},
	{name: "gue, too big for the tunnel", state: gue,
		in: data(1440), did: "sent", reason: "too_big", check: func(fx *fixture, in, out dptest.Packet) error {
			if fx.v6 {
				return tooBig(1500-52)(fx, in, out)
			}
			return tooBig(1500-32)(fx, in, out)
		}},
	{name: "a router reports the path MTU of a tunnel", state: gue, in: func(fx *fixture) dptest.Packet {
		return fx.report(1400, fx.sentByTunnel()[:500])
	}, did: "passed", reason: "pmtu_learned"},
	{name: "larger than the reported MTU", state: reported(0), in: data(1340),
		did: "sent", reason: "too_big", check: func(fx *fixture, in, out dptest.Packet) error {
			if fx.v6 {
				return tooBig(1400-52)(fx, in, out)
			}
			return tooBig(1400-32)(fx, in, out)
		}},
	{name: "larger than the MTU that was reported ten minutes ago", state: reported(601 * time.Second), in: data(1340),
		did: "sent", reason: "forwarded", check: tunnelled(dptest.UDP)},
	{name: "decapsulated", state: web, in: tunnelFrom("router"),
		did: "passed", reason: "decapsulated", check: decapsulated, option: acceptTunnels},
	{name: "decapsulated, the other family", state: web, in: tunnelOfOtherFamily,
		did: "passed", reason: "decapsulated", check: decapsulated, option: acceptTunnels},
	{name: "decapsulated, not for this node", state: web, in: tunnelFor("elsewhere", "router"),
		did: "dropped", reason: "decap_not_local", option: acceptTunnels},
	{name: "a tunnel of an unknown source", state: web, in: tunnelFrom("unknown"),
		did: "dropped", reason: "unknown_tunnel_source", option: acceptTunnels},
	{name: "a tunnel, without tunnel sources", state: web, in: tunnelFrom("router"), did: "passed", reason: "not_ours"},
	{name: "a tunnel with an invalid GUE header", state: web,
		in:  change(tunnelFrom("router"), func(_ *fixture, p *dptest.Packet) { p.Payload[0] = 0xff }),
		did: "dropped", reason: "malformed", option: acceptTunnels},

	{name: "allowed", state: only("192.0.2.0/24"), in: tcp(dptest.SYN),
		did: "sent", reason: "forwarded", check: sentOn},
	{name: "not allowed", state: only("10.0.0.0/8"), in: tcp(dptest.SYN), did: "dropped", reason: "not_allowed"},
	{name: "allowed for the other family only", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) {
			s.Allow = []netip.Prefix{netip.MustParsePrefix(map[bool]string{true: "0.0.0.0/0", false: "::/0"}[fx.v6])}
		}, "b1", "b2")
	}, in: tcp(dptest.SYN), did: "dropped", reason: "not_allowed"},
	{name: "not allowed, ping", state: only("10.0.0.0/8"), in: icmp(8, 128), did: "sent", reason: "echo_reply"},
	{name: "affinity", state: stickyAgain,
		in:  change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) { p.Src = fx.at("client", 40001) }),
		did: "sent", reason: "forwarded", check: sameServer},

	{name: "first port of a range", state: manyPorts, in: toPort(8001),
		did: "sent", reason: "forwarded", check: atPort(9001)},
	{name: "a port in a range", state: manyPorts, in: toPort(8555),
		did: "sent", reason: "forwarded", check: atPort(9555)},
	{name: "last port of a range", state: manyPorts, in: toPort(8999),
		did: "sent", reason: "forwarded", check: atPort(9999)},
	{name: "before a range", state: manyPorts, in: toPort(8000), did: "sent", reason: "no_frontend", check: aReset},
	{name: "behind a range", state: manyPorts, in: toPort(9000), did: "sent", reason: "no_frontend", check: aReset},

	{name: "SCTP opens", state: sctpService, in: sctp(1, 0), did: "sent", reason: "forwarded", check: sentOn},
	{name: "SCTP answer", state: with(sctpService, sctp(1, 0)), in: sctpReply(2),
		did: "sent", reason: "forwarded", check: toClient},
	{name: "SCTP with the right tag establishes", state: with(sctpService, sctp(1, 0), sctpReply(2)),
		in: sctp(10, 99), did: "sent", reason: "forwarded", check: isEstablished},
	{name: "SCTP with another tag does not", state: with(sctpService, sctp(1, 0), sctpReply(2)), in: sctp(10, 98),
		did: "dropped", reason: "bad_ack"},
	{name: "SCTP abort with another tag ends no handshake",
		state: with(sctpService, sctp(1, 0), sctpAbort(8), sctpReply(2), sctpAbort(8)), in: sctp(10, 99),
		did: "sent", reason: "forwarded", check: isEstablished},
	{name: "the server aborts in reply to INIT", state: with(sctpService, sctp(1, 0), sctpAbort(7)), in: sctp(10, 99),
		did: "sent", reason: "no_flow", check: unreachable},
	{name: "SCTP data", state: sctpEstablished, in: sctp(0, 99), did: "sent", reason: "forwarded", check: sentOn},
	{name: "SCTP ends", state: sctpEstablished, in: sctp(6, 99), did: "sent", reason: "forwarded", check: isClosed},
	{name: "SCTP of no association", state: sctpService, in: sctp(0, 99),
		did: "sent", reason: "no_flow", check: unreachable},
	{name: "SCTP abort of no association", state: sctpService, in: sctp(6, 99), did: "dropped", reason: "no_flow"},
	{name: "SCTP by dsr", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.SCTP }, "b1", "b2")
	}, in: sctp(1, 0), did: "sent", reason: "forwarded", check: untouched},
	{name: "SCTP by gue", state: func(fx *fixture) {
		fx.serve(func(s *lb.Service) { tunnel(lb.EncapGUE)(s); s.Ports[0].Protocol = lb.SCTP }, "b1", "b2")
	}, in: sctp(1, 0), did: "sent", reason: "forwarded", check: tunnelled(dptest.UDP)},

	{name: "error of a router about a packet to a server", state: established, in: icmpError("router", lastSent),
		did: "sent", reason: "forwarded", check: errorFor("vip", "client", lastSent, toVIP)},
	{name: "error of a router about a packet to a server, UDP", state: answered, in: icmpError("router", lastSent),
		did: "sent", reason: "forwarded", check: errorFor("vip", "client", lastSent, toVIP)},
	{name: "error of a router about a packet to a client",
		state: func(fx *fixture) { fx.service(lb.TCP, "b1"); connect(fx) }, in: icmpError("router", toTheClient),
		did: "sent", reason: "forwarded", check: errorFor("self", "b1", toTheClient, asServer)},
	{name: "path MTU below that of IPv6, about a datagram to a client", state: answered, in: reportToServer(576),
		did: "dropped", reason: "pmtu_too_low"},
	{name: "no path MTU, about a datagram to a client", state: answered, in: reportToServer(0),
		did: "dropped", reason: "pmtu_too_low"},
	{name: "path MTU below that of IPv6, about a datagram to a server", state: answered,
		in:  change(icmpError("router", lastSent), func(_ *fixture, p *dptest.Packet) { p.Rest = 68 }),
		did: "dropped", reason: "pmtu_too_low"},
	{name: "path MTU below that of IPv6, about a segment to a client",
		state: func(fx *fixture) { fx.service(lb.TCP, "b1"); connect(fx) },
		in:    change(icmpError("router", toTheClient), func(_ *fixture, p *dptest.Packet) { p.Rest = 552 }),
		did:   "dropped", reason: "pmtu_too_low"},
	{name: "path MTU about a datagram to a client", state: answered, in: reportToServer(1280),
		did: "sent", reason: "forwarded"},
	{name: "path MTU about a datagram, with the source kept", state: with(func(fx *fixture) {
		fx.serve(func(s *lb.Service) { s.KeepSource, s.Ports[0].Protocol = true, lb.UDP }, "b1", "b2")
	}, udp), in: reportToServer(576), did: "sent", reason: "forwarded"},
	{name: "error about no flow", state: web, in: icmpError("router", toTheClient), did: "dropped", reason: "no_flow"},
	{name: "error about a packet that was not sent", state: established,
		in:  change(icmpError("router", lastSent), func(fx *fixture, p *dptest.Packet) { p.Dst = fx.at("vip", 0) }),
		did: "dropped", reason: "unsupported_protocol"},
	{name: "error about a packet of a server, dsr", state: dsr, in: icmpError("router", toTheClient),
		did: "sent", reason: "forwarded", check: untouched},
	{name: "error about a packet of a server, gue", state: gue, in: icmpError("router", toTheClient),
		did: "sent", reason: "forwarded", check: tunnelled(dptest.UDP)},

	{name: "two VLAN tags", state: web, // the kernel moves the outer one out of the frame
		in:  change(tcp(dptest.SYN), func(_ *fixture, p *dptest.Packet) { p.Tags = []uint16{42} }),
		did: "dropped", reason: "vlan_tagged"},
	{name: "two VLAN tags, to another host", state: web,
		in: change(tcp(dptest.SYN), func(fx *fixture, p *dptest.Packet) {
			p.Tags, p.Dst = []uint16{42}, fx.at("elsewhere", 80)
		}), did: "passed", reason: "not_ours"},
}
