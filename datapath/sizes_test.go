package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// IPv4 packets without DF that are too large for the path to a server, or back to a client, are fragmented as by a
// router. With DF, the sender receives an error. The packets are sent over the wire, because the kernel fragments them.
func TestPacketsWithoutDFAreFragmented(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		for _, method := range []lb.Method{lb.MethodNAT, lb.MethodTunnel} {
			t.Run(string(h)+"/"+string(method), func(t *testing.T) {
				fx := newFixture(t, h, false, func(o *Options) { o.Mode = Mode(h) })
				fx.serve(func(s *lb.Service) {
					s.Ports[0].Protocol, s.Method, s.Encap = lb.UDP, method, lb.EncapIPIP
				}, "b1")
				fx.shrinkMTU(1280)
				w := fx.wire()
				p := udp(fx)
				p.DF, p.Payload = false, payload(1400)
				w.send(p.Frame())
				joined := w.joined()
				inner := joined
				if method == lb.MethodTunnel {
					inner = *joined.Inner
				}
				must.True(t, joined.Src.Addr() == fx.addr("self") && joined.Dst.Addr() == fx.addr("b1") &&
					joined.TTL == 63 && inner.TTL == 63 && bytes.Equal(inner.Payload, p.Payload), "%+v", joined)
				if method == lb.MethodNAT {
					back := p
					back.Src, back.Dst = joined.Dst, joined.Src
					w.send(back.Frame())
					must.Do(t, toClient(fx, back, w.joined()))
				}
				p.DF = true
				w.send(p.Frame())
				answer, err := dptest.Parse(w.next())
				must.True(t, err == nil && answer.Proto == dptest.ICMP && answer.Code == 4,
					"with DF: %+v, %v", answer, err)
			})
		}
	}
}

// wire sends to the fixture's uplink, and receives what leaves there.
type wire struct {
	fx  *fixture
	fd  int
	tag uint16 // VLAN tag of the last received frame; 0: none
}

func (fx *fixture) wire() *wire {
	fx.t.Helper()
	w := &wire{fx: fx}
	must.Do(fx.t, fx.peer.Do(func() (err error) {
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network byte order
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		nic, err := net.InterfaceByName("eth0")
		if err := errors.Join(err, unix.SetsockoptInt(w.fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1)); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: nic.Index})
	}))
	fx.t.Cleanup(func() { unix.Close(w.fd) })
	limit := unix.NsecToTimeval(int64(10 * time.Second))
	must.Do(fx.t, unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	return w
}

func (w *wire) send(frame []byte) {
	w.fx.t.Helper()
	must.Get(unix.Write(w.fd, frame))(w.fx.t)
}

// next returns the next IP frame from the fixture.
func (w *wire) next() []byte {
	w.fx.t.Helper()
	b, aux := make([]byte, 4096), make([]byte, unix.CmsgSpace(20)) // struct tpacket_auxdata
	for {
		n, _, _, from, err := unix.Recvmsg(w.fd, b, aux, 0)
		must.Need(w.fx.t, err == nil, "nothing was sent: %v", err)
		w.tag = binary.NativeEndian.Uint16(aux[unix.CmsgLen(16):])
		ll, ok := from.(*unix.SockaddrLinklayer)
		if ok && ll.Pkttype != unix.PACKET_OUTGOING && n > 34 && b[12] == 8 && b[13] == 0 {
			return b[:n]
		}
	}
}

// joined returns the packet whose fragments are the next two frames.
func (w *wire) joined() dptest.Packet {
	w.fx.t.Helper()
	return must.Get(dptest.Join([][]byte{w.next(), w.next()}))(w.fx.t)
}

// A VIP does not answer fragmented pings, which only a stack could reassemble (docs/forwarding.md).
func TestPingInFragments(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		ping := icmp(8, 128)(fx)
		ping.Payload = make([]byte, 2000)
		for i, frame := range ping.Fragments(1, 1400) {
			r := fx.run(frame)
			want := []string{"dropped: unsupported_protocol", "dropped: fragment_not_found"}[i]
			must.Row(t, i, want, r.did+": "+r.reason)
		}
	})
}

// With an MTU of 9000, XDP is attached natively, and frames in several buffers are forwarded and answered.
func TestJumboFrames(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixtureWith(t, h, v6, nil, func(fx *fixture) {
			for _, host := range []*lab.Host{fx.host, fx.peer} {
				must.Do(t, host.Do(func() error {
					nic, err := netlink.LinkByName("eth0")
					return errors.Join(err, netlink.LinkSetMTU(nic, 9000))
				}))
			}
		})
		established(fx)
		// BPF_PROG_TEST_RUN passes up to 3520 bytes to XDP in one buffer, and accepts up to about 3700 bytes for tc.
		const size = 3560
		run := func(p dptest.Packet) dptest.Packet {
			did, out := fx.through(p.Frame())
			answer, err := dptest.Parse(out)
			must.True(t, did == "sent" && err == nil, "%s: %v", did, err)
			return answer
		}
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = payload(size)
		was := fx.bytes()
		// The errors would contain the whole packets.
		must.True(t, sentOn(fx, big, run(big)) == nil, "forwarded with other contents or headers")
		must.Row(t, "bytes counted", uint64(len(big.Frame())), fx.bytes()-was)
		big.Src = fx.at("client", 40001)
		must.Do(t, aReset(fx, big, run(big)))
		ping := icmp(8, 128)(fx)
		ping.Payload = big.Payload
		must.True(t, echoReply(fx, ping, run(ping)) == nil, "the echo reply has other contents")
	})
}

// If XDP sends from the ingress interface, frames in several buffers do not pass tc.
func TestJumboFramesByXDP(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookXDP, v6, nil)
		established(fx)
		var objects *bpf.Objects
		fx.do(func() (err error) {
			o := fx.o
			o.Interfaces = []string{"lo"} // has a large MTU and is not veth
			objects, _, err = load(o, must.Get(bpf.LoadSy())(t), constants(o), fx.d.pins, nil)
			return err
		})
		t.Cleanup(func() { objects.Close() })
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = payload(8000)
		setMTU := func(mtu int) {
			fx.onNIC("eth0", func(nic netlink.Link) error { return netlink.LinkSetMTU(nic, mtu) })
		}
		frame := big.Frame()
		setMTU(1500)
		did, out := fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		must.True(t, did == "passed" && string(out) == string(frame),
			"too big for the MTU: %s by XDP; want passed to tc, which answers", did)
		setMTU(9000)
		did, out = fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		p, err := dptest.Parse(out)
		must.True(t, did == "sent" && err == nil && sentOn(fx, big, p) == nil, "%s, %v", did, err)
	}
}

// Servers' packets count as replies, even on the fast path.
func TestRepliesAreCounted(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := shared(t, h, v6, nil)
		fx.reset()
		fx.service(lb.TCP, "b1")
		fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
		fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
		fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame())
		for range 10 {
			fx.run(fx.reply(dptest.ACK).Frame())
		}
		for f, got := range must.Get(fx.d.Stats())(t).Frontends {
			must.True(t, got.Packets == 13 && got.Replies == 11 && got.Flows == 1, "%v: %+v", f, got)
		}
	})
}

// bytes returns the number of bytes counted for the frontend.
func (fx *fixture) bytes() (n uint64) {
	fx.t.Helper()
	for _, f := range must.Get(fx.d.Stats())(fx.t).Frontends {
		n += f.Bytes
	}
	return n
}

// sentByTunnel runs a packet with 1380 bytes of payload and returns what was sent, starting at the IP header.
func (fx *fixture) sentByTunnel() []byte {
	fx.t.Helper()
	p := tcp(dptest.ACK)(fx)
	p.Payload = make([]byte, 1380)
	r := fx.run(p.Frame())
	must.Need(fx.t, r.did == "sent" && r.out.Inner != nil, "%s: %s", r.did, r.reason)
	return r.frame[14:]
}

// report is a router's ICMP error with a path MTU that quotes these bytes.
func (fx *fixture) report(mtu uint32, quoted []byte) dptest.Packet {
	to, _ := netip.AddrFromSlice(quoted[12:16])
	p := dptest.Packet{Src: fx.at("router", 0), Proto: dptest.ICMP, Type: 3, Code: 4, Rest: mtu, Payload: quoted}
	if fx.v6 {
		to, _ = netip.AddrFromSlice(quoted[8:24])
		p.Proto, p.Type, p.Code = dptest.ICMPv6, 2, 0
	}
	p.Dst = netip.AddrPortFrom(to, 0)
	return p
}

// A path MTU is believed only if the quoted packet may be one of ours, and never below the family's minimum.
func TestForgedPathMTU(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		for _, encap := range []lb.Encap{lb.EncapIPIP, lb.EncapGUE} {
			fx := shared(t, h, v6, nil)
			fx.serve(tunnel(encap), "b1")
			sent := fx.sentByTunnel()
			long, short := sent[:500], sent[:28]
			head, protoAt := 20, 9
			if v6 {
				head, protoAt, short = 40, 6, sent[:48]
			}
			quote := func(change func(q []byte)) []byte {
				q := slices.Clone(long)
				change(q)
				return q
			}
			inner := head
			if encap == lb.EncapGUE {
				inner += 12
			}
			vipAt := inner + 19 // last byte of the inner destination
			if v6 {
				vipAt = inner + 39
			}
			b1 := bpf.ToAddr(fx.addr("b1"))
			learned := func() (path bpf.PMTU) {
				must.Do(t, fx.d.objects.SyPmtu.Lookup(b1, &path))
				return path
			}
			for _, c := range []struct {
				name     string
				mtu      uint32
				quote    []byte
				believed bool
			}{
				{"below the minimum", 1279, long, false},
				{"not below the packet", uint32(len(sent)), long, false},
				{"from another source", 1300, quote(func(q []byte) {
					other := fx.addr("elsewhere").AsSlice()
					copy(q[head-2*len(other):], other)
				}), false},
				{"to another server", 1300, quote(func(q []byte) { q[head-1] ^= 1 }), false},
				{"of another protocol", 1300, quote(func(q []byte) { q[protoAt] = dptest.TCP }), false},
				{"to another VIP", 1300, quote(func(q []byte) { q[vipAt] ^= 1 }), false},
				{"not by GUE", 1300, quote(func(q []byte) {
					if encap == lb.EncapGUE {
						q[head] = 0x30 // source port 12288
					} else {
						q[vipAt] ^= 2
					}
				}), false},
				{"a short quote", 1350, short, false},
				{"a long quote", 1320, long, true},
				{"larger than before", 1400, long, false},
				{"lower than before", 1310, long, true},
			} {
				was := learned()
				r := fx.run(fx.report(c.mtu, c.quote).Frame())
				want := map[bool]string{false: "not_ours", true: "pmtu_learned"}[c.believed]
				now := learned()
				if r.reason == "unsupported_protocol" { // dropped, because its destination is a VIP
					want = r.reason
				}
				must.True(t, r.reason == want && c.believed == (now.Mtu == c.mtu) && (c.believed || now == was),
					"%s, %s: %s: %s; the MTU was %d and is %d", encap, c.name, r.did, r.reason, was.Mtu, now.Mtu)
			}
		}
	})
}

// An IPv6 packet of 1280 bytes is never too big for a path MTU, because its sender cannot make it smaller.
func TestSmallestPacketIsNeverTooBig(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, true, nil)
		fx.serve(tunnel(lb.EncapIPIP), "b1")
		path := bpf.PMTU{Seen: uint64(bpf.Uptime()), Mtu: 1280}
		must.Do(t, fx.d.objects.SyPmtu.Put(bpf.ToAddr(fx.addr("b1")), path))
		p := tcp(dptest.ACK)(fx)
		p.Payload = make([]byte, 1280-60)
		fx.went(p)
		p.Payload = make([]byte, 1281-60)
		r := fx.run(p.Frame())
		must.True(t, r.did == "sent" && r.reason == "too_big" && r.out.Rest == 1280 &&
			binary.BigEndian.Uint16(r.out.Payload[4:]) == 1241, "%s: %s: %s, MTU %d", h, r.did, r.reason, r.out.Rest)
	}
}
