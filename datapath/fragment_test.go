package datapath

import (
	"bytes"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
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
	fx *fixture
	fd int
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
		if err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: nic.Index})
	})
	if err != nil {
		fx.t.Fatal(err)
	}
	fx.t.Cleanup(func() { unix.Close(w.fd) })
	limit := unix.NsecToTimeval(int64(10 * time.Second))
	if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		fx.t.Fatal(err)
	}
	return w
}

func (w *wire) send(frame []byte) {
	w.fx.t.Helper()
	if _, err := unix.Write(w.fd, frame); err != nil {
		w.fx.t.Fatal(err)
	}
}

// next returns the next frame with IPv4 from the fixture.
func (w *wire) next() []byte {
	w.fx.t.Helper()
	b := make([]byte, 4096)
	for {
		n, from, err := unix.Recvfrom(w.fd, b, 0)
		if err != nil {
			w.fx.t.Fatalf("nothing was sent: %v", err)
		}
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
