package traffic

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// OwnVIP adds a VIP to h for direct server return. Other hosts have the same address, so it is on lo and invisible to
// ARP on the link (arp_ignore, arp_announce: Documentation/networking/ip-sysctl.rst).
func OwnVIP(h *lab.Host, vip netip.Addr) error {
	quiet := map[string]string{"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
	return errors.Join(h.Sysctl(quiet), h.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())))
}

// DisownVIP removes the VIP.
func DisownVIP(h *lab.Host, vip netip.Addr) error {
	return h.DeleteAddress("lo", netip.PrefixFrom(vip, vip.BitLen()))
}

// EndIPIP makes h decapsulate IPIP in both families from any source until the host is closed. It replaces the kernel's
// tunnel devices, which some kernels lack.
func EndIPIP(ctx context.Context, h *lab.Host) error {
	tun, err := h.Tun("ipip", unix.IFF_TUN)
	if err != nil {
		return err
	}
	for _, network := range []string{"ip4:4", "ip4:41", "ip6:4", "ip6:41"} {
		any := "0.0.0.0"
		if network[2] == '6' {
			any = "::"
		}
		c, err := h.ListenPacket(ctx, network, any)
		if err != nil {
			return err
		}
		go func() {
			b := make([]byte, lab.TunHeader+64<<10)
			for {
				n, _, err := c.ReadFrom(b[lab.TunHeader:])
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					copy(b, checksumOf(b[lab.TunHeader:lab.TunHeader+n]))
					tun.Write(b[:lab.TunHeader+n]) // the kernel rejects anything that is not a packet
				}
			}
		}()
	}
	return nil
}

// checksumOf returns the struct virtio_net_hdr for a packet. It marks the TCP or UDP checksum as partial
// (CHECKSUM_PARTIAL), because packets from a veth pair or GRO have no complete checksum.
func checksumOf(packet []byte) []byte {
	h := make([]byte, lab.TunHeader)
	var l4 int
	var proto byte
	switch {
	case len(packet) >= 40 && packet[0]>>4 == 6:
		l4, proto = 40, packet[6]
	case len(packet) >= 20 && binary.BigEndian.Uint16(packet[6:])&0x3fff == 0: // not a fragment
		l4, proto = int(packet[0]&15)*4, packet[9]
	}
	offset, ok := map[byte]uint16{unix.IPPROTO_TCP: 16, unix.IPPROTO_UDP: 6}[proto]
	if ok {
		h[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
		binary.NativeEndian.PutUint16(h[6:], uint16(l4))
		binary.NativeEndian.PutUint16(h[8:], offset)
	}
	return h
}
