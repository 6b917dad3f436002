package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Frames for other machines, which a switch floods or a promiscuous interface receives, are left alone. So are unicast
// packets in multicast frames. The uplink's current address counts.
func TestFramesForOthersAreLeftAlone(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		web(fx)
		other := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
		did := func(to net.HardwareAddr, p dptest.Packet) string {
			p.To = to
			frame := p.Frame()
			before := fx.counts()
			did, out := fx.through(frame)
			must.True(t, did != "passed" || string(out) == string(frame), "to %s: passed on changed", to)
			must.True(t, did != "passed" || maps.Equal(fx.counts(), before), "to %s: counted", to)
			return did
		}
		for _, to := range []net.HardwareAddr{
			other, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {1, 0, 0x5e, 0, 0, 1}, {2, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 1},
		} {
			for _, p := range []dptest.Packet{
				tcp(dptest.SYN)(fx), tcp(dptest.ACK)(fx), toPort(81)(fx), icmp(8, 128)(fx),
			} {
				got := did(to, p)
				must.True(t, got == "passed", "to %s: a packet of protocol %d was %s", to, p.Proto, got)
			}
		}
		must.Do(t, fx.flows().want(0, 0))
		must.Row(t, "to the uplink", "sent", did(dptest.MAC, tcp(dptest.SYN)(fx)))
		fx.watch()
		fx.onNIC("eth0", func(nic netlink.Link) error { return netlink.LinkSetHardwareAddr(nic, other) })
		labtest.Until(t, "the new address is known", func() error {
			p := icmp(8, 128)(fx) // changing the address removes all neighbours
			p.To = other
			got, _ := fx.first(p.Frame())
			return wrong(got != "sent", "%s", got)
		})
		must.Row(t, "to the earlier address", "passed", did(dptest.MAC, tcp(dptest.SYN)(fx)))
	})
}

// Refused packets do not use up the rate limit of packet-too-big errors.
func TestRefusalsDoNotSilencePacketTooBig(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		gue(fx)
		refused := udp(fx)
		for range 3000 {
			fx.first(refused.Frame())
		}
		big := tcp(dptest.ACK)(fx)
		big.Payload = make([]byte, 1440)
		did, _ := fx.first(big.Frame())
		must.Row(t, "packet too big was", "sent", did)
	})
}

// watch runs the verifier until the test ends.
func (fx *fixture) watch() {
	must.Run(fx.t, func(ctx context.Context) error {
		return fx.host.Do(func() error { return fx.d.verifier.Run(ctx) })
	})
}

// An IPv6 frame to ::ffff:a.b.c.d is not for the IPv4 service at a.b.c.d.
func TestMappedDestination(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		web(fx)
		p := tcp(dptest.SYN)(fx)
		p.Src = netip.MustParseAddrPort("[2001:db8::100]:40000")
		p.Dst = netip.AddrPortFrom(netip.AddrFrom16(p.Dst.Addr().As16()), p.Dst.Port())
		fx.wantReason(string(h), p, "malformed")
	}
}

// Refusing a packet with IP options is not an internal error.
func TestRefusedPacketWithOptions(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		web(fx)
		must.Row(t, "internal errors", 0, fx.counted("internal_error", func() {
			p := udp(fx)
			p.Options = true
			fx.run(p.Frame())
			fx.shrinkMTU(1280)
			p = fx.fromClient(dptest.TCP, dptest.SYN)
			p.Options, p.Payload = true, make([]byte, 1300)
			fx.run(p.Frame())
		}))
	})
}

// No host has a broadcast or multicast address. An answer to one would go to all hosts on a link.
func TestBroadcastSourcesGetNoAnswer(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		web(fx)
		servers := netip.MustParsePrefix("10.0.0.1/24")
		must.Do(t, errors.Join(fx.host.Bridge("servers"), fx.host.AddAddress("servers", servers)))
		fx.do(fx.d.tunnels.Refresh)
		for source, want := range map[string]string{
			"192.0.2.254": "echo_reply", "192.0.2.255": "source_is_local", "255.255.255.255": "malformed",
			"239.1.1.1": "malformed", "10.0.0.255": "source_is_local",
		} {
			ping := icmp(8, 128)(fx)
			ping.Src = netip.AddrPortFrom(netip.MustParseAddr(source), 0)
			r := fx.run(ping.Frame())
			must.True(t, r.reason == want && (r.did == "dropped") == (want != "echo_reply"),
				"%s: a ping from %s was %s: %s; want %s", h, source, r.did, r.reason, want)
		}
		syn := tcp(dptest.SYN)(fx)
		syn.Src = netip.MustParseAddrPort("192.0.2.255:40000")
		fx.wantReason(fmt.Sprintf("%s: a SYN from a broadcast address was", h), syn, "source_is_local")
		fx.do(func() error {
			return errors.Join(netlink.LinkDel(must.Get(netlink.LinkByName("servers"))(t)), fx.d.tunnels.Refresh())
		})
		must.Do(t, fx.flows().want(0, 0))
	}
}

// No packet to the tunnel port leaves this node unless our programs sent it. It would reach another node with this
// node's address.
func TestSpoofedTunnelPacketsDoNotLeave(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		for _, ends := range []bool{true, false} {
			fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = ends })
			p := dptest.Packet{Src: fx.at("self", 40000), Dst: fx.at("b2", 6090), Proto: dptest.UDP,
				Payload: dptest.GUE(fx.fromClient(dptest.TCP, dptest.SYN), fx.withToken("unknown")...)}
			want, other := map[bool]string{true: "dropped", false: "passed"}[ends], p
			other.Dst = fx.at("b2", 6091)
			for _, tt := range []struct {
				when string
				p    dptest.Packet
				mark uint32
				want string
			}{
				{"of this node", p, 0, want},
				{"with another mark", p, 7, want},
				{"of our programs", p, 0x53580000, "passed"},
				{"to another port", other, 0, "passed"},
			} {
				var did string
				counted := fx.counted("tunnel_spoofed", func() { did, _ = fx.runOut(tt.p.Frame(), tt.mark) })
				must.True(t, did == tt.want && counted == uint64(bpf.Truth(did == "dropped")),
					"tunnels end here: %t: %s: %s, counted %d; want %s", ends, tt.when, did, counted, tt.want)
			}
		}
	}
}

// A pod's socket may send a packet whose headers are longer than the linear part of the skb.
func TestSpoofedTunnelPacketsInPiecesDoNotLeave(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, true, func(o *Options) { o.Delivers = true })
	udp := dptest.Packet{Src: fx.at("self", 40000), Dst: fx.at("b2", 6090), Proto: dptest.UDP,
		Payload: dptest.GUE(fx.fromClient(dptest.TCP, dptest.SYN))}.Frame()[14+40:]
	for _, size := range []int{8, 248, 256, 400} {
		options := []byte{unix.IPPROTO_UDP, byte(size/8 - 1)}
		for rest := size - len(options); rest > 0; { // padding (RFC 8200, 4.2)
			n := min(rest, 255)
			options = append(append(options, 1, byte(n-2)), make([]byte, n-2)...)
			if rest -= n; rest == 1 {
				options, rest = append(options, 0), 0
			}
		}
		must.Row(t, size, 1, fx.counted("tunnel_spoofed", func() {
			fx.do(func() error {
				return sendPieces(fx.addr("b2"), unix.IPPROTO_DSTOPTS, options[:8], append(options[8:], udp...))
			})
		}))
	}
}

// sendPieces sends one packet of an IPv6 protocol in two calls.
func sendPieces(to netip.Addr, proto int, first, rest []byte) error {
	socket, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	err = errors.Join(unix.Connect(socket, &unix.SockaddrInet6{Addr: to.As16()}),
		unix.Send(socket, first, unix.MSG_MORE))
	if last := unix.Send(socket, rest, 0); last != unix.ENOBUFS { // the packet is dropped on this node
		return errors.Join(err, last)
	}
	return err
}

// A server that had no route and was in no table receives packets again when it has a route and is back.
func TestSourcesOfAServerThatIsBack(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		p := fx.service(lb.TCP, "b1")
		fx.openFlow(lb.TCP, 0)
		b1 := fx.addr("b1")
		host := &net.IPNet{IP: b1.AsSlice(), Mask: net.CIDRMask(b1.BitLen(), b1.BitLen())}
		blackhole := &netlink.Route{Dst: host, Type: unix.RTN_BLACKHOLE}
		fx.do(func() error { return netlink.RouteAdd(blackhole) })
		fx.do(func() error { fx.d.services.RefreshSources(); return nil })
		fx.apply(lb.Delta{Delete: []lb.Frontend{p.Frontend}}) // an open flow keeps the server
		fx.do(func() error { return netlink.RouteDel(blackhole) })
		fx.do(func() error { fx.d.services.RefreshSources(); return nil })
		fx.service(lb.TCP, "b1")
		fx.went(fx.on(1, dptest.TCP, dptest.SYN))
	})
}

// A change of allow applies to new flows. An open connection continues, except where packets are forwarded by their
// hash alone, and ends when its client has no route (docs/security.md).
func TestAllowIsForNewFlows(t *testing.T) {
	t.Parallel()
	const packets = 1000
	for _, tt := range []struct {
		method    lb.Method
		algorithm lb.Algorithm
		goesOn    bool
	}{
		{lb.MethodNAT, lb.AlgorithmMaglev, true},
		{lb.MethodDSR, lb.AlgorithmRoundRobin, true},
		{lb.MethodDSR, lb.AlgorithmMaglev, false},
	} {
		fx := newFixture(t, hookTC, false, nil)
		serve := func(allow ...netip.Prefix) {
			fx.serve(func(s *lb.Service) { s.Method, s.Algorithm, s.Allow = tt.method, tt.algorithm, allow }, "b1")
		}
		serve()
		p := fx.fromClient(dptest.TCP, dptest.SYN)
		server := answer(fx.run(p.Frame()).out, dptest.SYN|dptest.ACK, 5000)
		if tt.method == lb.MethodNAT {
			fx.run(server.Frame())
		}
		p.Flags, p.Seq, p.Ack = dptest.ACK, p.Seq+1, server.Seq+1
		fx.run(p.Frame())
		serve(netip.MustParsePrefix("10.0.0.0/8"))
		sent := 0
		for range packets {
			switch r := fx.run(p.Frame()); {
			case r.did == "sent":
				sent++
			case r.reason != "not_allowed":
				t.Fatalf("%s, %s: %s", tt.method, tt.algorithm, r.reason)
			}
		}
		must.True(t, tt.goesOn == (sent == packets) && (tt.goesOn || sent <= packets/2),
			"%s, %s: %d of %d packets were forwarded", tt.method, tt.algorithm, sent, packets)
		if tt.method != lb.MethodNAT {
			for _, flags := range []uint8{dptest.SYN, dptest.RST, dptest.SYN} { // another flow from the same port
				p.Flags, p.Seq, p.Payload = flags, p.Seq+1000, nil
				reason := fx.run(p.Frame()).reason
				must.True(t, flags != dptest.SYN || reason == "not_allowed",
					"%s, %s: a new flow from a port in use: %s", tt.method, tt.algorithm, reason)
			}
			continue
		}
		fx.do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: prefix(v4["client"] + "/32"), Type: unix.RTN_BLACKHOLE})
		})
		server.Flags = dptest.ACK
		fx.wantReason("a reply without a route to the client", server, "no_route")
	}
}

// answer is a packet from the server to which p was sent.
func answer(p dptest.Packet, flags uint8, seq uint32) dptest.Packet {
	return dptest.Packet{Src: p.Dst, Dst: p.Src, Proto: p.Proto, Flags: flags, Seq: seq, Ack: p.Seq + 1,
		Payload: []byte("answer")}
}

// A frame with a VLAN tag leaves with the tag, and only through the interface on which it arrived. A tag with VID 0 is
// removed.
func TestVLANTags(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := newFixture(t, h, false, func(o *Options) { o.Mode = Mode(h) })
		w := fx.wire()
		fx.service(lb.TCP, "b1")
		send := func(vid uint16) {
			p := fx.on(int(vid), dptest.TCP, dptest.SYN)
			p.Tags = []uint16{vid}
			w.send(p.Frame())
		}
		for _, vid := range []uint16{42, 0} {
			send(vid)
			p := must.Get(dptest.Parse(w.next()))(t)
			must.True(t, p.Dst == fx.at("b1", 8080) && w.tag == vid, "%s: VID %d: %+v with VID %d", h, vid, p, w.tag)
		}
		fx.secondNIC()
		fx.service(lb.TCP, "inside")
		send(43)
		labtest.Until(t, "the frame is dropped", func() error {
			return wrong(fx.counts()[Verdict{"drop", "vlan_tagged"}] != 1, "%v", fx.counts())
		})
	}
}

// The answer to a datagram may be longer than the datagram, with little space behind the frame.
func TestShortDatagramsAreRefused(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	web(fx)
	w, p := fx.wire(), udp(fx)
	p.Payload = []byte("1")
	w.send(p.Frame())
	answer := must.Get(dptest.Parse(w.next()))(t)
	must.True(t, answer.Type == 3 && answer.Dst.Addr() == p.Src.Addr(), "answered with %+v", answer)
}
