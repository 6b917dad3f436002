package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	filterRounds  = 2
	filterWait    = 600 * time.Millisecond
	filterTargets = 64 // a filter stops many, and a few examples name it
)

// syn is a TCP SYN to a port that does not respond, and what became of it.
type syn struct {
	to   netip.AddrPort
	from netip.AddrPort
	way  path
	// refused: the kernel did not let it out. arrived: an answer reached the interface. received: a socket got it.
	refused, arrived, received bool
}

// filters finds filters on this node that drop what it sends to servers, peers and members that do not respond, or
// their answers. send(2) fails with EPERM if a hook of netfilter or a BPF program drops the packet.
func filters(ctx context.Context, n *Node) ([]lb.Finding, string) {
	silent := n.silent()
	if len(silent) == 0 {
		return nil, "every server, peer and member responds"
	}
	var all []*syn
	const low, high = 32768, 60999 // the kernel's ephemeral ports, which the datapath leaves alone
	port := uint16(low + rand.IntN(high-low))
	for _, to := range silent {
		if p, ok := pathTo(to.Addr()); ok {
			all = append(all, &syn{to: to, from: netip.AddrPortFrom(p.source, port), way: p})
		}
	}
	for _, is4 := range []bool{true, false} {
		some := slices.DeleteFunc(slices.Clone(all), func(s *syn) bool { return s.to.Addr().Is4() != is4 })
		if len(some) == 0 {
			continue
		}
		if err := try(ctx, is4, port, some); err != nil {
			return nil, cannotAsk(err)
		}
	}
	var out, in []fault
	for _, s := range all {
		switch {
		case s.refused:
			out = append(out, fault{s.to.String(), fmt.Sprintf("a filter on this node drops TCP packets to %s", s.to)})
		case s.arrived && !s.received:
			in = append(in, fault{s.to.String(), fmt.Sprintf("%s answers on %s, but this node drops the answer", s.to,
				s.way.nic.Name)})
		}
	}
	return slices.Concat(merged(lb.FoundFiltered, out), merged(lb.FoundAnswersFiltered, in)), ""
}

// silent returns the servers, peers and members that do not respond.
func (n *Node) silent() (all []netip.AddrPort) {
	add := func(to netip.AddrPort) {
		if len(all) < filterTargets && !slices.Contains(all, to) {
			all = append(all, to)
		}
	}
	for _, p := range n.Peers {
		if !p.established() && p.Peer.Zone() == "" && !p.Dynamic {
			add(netip.AddrPortFrom(p.Peer, p.Port))
		}
	}
	for _, to := range n.Away {
		add(to)
	}
	for _, b := range n.Status.Backends {
		if b.State == lb.StateUnhealthy && strings.HasPrefix(b.Reason, lb.NoResponse) {
			add(netip.AddrPortFrom(b.Address, b.Port))
		}
	}
	return all
}

// try sends SYNs of one family from a port. No socket expects the answers, so the kernel resets the connections.
func try(ctx context.Context, is4 bool, port uint16, all []*syn) error {
	protocol := unix.ETH_P_IP
	if !is4 {
		protocol = unix.ETH_P_IPV6
	}
	filter, err := bpf.Assemble(tcpTo(is4, port))
	if err != nil {
		return fmt.Errorf("filter for port %d: %w", port, err)
	}
	raw, err := openTCP(ctx, is4, filter)
	if err != nil {
		return err
	}
	defer raw.Close()
	var mu sync.Mutex // guards arrived and received
	var receiving sync.WaitGroup
	defer receiving.Wait()
	end := soon(ctx, filterRounds*filterWait)
	raw.SetReadDeadline(end.Add(filterWait / 4)) // what has arrived by the end is received later
	receiving.Go(func() {                        // behind the filters
		each(raw, func(from netip.Addr, b []byte) { mark(&mu, all, from, b, func(s *syn) { s.received = true }) })
	})
	opened := map[int]bool{}
	for _, s := range all {
		if opened[s.way.nic.Index] {
			continue
		}
		opened[s.way.nic.Index] = true
		c, err := packet.Listen(&s.way.nic, packet.Datagram, protocol, &packet.Config{Filter: filter})
		if err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		defer c.Close()
		c.SetReadDeadline(end)
		receiving.Go(func() { // before the filters of the IP layer
			each(c, func(_ netip.Addr, b []byte) {
				if from, segment, ok := tcpOf(b); ok {
					mark(&mu, all, from, segment, func(s *syn) { s.arrived = true })
				}
			})
		})
	}
	for range filterRounds {
		for _, s := range all {
			_, err := raw.WriteTo(s.segment(), &net.IPAddr{IP: s.to.Addr().AsSlice()})
			s.refused = errors.Is(err, syscall.EPERM)
		}
		if !pause(ctx, filterWait) {
			break
		}
	}
	receiving.Wait()
	return nil
}

// openTCP opens a raw socket that receives what a filter accepts. All TCP packets of a busy node would overflow it, and
// an answer that is lost looks like one that is dropped.
func openTCP(ctx context.Context, is4 bool, filter []bpf.RawInstruction) (net.PacketConn, error) {
	network := "ip6:tcp"
	if is4 {
		network = "ip4:tcp"
	}
	c, err := new(net.ListenConfig).ListenPacket(ctx, network, "")
	if err != nil {
		return nil, fmt.Errorf("open a raw socket: %w", err)
	}
	if is4 {
		err = ipv4.NewPacketConn(c).SetBPF(filter)
	} else {
		err = ipv6.NewPacketConn(c).SetBPF(filter)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("filter a raw socket: %w", err)
	}
	return c, nil
}

// tcpTo returns a filter that accepts TCP packets to a port, without IPv6 extension headers. Offsets are from the IP
// header, where packets begin on all sockets here except on raw ones of IPv6.
func tcpTo(is4 bool, port uint16) []bpf.Instruction {
	const netOff = 1<<32 - 0x100000 // SKF_NET_OFF of linux/filter.h
	protocol := bpf.LoadAbsolute{Off: netOff + 9, Size: 1}
	toPort := []bpf.Instruction{bpf.LoadMemShift{Off: netOff}, bpf.LoadIndirect{Off: netOff + 2, Size: 2}}
	if !is4 {
		protocol.Off = netOff + 6
		toPort = []bpf.Instruction{bpf.LoadAbsolute{Off: netOff + ipv6Header + 2, Size: 2}}
	}
	filter := append([]bpf.Instruction{
		protocol,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_TCP, SkipFalse: uint8(len(toPort) + 2)},
	}, toPort...)
	return append(filter,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(port), SkipFalse: 1},
		bpf.RetConstant{Val: 1 << 16}, bpf.RetConstant{})
}

// each calls f with each packet until the deadline of the socket.
func each(c net.PacketConn, f func(from netip.Addr, b []byte)) {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		var sender netip.Addr
		if a, ok := from.(*net.IPAddr); ok {
			sender, _ = netip.AddrFromSlice(a.IP)
		}
		f(sender.Unmap(), b[:n])
	}
}

// mark calls f with the SYN that a segment answers.
func mark(mu *sync.Mutex, all []*syn, from netip.Addr, segment []byte, f func(*syn)) {
	if len(segment) < 4 {
		return
	}
	source, to := binary.BigEndian.Uint16(segment), binary.BigEndian.Uint16(segment[2:])
	for _, s := range all {
		if s.to == netip.AddrPortFrom(from, source) && s.from.Port() == to {
			mu.Lock()
			f(s)
			mu.Unlock()
		}
	}
}

// tcpOf returns the sender and the TCP segment of an IP packet.
func tcpOf(b []byte) (from netip.Addr, segment []byte, ok bool) {
	switch {
	case len(b) >= ipv4Header && b[0]>>4 == 4 && b[9] == unix.IPPROTO_TCP && len(b) >= int(b[0]&15)*4:
		return netip.AddrFrom4([4]byte(b[12:16])), b[int(b[0]&15)*4:], true
	case len(b) >= ipv6Header && b[0]>>4 == 6 && b[6] == unix.IPPROTO_TCP:
		return netip.AddrFrom16([16]byte(b[8:24])), b[ipv6Header:], true
	}
	return from, nil, false
}

// segment returns the SYN without the IP header.
func (s *syn) segment() []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, s.from.Port())
	binary.BigEndian.PutUint16(b[2:], s.to.Port())
	binary.BigEndian.PutUint32(b[4:], rand.Uint32())
	b[12], b[13] = 5<<4, 2 // no options; SYN
	binary.BigEndian.PutUint16(b[14:], 1024)
	sum := checksum.Internet(pseudo(s.from.Addr(), s.to.Addr(), len(b), unix.IPPROTO_TCP), b)
	binary.BigEndian.PutUint16(b[16:], sum)
	return b
}
