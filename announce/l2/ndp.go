package l2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
)

var allNodes = netip.MustParseAddr("ff02::1")

// ndpSocket sends advertisements through one socket and reads solicitations from another (see doc.go).
type ndpSocket struct {
	ifi  *net.Interface
	conn ndpConn
	in   net.PacketConn
}

const (
	ethernetHeader = 14
	ipv6Header     = 40
	icmpSolicit    = 135
	icmpAdvertise  = 136
)

// neighbourFilter accepts only ICMPv6 solicitations and advertisements with a hop limit of 255: others were routed, so
// they are not from a neighbour (RFC 4861 §7.1).
var neighbourFilter = []bpf.Instruction{
	bpf.LoadAbsolute{Off: ethernetHeader + 6, Size: 1}, // next header
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_ICMPV6, SkipTrue: 6},
	bpf.LoadAbsolute{Off: ethernetHeader + 7, Size: 1}, // hop limit
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: ndp.HopLimit, SkipTrue: 4},
	bpf.LoadAbsolute{Off: ethernetHeader + ipv6Header, Size: 1}, // type
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: icmpSolicit, SkipTrue: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: icmpAdvertise, SkipTrue: 1},
	bpf.RetConstant{Val: 1500},
	bpf.RetConstant{Val: 0},
}

func openNDP(ifi *net.Interface) (*ndpSocket, error) {
	// Package net caches the index of a zone name for a minute, which is wrong after the interface was deleted and
	// created again. A numeric zone is not looked up.
	numbered := *ifi
	numbered.Name = strconv.Itoa(ifi.Index)
	conn, _, err := ndp.Listen(&numbered, ndp.LinkLocal)
	if err != nil {
		return nil, fmt.Errorf("open NDP: %w", err)
	}
	filter, err := bpf.Assemble(neighbourFilter)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("assemble the filter: %w", err)
	}
	in, err := packet.Listen(ifi, packet.Raw, unix.ETH_P_IPV6, &packet.Config{Filter: filter})
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("listen for solicitations: %w", err)
	}
	return &ndpSocket{ifi, conn, in}, nil
}

func (n *ndpSocket) close() {
	n.in.Close()
	n.conn.Close()
}

// neighbourMessage is a solicitation or an advertisement with its sender.
type neighbourMessage struct {
	from netip.Addr
	mac  net.HardwareAddr
	m    ndp.Message
}

// read returns the next valid message.
func (n *ndpSocket) read(b []byte) (*neighbourMessage, error) {
	for {
		size, _, err := n.in.ReadFrom(b)
		if err != nil {
			return nil, err
		}
		if m := parseNeighbour(b[:size]); m != nil {
			return m, nil
		}
	}
}

// parseNeighbour returns nil for an invalid frame (RFC 4861 §7.1).
func parseNeighbour(frame []byte) *neighbourMessage {
	if len(frame) < ethernetHeader+ipv6Header {
		return nil
	}
	ip := frame[ethernetHeader:]
	size := int(binary.BigEndian.Uint16(ip[4:]))
	if len(ip) < ipv6Header+size {
		return nil
	}
	icmp := ip[ipv6Header : ipv6Header+size]
	if icmpChecksum(ip[8:40], icmp) != 0 {
		return nil
	}
	m, err := ndp.ParseMessage(icmp)
	if err != nil {
		return nil
	}
	from, _ := netip.AddrFromSlice(ip[8:24])
	return &neighbourMessage{from: from, mac: net.HardwareAddr(bytes.Clone(frame[6:12])), m: m}
}

// icmpChecksum returns 0 for a message with a correct checksum (RFC 4443 §2.3).
func icmpChecksum(addresses, icmp []byte) uint16 {
	var rest [8]byte // of the pseudo-header (RFC 8200 §8.1)
	binary.BigEndian.PutUint32(rest[:], uint32(len(icmp)))
	rest[7] = unix.IPPROTO_ICMPV6
	return checksum.Internet(addresses, rest[:], icmp)
}

// readNDP replies to solicitations until the socket is closed.
func (r *responder) readNDP(s *sockets) error {
	b := make([]byte, 2048)
	for {
		n, err := s.ndp.read(b)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		if bytes.Equal(n.mac, s.ifi.HardwareAddr) {
			continue
		}
		switch m := n.m.(type) {
		case *ndp.NeighborAdvertisement:
			r.a.conflict(m.TargetAddress, n.mac.String(), r.name)
		case *ndp.NeighborSolicitation:
			isNonce := func(o ndp.Option) bool { _, ok := o.(*ndp.Nonce); return ok }
			if n.from.IsUnspecified() || slices.ContainsFunc(m.Options, isNonce) {
				r.a.probed(m.TargetAddress, s.ifi.HardwareAddr, n.mac, r.name)
			}
			r.solicited(s, n.from, m.TargetAddress)
		}
	}
}

// solicited replies to the sender. Duplicate address detection (RFC 4862 §5.4) solicits from the unspecified address;
// that reply goes to all nodes.
func (r *responder) solicited(s *sockets, from, vip netip.Addr) {
	sent, err := r.a.reply(vip, func() error {
		if from.IsUnspecified() {
			return s.ndp.advertise(vip, allNodes, false)
		}
		return s.ndp.advertise(vip, from, true)
	})
	if err != nil {
		r.log.Debug("reply not sent", "vip", vip, "err", err)
	} else if sent {
		r.a.metrics.replies.WithLabelValues(r.name).Inc()
	}
}

// advertise sends a neighbour advertisement for vip (RFC 4861 §4.4).
func (n *ndpSocket) advertise(vip, to netip.Addr, solicited bool) error {
	m := &ndp.NeighborAdvertisement{
		Solicited: solicited, Override: true, TargetAddress: vip,
		Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: n.ifi.HardwareAddr}},
	}
	return n.conn.WriteTo(m, &ipv6.ControlMessage{HopLimit: ndp.HopLimit, IfIndex: n.ifi.Index}, to)
}
