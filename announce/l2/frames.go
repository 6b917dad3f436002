package l2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// notForUs drops frames that a packet socket receives although they are for another host: unicast to another MAC
// address while the interface is promiscuous, and frames of a VLAN without an interface here. The kernel marks the
// latter as for another host and removes the VLAN tag, so replies would lack the tag.
var notForUs = []bpf.Instruction{
	bpf.LoadExtension{Num: bpf.ExtType},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.PACKET_OTHERHOST, SkipTrue: 1},
	bpf.RetConstant{Val: 0},
}

// listen opens a packet socket for frames of an EtherType that are for this host and pass filter.
func listen(ifi *net.Interface, etherType int, filter []bpf.Instruction) (*packet.Conn, error) {
	program, err := bpf.Assemble(append(append([]bpf.Instruction{}, notForUs...), filter...))
	if err != nil {
		return nil, fmt.Errorf("assemble the filter: %w", err)
	}
	return packet.Listen(ifi, packet.Raw, etherType, &packet.Config{Filter: program})
}

// arpSocket reads and writes ARP packets. Unlike an *arp.Client, it does not need an IPv4 address on the interface.
type arpSocket struct{ net.PacketConn }

func openARP(ifi *net.Interface) (arpConn, error) {
	c, err := listen(ifi, unix.ETH_P_ARP, []bpf.Instruction{bpf.RetConstant{Val: 1500}})
	if err != nil {
		return nil, err
	}
	return arpSocket{c}, nil
}

// Read returns the next packet. After errors other than *net.OpError, the next packet can be read.
func (s arpSocket) Read() (*arp.Packet, error) {
	var b [128]byte
	n, _, err := s.ReadFrom(b[:])
	if err != nil {
		return nil, err
	}
	return parseARP(b[:n])
}

func parseARP(frame []byte) (*arp.Packet, error) {
	var f ethernet.Frame
	var p arp.Packet
	if err := f.UnmarshalBinary(frame); err != nil {
		return nil, err
	}
	if err := p.UnmarshalBinary(f.Payload); err != nil {
		return nil, err
	}
	if len(p.SenderHardwareAddr) != 6 || !p.SenderIP.Is4() {
		return nil, errors.New("not ARP for IPv4 on Ethernet")
	}
	return &p, nil
}

func (s arpSocket) WriteTo(p *arp.Packet, to net.HardwareAddr) error {
	payload, err := p.MarshalBinary()
	if err != nil {
		return err
	}
	f := ethernet.Frame{
		Destination: to, Source: p.SenderHardwareAddr, EtherType: ethernet.EtherTypeARP, Payload: payload,
	}
	frame, err := f.MarshalBinary()
	if err == nil {
		_, err = s.PacketConn.WriteTo(frame, &packet.Addr{HardwareAddr: to})
	}
	return err
}

// ndpFrames sends neighbour messages as Ethernet frames, because the routing table might have no route to the
// requesting host.
type ndpFrames struct {
	ifi  *net.Interface
	conn *packet.Conn
	*groups
}

// send sends a message to a host or multicast address with MAC address mac.
func (n *ndpFrames) send(m ndp.Message, from, to netip.Addr, mac net.HardwareAddr) error {
	frame, err := neighbourFrame(m, n.ifi.HardwareAddr, mac, from, to)
	if err == nil {
		_, err = n.conn.WriteTo(frame, &packet.Addr{HardwareAddr: mac})
	}
	return err
}

func (n *ndpFrames) Close() error { return errors.Join(n.groups.Close(), n.conn.Close()) }

func neighbourFrame(m ndp.Message, sender, receiver net.HardwareAddr, from, to netip.Addr) ([]byte, error) {
	icmp, err := ndp.MarshalMessageChecksum(m, from, to)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, 0, ethernetHeader+ipv6Header+len(icmp))
	frame = append(append(frame, receiver...), sender...)
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_IPV6)
	frame = append(frame, 0x60, 0, 0, 0)
	frame = binary.BigEndian.AppendUint16(frame, uint16(len(icmp)))
	frame = append(frame, unix.IPPROTO_ICMPV6, ndp.HopLimit)
	frame = append(append(frame, from.AsSlice()...), to.AsSlice()...)
	return append(frame, icmp...), nil
}

// multicastMAC returns the MAC address of an IPv6 multicast address (RFC 2464 §7).
func multicastMAC(group netip.Addr) net.HardwareAddr {
	b := group.As16()
	return net.HardwareAddr{0x33, 0x33, b[12], b[13], b[14], b[15]}
}
