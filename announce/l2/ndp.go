package l2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
	"github.com/steelyard-lb/steelyard/lb"
)

var allNodes = netip.MustParseAddr("ff02::1")

// ndpSocket reads and sends neighbour messages.
type ndpSocket struct {
	ifi    *net.Interface
	source netip.Addr // a link-local address of the interface, or zero if it has none
	conn   ndpConn
	in     net.PacketConn
}

const (
	ethernetHeader = 14
	ipv6Header     = 40
	icmpSolicit    = 135
	icmpAdvertise  = 136
)

// neighbourFilter accepts only ICMPv6 solicitations and advertisements with a hop limit of 255. Others were routed and
// are not from a neighbour (RFC 4861 §7.1).
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

// openNDP opens the sockets. It fails if the interface has no IPv6 address. Without a link-local address, messages are
// sent from the VIP.
func openNDP(ifi *net.Interface) (*ndpSocket, error) {
	source, err := linkLocal(ifi.Index)
	if err != nil {
		return nil, err
	}
	conn, err := listen(ifi, unix.ETH_P_IPV6, neighbourFilter)
	if err != nil {
		return nil, fmt.Errorf("listen for solicitations: %w", err)
	}
	return &ndpSocket{ifi, source, &ndpFrames{ifi, conn, newGroups(ifi.Index, conn)}, conn}, nil
}

// linkLocal returns a link-local address of an interface, or zero if it has none.
func linkLocal(index int) (netip.Addr, error) {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return netip.Addr{}, err
	}
	all, err := netlink.AddrList(link, netlink.FAMILY_V6)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list the IPv6 addresses: %w", err)
	}
	if len(all) == 0 {
		return netip.Addr{}, errors.New("the interface has no IPv6 address")
	}
	return usableSource(all), nil
}

// usableSource returns the first link-local address that is known to be unique, or zero if there is none.
func usableSource(all []netlink.Addr) netip.Addr {
	for _, a := range all {
		const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
		if x, ok := netip.AddrFromSlice(a.IP); ok && x.IsLinkLocalUnicast() && a.Flags&unusable == 0 {
			return x
		}
	}
	return netip.Addr{}
}

// close closes the sockets. in and conn may be the same socket.
func (n *ndpSocket) close() {
	n.conn.Close()
	n.in.Close()
}

// neighbourMessage is a solicitation or advertisement with its sender and destination.
type neighbourMessage struct {
	from netip.Addr
	to   netip.Addr
	mac  net.HardwareAddr
	m    ndp.Message
}

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

// parseNeighbour returns nil if a frame is invalid (RFC 4861 §7.1).
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
	to, _ := netip.AddrFromSlice(ip[24:40])
	if icmp[1] != 0 || from.IsMulticast() { // the code must be 0; sources are never multicast (RFC 4291 §2.7)
		return nil
	}
	if s, ok := m.(*ndp.NeighborSolicitation); ok && from.IsUnspecified() && !detectsDuplicates(s, to) {
		return nil
	}
	return &neighbourMessage{from: from, to: to, mac: net.HardwareAddr(bytes.Clone(frame[6:12])), m: m}
}

// detectsDuplicates reports whether a solicitation from the unspecified address is valid, as duplicate address
// detection sends it (RFC 4861 §7.1.1).
func detectsDuplicates(s *ndp.NeighborSolicitation, to netip.Addr) bool {
	group, err := ndp.SolicitedNodeMulticast(s.TargetAddress)
	return err == nil && to == group && !slices.ContainsFunc(s.Options, func(o ndp.Option) bool {
		l, ok := o.(*ndp.LinkLayerAddress)
		return ok && l.Direction == ndp.Source
	})
}

// icmpChecksum returns 0 if the message's checksum is correct (RFC 4443 §2.3).
func icmpChecksum(addresses, icmp []byte) uint16 {
	var rest [8]byte // the rest of the pseudo-header (RFC 8200 §8.1)
	binary.BigEndian.PutUint32(rest[:], uint32(len(icmp)))
	rest[7] = unix.IPPROTO_ICMPV6
	return checksum.Internet(addresses, rest[:], icmp)
}

func (r *responder) readNDP(s *sockets) error {
	b := make([]byte, 2048)
	for {
		var n *neighbourMessage
		var err error
		if !r.a.o.Boundary.Do(lb.PartFrame, r.name, func() { n, err = s.ndp.read(b) }) {
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		r.a.o.Boundary.Do(lb.PartFrame, r.name, func() { r.heardNDP(s, n) })
	}
}

func (r *responder) heardNDP(s *sockets, n *neighbourMessage) {
	own := bytes.Equal(n.mac, s.ifi.HardwareAddr)
	if !own {
		if !r.a.isOwn(n.mac.String()) {
			r.hear()
		}
		r.heardOwn(n.mac, netip.Addr{})
	}
	if vip, mac := n.claim(); !bytes.Equal(mac, s.ifi.HardwareAddr) {
		r.a.conflict(vip, mac.String(), r.name, n.to)
	}
	if m, ok := n.m.(*ndp.NeighborSolicitation); ok && !own {
		isNonce := func(o ndp.Option) bool { _, ok := o.(*ndp.Nonce); return ok }
		if n.from.IsUnspecified() || slices.ContainsFunc(m.Options, isNonce) {
			r.a.probed(m.TargetAddress, s.ifi.HardwareAddr, n.mac, r.name)
		}
		r.solicited(s, n.from, n.mac, m.TargetAddress)
	}
}

// claim returns the address that a message claims, and the MAC address that hosts cache for it. That MAC address comes
// from the option, and may differ from the frame's.
func (n *neighbourMessage) claim() (vip netip.Addr, mac net.HardwareAddr) {
	vip, direction, options := n.from, ndp.Source, []ndp.Option(nil)
	switch m := n.m.(type) {
	case *ndp.NeighborAdvertisement:
		vip, direction, options = m.TargetAddress, ndp.Target, m.Options
	case *ndp.NeighborSolicitation:
		options = m.Options
	}
	for _, o := range options {
		if l, ok := o.(*ndp.LinkLayerAddress); ok && l.Direction == direction {
			return vip, l.Addr
		}
	}
	return vip, n.mac
}

// solicited replies to the sender's MAC address. Duplicate address detection (RFC 4862 §5.4) solicits from the
// unspecified address, so that reply goes to all nodes.
func (r *responder) solicited(s *sockets, from netip.Addr, mac net.HardwareAddr, vip netip.Addr) {
	if r.isSilent() {
		return
	}
	reply := r.a.reply
	if from.IsUnspecified() {
		reply = r.a.claimOwned
	}
	sent, err := reply(vip, func() error {
		if from.IsUnspecified() {
			return s.ndp.advertise(vip, allNodes, multicastMAC(allNodes), false)
		}
		return s.ndp.advertise(vip, from, mac, true)
	})
	if err != nil {
		r.log.Debug("reply not sent", "vip", vip, "err", err)
	} else if sent {
		r.a.metrics.replies.WithLabelValues(r.name).Inc()
	}
}

// advertise sends a neighbour advertisement for vip (RFC 4861 §4.4).
func (n *ndpSocket) advertise(vip, to netip.Addr, mac net.HardwareAddr, solicited bool) error {
	m := &ndp.NeighborAdvertisement{
		Solicited: solicited, Override: true, TargetAddress: vip,
		Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: n.ifi.HardwareAddr}},
	}
	from := n.source
	if !from.IsValid() {
		from = vip
	}
	return n.conn.send(m, from, to, mac)
}
