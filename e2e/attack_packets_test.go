package e2e

import (
	"context"
	byteorder "encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Rates, in packets a second: attacker, balancer, servers and clients share the CPUs.
const (
	attackSYNs    = 20_000
	attackPackets = 8_000
)

// Sources that nobody has.
var (
	invented4 = netip.MustParsePrefix("198.18.0.0/15")
	invented6 = netip.MustParsePrefix("2001:db8:bad::/48")
)

// attacker makes the packets of somebody who knows the addresses and ports of all live connections, but not the content
// of their packets.
type attacker struct {
	rand     *rand.Rand
	balancer lab.Node
	servers  []lab.Node
	live     []netip.AddrPort // clients of live connections to port 9000 of the VIPs
}

// attacks are the kinds of packets, each with a name for the report.
var attacks = []struct {
	name string
	make func(*attacker, netip.Addr) dptest.Packet
}{
	{"UDP from invented sources", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: a.invented(vip), Dst: netip.AddrPortFrom(vip, 5353), Proto: dptest.UDP,
			Payload: []byte("flood")}
	}},
	{"UDP from the addresses of live clients", func(a *attacker, vip netip.Addr) dptest.Packet {
		src := netip.AddrPortFrom(a.client(vip).Addr(), uint16(1024+a.rand.IntN(20000)))
		return dptest.Packet{Src: src, Dst: netip.AddrPortFrom(vip, 5353), Proto: dptest.UDP, Payload: []byte("flood")}
	}},
	{"RST, SYN, FIN and ACK in live connections", func(a *attacker, vip netip.Addr) dptest.Packet {
		flags := []uint8{dptest.RST, dptest.SYN, dptest.FIN | dptest.ACK, dptest.ACK, dptest.RST | dptest.ACK}
		return dptest.Packet{Src: a.client(vip), Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP,
			Flags: flags[a.rand.IntN(len(flags))], Seq: a.rand.Uint32(), Ack: a.rand.Uint32()}
	}},
	{"RST of servers to the balancer", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: netip.AddrPortFrom(a.server(vip), 9000), Proto: dptest.TCP, Flags: dptest.RST,
			Dst: netip.AddrPortFrom(a.self(vip), uint16(1024+a.rand.IntN(64000))), Seq: a.rand.Uint32()}
	}},
	{"ACKs without a connection", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: a.invented(vip), Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP,
			Flags: dptest.ACK, Seq: a.rand.Uint32(), Ack: a.rand.Uint32()}
	}},
	{"ICMP errors that quote live connections", func(a *attacker, vip netip.Addr) dptest.Packet {
		quoted := dptest.Packet{Src: netip.AddrPortFrom(vip, 9000), Dst: a.client(vip), Proto: dptest.TCP,
			Flags: dptest.ACK, Seq: a.rand.Uint32(), Ack: a.rand.Uint32(), Payload: make([]byte, 600)}
		return a.icmpError(vip, quoted)
	}},
	{"ICMP errors that quote tunnels", func(a *attacker, vip netip.Addr) dptest.Packet {
		inner := dptest.Packet{Src: a.client(vip), Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP,
			Flags: dptest.ACK, Payload: make([]byte, 600)}
		quoted := dptest.Packet{Src: netip.AddrPortFrom(a.self(vip), uint16(0xc000+a.rand.IntN(0x3fff))),
			Dst: netip.AddrPortFrom(a.server(vip), 6090), Proto: dptest.UDP, Payload: dptest.GUE(inner)}
		return a.icmpError(vip, quoted)
	}},
	{"GUE with and without keys", func(a *attacker, vip netip.Addr) dptest.Packet {
		inner := dptest.Packet{Src: a.client(vip), Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP,
			Flags: dptest.RST, Seq: a.rand.Uint32()}
		var private []byte
		if a.rand.IntN(2) == 0 {
			private = byteorder.BigEndian.AppendUint64([]byte{0x5d, 0, 0, 0}, a.rand.Uint64())
		}
		return dptest.Packet{Src: netip.AddrPortFrom(a.server(vip), 50000), Dst: netip.AddrPortFrom(a.self(vip), 6090),
			Proto: dptest.UDP, Payload: dptest.GUE(inner, private...)}
	}},
	{"frames for other MAC addresses", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{To: net.HardwareAddr{2, 9, 9, 9, 9, byte(a.rand.IntN(256))}, Src: a.client(vip),
			Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP, Flags: dptest.SYN, Seq: a.rand.Uint32()}
	}},
	{"packets from a VIP", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: netip.AddrPortFrom(vip, 5353), Dst: netip.AddrPortFrom(vip, 5353), Proto: dptest.UDP,
			Payload: []byte("loop")}
	}},
	{"packets from the balancer's address", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: netip.AddrPortFrom(a.self(vip), uint16(1024+a.rand.IntN(64000))),
			Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.TCP, Flags: dptest.SYN, Seq: a.rand.Uint32()}
	}},
	{"IPv4-mapped addresses", func(a *attacker, _ netip.Addr) dptest.Packet {
		mapped := func(p netip.AddrPort) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom16(p.Addr().As16()), p.Port())
		}
		return dptest.Packet{Src: mapped(a.client(vip4)), Dst: mapped(netip.AddrPortFrom(vip4, 9000)),
			Proto: dptest.TCP, Flags: dptest.RST, Seq: a.rand.Uint32()}
	}},
	{"later fragments", func(a *attacker, vip netip.Addr) dptest.Packet {
		return dptest.Packet{Src: a.client(vip), Dst: netip.AddrPortFrom(vip, 9000), Proto: dptest.UDP, Fragment: true,
			Payload: make([]byte, 64)}
	}},
	{"other protocols and ports", func(a *attacker, vip netip.Addr) dptest.Packet {
		protos := []uint8{dptest.UDP, dptest.TCP, dptest.SCTP}
		return dptest.Packet{Src: a.invented(vip), Dst: netip.AddrPortFrom(vip, uint16(1+a.rand.IntN(1023))),
			Proto: protos[a.rand.IntN(3)], Flags: dptest.SYN, Type: 1, Payload: []byte("scan")}
	}},
}

func (a *attacker) invented(like netip.Addr) netip.AddrPort {
	b := invented6.Addr().As16()
	byteorder.BigEndian.PutUint64(b[8:], a.rand.Uint64())
	src := netip.AddrFrom16(b)
	if like.Is4() {
		b := invented4.Addr().As4()
		byteorder.BigEndian.PutUint16(b[2:], uint16(a.rand.Uint32()))
		src = netip.AddrFrom4(b)
	}
	return netip.AddrPortFrom(src, uint16(1+a.rand.IntN(65535)))
}

// client is a live client of this family.
func (a *attacker) client(like netip.Addr) netip.AddrPort {
	for {
		if c := a.live[a.rand.IntN(len(a.live))]; c.Addr().Is4() == like.Is4() {
			return c
		}
	}
}

func addrOf(n lab.Node, like netip.Addr) netip.Addr {
	if like.Is4() {
		return n.V4
	}
	return n.V6
}

func (a *attacker) self(like netip.Addr) netip.Addr { return addrOf(a.balancer, like) }

func (a *attacker) server(like netip.Addr) netip.Addr {
	return addrOf(a.servers[a.rand.IntN(len(a.servers))], like)
}

// icmpError is an error to the sender of a packet: too big, unreachable or time exceeded.
func (a *attacker) icmpError(vip netip.Addr, quoted dptest.Packet) dptest.Packet {
	p := dptest.Packet{Src: a.invented(vip), Dst: netip.AddrPortFrom(quoted.Src.Addr(), 0), Proto: dptest.ICMP,
		Rest: uint32(68 + a.rand.IntN(1432)), Payload: quoted.Frame()[14:]}
	kinds := [][2]uint8{{3, 4}, {3, 3}, {3, 2}, {11, 0}}
	if vip.Is6() {
		p.Proto, kinds = dptest.ICMPv6, [][2]uint8{{2, 0}, {1, 4}, {3, 0}, {4, 1}}
	}
	kind := kinds[a.rand.IntN(len(kinds))]
	p.Type, p.Code = kind[0], kind[1]
	return p
}

// attack sends packets of all kinds from the router until ctx ends. The function that it returns tells how many.
func (s *site) attack(t *testing.T, ctx context.Context, all *sync.WaitGroup, v *victims) (sent func() string) {
	t.Helper()
	balancer := s.Balancers[0]
	var to net.HardwareAddr
	must.Do(t, balancer.Do(func() error {
		nic, err := net.InterfaceByName("eth0")
		if err == nil {
			to = nic.HardwareAddr
		}
		return err
	}))
	socket, index := -1, 0
	must.Do(t, s.Topology.Router.Do(func() (err error) {
		nic, err := net.InterfaceByName(balancer.Port)
		if err == nil {
			index = nic.Index
			socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		}
		return err
	}))
	a := &attacker{rand: rand.New(rand.NewPCG(1, 2)), balancer: balancer, servers: s.Servers}
	for _, c := range v.long {
		a.live = append(a.live, c.Clients()...)
	}
	y := &tally{n: make([]atomic.Int64, len(attacks))}
	for _, x := range attacks {
		y.names = append(y.names, x.name)
	}
	all.Go(func() {
		defer unix.Close(socket)
		if err := a.send(ctx, socket, index, to, y); err != nil {
			t.Errorf("attack: %v", err)
		}
	})
	return y.String
}

// send sends attackPackets a second to a MAC address.
func (a *attacker) send(ctx context.Context, socket, index int, to net.HardwareAddr, y *tally) error {
	const perSecond = 50
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for range attackPackets / perSecond {
			kind, vip := a.rand.IntN(len(attacks)), vips[a.rand.IntN(len(vips))]
			p := attacks[kind].make(a, vip)
			if p.To == nil {
				p.To = to
			}
			err := unix.Sendto(socket, p.Frame(), 0, &unix.SockaddrLinklayer{Ifindex: index})
			if err != nil && err != unix.ENOBUFS {
				return fmt.Errorf("%s: %w", attacks[kind].name, err)
			}
			y.n[kind].Add(1)
		}
	}
}
