package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
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

// IPv4 packets without DF that are larger than the path to a server, or back to a client, are fragmented, as a router
// does; with DF the sender gets an error. The packets go over the wire, because the kernel makes the fragments.
func TestPacketsWithoutDFAreFragmented(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		for _, method := range []lb.Method{lb.MethodNAT, lb.MethodTunnel} {
			t.Run(string(h)+"/"+string(method), func(t *testing.T) {
				fx := newFixture(t, h, false, func(o *Options) { o.Mode = ModeXDP })
				if h == hookTC {
					fx.close()
					fx.o.Mode = ModeTC
					fx.open()
				}
				fx.serve(func(s *lb.Service) {
					s.Ports[0].Protocol, s.Method, s.Encap = lb.UDP, method, lb.EncapIPIP
				}, "b1")
				fx.shrinkMTU(1280)
				w := fx.wire()
				p := udp(fx)
				p.DF, p.Payload = false, make([]byte, 1400)
				for i := range p.Payload {
					p.Payload[i] = byte(i * 7)
				}
				w.send(p.Frame())
				joined := w.joined()
				inner := joined
				if method == lb.MethodTunnel {
					inner = *joined.Inner
				}
				if joined.Src.Addr() != fx.addr("self") || joined.Dst.Addr() != fx.addr("b1") ||
					joined.TTL != 63 || inner.TTL != 63 || !bytes.Equal(inner.Payload, p.Payload) {
					t.Errorf("joined to %+v", joined)
				}
				if method == lb.MethodNAT {
					back := p
					back.Src, back.Dst = joined.Dst, joined.Src
					w.send(back.Frame())
					if err := toClient(fx, back, w.joined()); err != nil {
						t.Error(err)
					}
				}
				p.DF = true
				w.send(p.Frame())
				answer, err := dptest.Parse(w.next())
				if err != nil || answer.Proto != dptest.ICMP || answer.Code != 4 {
					t.Errorf("with DF: %+v, %v", answer, err)
				}
			})
		}
	}
}

// wire sends to the uplink of the fixture, and receives what leaves there.
type wire struct {
	fx  *fixture
	fd  int
	tag uint16 // of the last frame that was received; 0: none
}

func (fx *fixture) wire() *wire {
	fx.t.Helper()
	w := &wire{fx: fx}
	err := fx.peer.Do(func() (err error) {
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network byte order
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		nic, err := net.InterfaceByName("eth0")
		if err := errors.Join(err, unix.SetsockoptInt(w.fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1)); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: nic.Index})
	})
	if err != nil {
		fx.t.Fatal(err)
	}
	fx.t.Cleanup(func() { unix.Close(w.fd) })
	limit := unix.NsecToTimeval(int64(10 * time.Second))
	must.Do(fx.t, unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	return w
}

func (w *wire) send(frame []byte) {
	w.fx.t.Helper()
	must.Get(unix.Write(w.fd, frame))(w.fx.t)
}

// next returns the next frame with IPv4 from the fixture.
func (w *wire) next() []byte {
	w.fx.t.Helper()
	b, aux := make([]byte, 4096), make([]byte, unix.CmsgSpace(20)) // struct tpacket_auxdata
	for {
		n, _, _, from, err := unix.Recvmsg(w.fd, b, aux, 0)
		if err != nil {
			w.fx.t.Fatalf("nothing was sent: %v", err)
		}
		w.tag = binary.NativeEndian.Uint16(aux[unix.CmsgLen(16):])
		ll, ok := from.(*unix.SockaddrLinklayer)
		if ok && ll.Pkttype != unix.PACKET_OUTGOING && n > 34 && b[12] == 8 && b[13] == 0 {
			return b[:n]
		}
	}
}

// joined returns the packet that the next two frames are the fragments of.
func (w *wire) joined() dptest.Packet {
	w.fx.t.Helper()
	frames := [][]byte{w.next(), w.next()}
	p, err := dptest.Join(frames)
	if err != nil {
		w.fx.t.Fatalf("%v\n%x", err, frames)
	}
	return p
}

// A VIP answers no ping in fragments, which only a stack could put together (docs/forwarding.md).
func TestPingInFragments(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		ping := icmp(8, 128)(fx)
		ping.Payload = make([]byte, 2000)
		for i, frame := range ping.Fragments(1, 1400) {
			want := []string{"unsupported_protocol", "fragment_not_found"}[i]
			if r := fx.run(frame); r.did != "dropped" || r.reason != want {
				t.Errorf("fragment %d: %s: %s; want %s", i, r.did, r.reason, want)
			}
		}
	})
}

// With an MTU of 9000 XDP is attached natively, and frames of several buffers are forwarded and answered.
func TestJumboFrames(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixtureWith(t, h, v6, nil, func(fx *fixture) {
			for _, host := range []*lab.Host{fx.host, fx.peer} {
				err := host.Do(func() error {
					nic, err := netlink.LinkByName("eth0")
					return errors.Join(err, netlink.LinkSetMTU(nic, 9000))
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		})
		established(fx)
		// BPF_PROG_TEST_RUN gives XDP one buffer for up to 3520 bytes, and takes up to about 3700 for tc.
		const size = 3560
		run := func(p dptest.Packet) dptest.Packet {
			frame, did := p.Frame(), "passed"
			out := frame
			if h == hookXDP {
				did, out = fx.runXDP(frame)
			}
			if did == "passed" {
				did, out = fx.runTC(out)
			}
			answer, err := dptest.Parse(out)
			if did != "sent" || err != nil {
				t.Errorf("%s: %v", did, err)
			}
			return answer
		}
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = make([]byte, size)
		for i := range big.Payload {
			big.Payload[i] = byte(i * 7)
		}
		was := fx.bytes()
		if err := sentOn(fx, big, run(big)); err != nil {
			t.Error("forwarded with other contents or headers") // err has all of them
		}
		if got := fx.bytes() - was; got != uint64(len(big.Frame())) {
			t.Errorf("%d bytes were counted; want %d", got, len(big.Frame()))
		}
		big.Src = fx.at("client", 40001)
		if err := aReset(fx, big, run(big)); err != nil {
			t.Error(err)
		}
		ping := icmp(8, 128)(fx)
		ping.Payload = big.Payload
		if err := echoReply(fx, ping, run(ping)); err != nil {
			t.Error("the echo reply has other contents")
		}
	})
}

// Where XDP sends out of the ingress interface, frames of several buffers do not pass tc.
func TestJumboFramesByXDP(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookXDP, v6, nil)
		established(fx)
		var objects *bpf.Objects
		fx.do(func() (err error) {
			o := fx.o
			o.Interfaces = []string{"lo"} // has a large MTU and is no veth
			objects, _, err = load(o, fx.d.pins.Dir)
			return err
		})
		t.Cleanup(func() { objects.Close() })
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = make([]byte, 8000)
		for i := range big.Payload {
			big.Payload[i] = byte(i * 7)
		}
		nic := func(mtu int) {
			fx.do(func() error {
				nic, err := netlink.LinkByName("eth0")
				return errors.Join(err, netlink.LinkSetMTU(nic, mtu))
			})
		}
		frame := big.Frame()
		nic(1500)
		did, out := fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		if did != "passed" || string(out) != string(frame) {
			t.Errorf("too big for the MTU: %s by XDP; want passed to tc, which answers", did)
		}
		nic(9000)
		did, out = fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		p, err := dptest.Parse(out)
		if did != "sent" || err != nil || sentOn(fx, big, p) != nil {
			t.Errorf("%s, %v", did, err)
		}
	}
}

// Packets of servers count as replies, including on the fast path.
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
			if got.Packets != 13 || got.Replies != 11 || got.Flows != 1 {
				t.Errorf("%v: %+v", f, got)
			}
		}
	})
}

// bytes are those counted for the frontend.
func (fx *fixture) bytes() (n uint64) {
	fx.t.Helper()
	s := must.Get(fx.d.Stats())(fx.t)
	for _, f := range s.Frontends {
		n += f.Bytes
	}
	return n
}

// sentByTunnel runs a packet of 1380 bytes of payload and returns what was sent, from the IP header on.
func (fx *fixture) sentByTunnel() []byte {
	fx.t.Helper()
	p := tcp(dptest.ACK)(fx)
	p.Payload = make([]byte, 1380)
	r := fx.run(p.Frame())
	if r.did != "sent" || r.out.Inner == nil {
		fx.t.Fatalf("%s: %s", r.did, r.reason)
	}
	return r.frame[14:]
}

// report is an ICMP error of a router with a path MTU, which quotes these bytes.
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

// A path MTU is believed when the quoted packet may be one of ours, and never below what the family demands.
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
			quote := func(part []byte, change func(q []byte)) []byte {
				q := append([]byte(nil), part...)
				change(q)
				return q
			}
			same := func([]byte) {}
			inner := head
			if encap == lb.EncapGUE {
				inner += 12
			}
			vipAt := inner + 19 // the last byte of the inner destination
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
				{"below the minimum", 1279, quote(long, same), false},
				{"not below the packet", uint32(len(sent)), quote(long, same), false},
				{"from another source", 1300, quote(long, func(q []byte) {
					other := fx.addr("elsewhere").AsSlice()
					copy(q[head-2*len(other):], other)
				}), false},
				{"to another server", 1300, quote(long, func(q []byte) { q[head-1] ^= 1 }), false},
				{"of another protocol", 1300, quote(long, func(q []byte) { q[protoAt] = dptest.TCP }), false},
				{"to another VIP", 1300, quote(long, func(q []byte) { q[vipAt] ^= 1 }), false},
				{"not by GUE", 1300, quote(long, func(q []byte) {
					if encap == lb.EncapGUE {
						q[head] = 0x30 // source port 12288
					} else {
						q[vipAt] ^= 2
					}
				}), false},
				{"a short quote", 1350, quote(short, same), false},
				{"a long quote", 1320, quote(long, same), true},
				{"larger than before", 1400, quote(long, same), false},
				{"lower than before", 1310, quote(long, same), true},
			} {
				was := learned()
				r := fx.run(fx.report(c.mtu, c.quote).Frame())
				want := map[bool]string{false: "not_ours", true: "pmtu_learned"}[c.believed]
				now := learned()
				if r.reason == "unsupported_protocol" { // dropped: its destination is a VIP
					want = r.reason
				}
				if r.reason != want || c.believed != (now.Mtu == c.mtu) || !c.believed && now != was {
					t.Errorf("%s, %s: %s: %s; the MTU was %d and is %d",
						encap, c.name, r.did, r.reason, was.Mtu, now.Mtu)
				}
			}
		}
	})
}

// A path MTU never makes an IPv6 packet of 1280 bytes too big: its sender cannot make it smaller.
func TestSmallestPacketIsNeverTooBig(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, true, nil)
		fx.serve(tunnel(lb.EncapIPIP), "b1")
		path := bpf.PMTU{Seen: uint64(bpf.Uptime()), Mtu: 1280}
		must.Do(t, fx.d.objects.SyPmtu.Put(bpf.ToAddr(fx.addr("b1")), path))
		p := tcp(dptest.ACK)(fx)
		for size, want := range map[int]string{1280: "sent forwarded", 1281: "sent too_big"} {
			p.Payload = make([]byte, size-60)
			r := fx.run(p.Frame())
			if got := fmt.Sprint(r.did, " ", r.reason); got != want {
				t.Errorf("%s: %d bytes: %s; want %s", h, size, got, want)
			}
			if r.reason == "too_big" && (r.out.Rest != 1280 || binary.BigEndian.Uint16(r.out.Payload[4:]) != 1241) {
				t.Errorf("%s: answered with MTU %d", h, r.out.Rest)
			}
		}
	}
}
