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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/sys/unix"
)

// Rates in packets per second. Attacker, load balancer, servers and clients share the CPUs.
const (
	attackSYNs    = 20_000
	attackPackets = 8_000
)

// Sources that do not exist.
var (
	invented4 = netip.MustParsePrefix("198.18.0.0/15")
	invented6 = netip.MustParsePrefix("2001:db8:bad::/48")
)

// attacker generates the packets of an attacker who knows the addresses and ports of all live connections, but not
// their content.
type attacker struct {
	rand     *rand.Rand
	balancer lab.Node
	servers  []lab.Node
	live     []netip.AddrPort // clients of live connections to port 9000 of the VIPs
}

// attacks are the kinds of packets, with names for the report.
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

// client returns a live client of the family of like.
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

// icmpError returns an error to the sender of a packet: too big, unreachable or time exceeded.
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

// attack sends packets of all kinds from the router until ctx ends. sent returns how many it has sent.
func (s *site) attack(t *testing.T, ctx context.Context, all *sync.WaitGroup, v *victims) (sent func() string) {
	t.Helper()
	balancer := s.Balancers[0]
	to := mac(t, balancer.Host)
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
		err := a.send(ctx, socket, index, to, y)
		must.True(t, err == nil, "attack: %v", err)
	})
	return y.String
}

// send sends attackPackets per second to a MAC address.
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

// flood sends SYNs to a VIP from the router, at most rate per second, until ctx ends, and returns how many.
func (s *site) flood(t *testing.T, ctx context.Context, vip netip.Addr, rate int) (sent int) {
	balancer := s.Balancers[0]
	to := mac(t, balancer.Host)
	err := s.Topology.Router.Do(func() error {
		nic, err := net.InterfaceByName(balancer.Port)
		if err != nil {
			return err
		}
		frame := synFrom(to, vip)
		spec := &ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: flooder(frame, nic.Index)}
		prog, err := ebpf.NewProgram(spec)
		if err != nil {
			return err
		}
		defer prog.Close()
		const perSecond = 50
		tick := time.NewTicker(time.Second / perSecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			const liveFrames = 2 // BPF_F_TEST_XDP_LIVE_FRAMES
			n := rate / perSecond
			if _, err := prog.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(n), Flags: liveFrames}); err != nil {
				return err
			}
			sent += n
		}
	})
	must.True(t, err == nil, "flood %s: %v", vip, err)
	return sent
}

// synFrom returns a SYN to this MAC address from 198.18.0.0 or 2001:db8:bad::.
func synFrom(to net.HardwareAddr, vip netip.Addr) []byte {
	p := dptest.Packet{
		To: to, Src: netip.MustParseAddrPort("198.18.0.0:0"), Dst: netip.AddrPortFrom(vip, 9000),
		Proto: dptest.TCP, Flags: dptest.SYN, MSS: 1460,
	}
	if vip.Is6() {
		p.Src = netip.MustParseAddrPort("[2001:db8:bad::]:0")
	}
	f := p.Frame()
	return append(f, make([]byte, (4-len(f)%4)%4)...)
}

// flooder returns an XDP program that gives each packet a random source address and port and redirects it to an
// interface. For each random word it also writes the complement. Their ones' complement sum is 0, so the checksum stays
// valid (RFC 1071).
func flooder(frame []byte, ifindex int) asm.Instructions {
	ins := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnGetPrandomU32.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word),
		asm.LoadMem(asm.R3, asm.R6, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, int32(len(frame))),
		asm.JGT.Reg(asm.R4, asm.R3, "out"),
	}
	for i := 0; i < len(frame); i += 4 {
		word := int64(int32(uint32(frame[i]) | uint32(frame[i+1])<<8 | uint32(frame[i+2])<<16 | uint32(frame[i+3])<<24))
		ins = append(ins, asm.StoreImm(asm.R2, int16(i), word, asm.Word))
	}
	// The offsets of the source address's low half and of the TCP header.
	low, tcp := int16(14+14), int16(14+20)
	if frame[12] == 0x86 {
		low, tcp = 14+22, 14+40
	}
	half := func(at int16, of asm.Register) asm.Instruction { return asm.StoreMem(asm.R2, at, of, asm.Half) }
	ins = append(ins, asm.Mov.Reg(asm.R8, asm.R7), asm.Xor.Imm(asm.R8, -1)) // the complement
	if frame[12] == 0x08 {
		ins = append(ins, half(14+4, asm.R8)) // for the IPv4 header checksum: the identification
	}
	ins = append(ins, half(low, asm.R7), half(tcp+14, asm.R8)) // address and window
	ins = append(ins, asm.RSh.Imm(asm.R7, 16), asm.RSh.Imm32(asm.R8, 16))
	ins = append(ins, half(tcp, asm.R7), half(tcp+18, asm.R8)) // port and urgent pointer
	return append(ins,
		asm.Mov.Imm(asm.R1, int32(ifindex)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"), asm.Return())
}
