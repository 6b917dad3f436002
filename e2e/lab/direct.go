package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// OwnVIP gives the host an address that others have, too, as servers have that answer clients themselves: on lo, and
// without telling anybody on the wire.
func (h *Host) OwnVIP(vip netip.Addr) error {
	quiet := map[string]string{"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
	return errors.Join(h.Sysctl(quiet), h.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())))
}

// DisownVIP takes the address away.
func (h *Host) DisownVIP(vip netip.Addr) error {
	return h.DeleteAddress("lo", netip.PrefixFrom(vip, vip.BitLen()))
}

// EndIPIP makes the host the end of IPIP tunnels of both families from anybody, in place of the kernel's own devices, which
// not every kernel has. It ends with the host.
func (h *Host) EndIPIP(ctx context.Context) error {
	tun, err := h.tun("ipip")
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
			b := make([]byte, virtioHeader+64<<10)
			for {
				n, _, err := c.ReadFrom(b[virtioHeader:])
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					copy(b, checksumOf(b[virtioHeader:virtioHeader+n]))
					tun.Write(b[:virtioHeader+n]) // what is no packet the kernel refuses
				}
			}
		}()
	}
	return nil
}

const virtioHeader = 10

// checksumOf is the struct virtio_net_hdr of a packet. It says that the checksum is yet to be finished, as a network card
// would: so it is in what never was on a real wire, or was put together by GRO.
func checksumOf(packet []byte) []byte {
	h := make([]byte, virtioHeader)
	var l4 int
	var proto byte
	switch {
	case len(packet) >= 40 && packet[0]>>4 == 6:
		l4, proto = 40, packet[6]
	case len(packet) >= 20 && binary.BigEndian.Uint16(packet[6:])&0x3fff == 0: // no fragment
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

// tun makes an interface whose packets are those written to the file, and closes it with the host.
func (h *Host) tun(name string) (tun io.WriteCloser, err error) {
	err = h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		tun = os.NewFile(uintptr(fd), name)
		req, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	})
	if err == nil {
		err = h.own(tun)
	}
	if err == nil {
		err = h.SetUp(name)
	}
	if err != nil {
		return nil, fmt.Errorf("host %s: interface %s: %w", h, name, err)
	}
	return tun, nil
}
