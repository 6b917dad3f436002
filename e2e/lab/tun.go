package lab

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// TunHeader is the size of the struct virtio_net_hdr before each packet of a TUN or TAP interface.
const TunHeader = 10

// Tun adds a TUN or TAP interface (unix.IFF_TUN or IFF_TAP) that is up. Reads of its file return what it sends, and it
// receives what is written. Each packet follows a struct virtio_net_hdr. The host's Close closes the file, which ends
// the interface.
func (h *Host) Tun(name string, mode uint16) (tun *os.File, err error) {
	err = h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		req, err := unix.NewIfreq(name)
		if err == nil {
			req.SetUint16(mode | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
		}
		if err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		tun = os.NewFile(uintptr(fd), name) // after TUNSETIFF, which polling needs
		return nil
	})
	if err == nil {
		err = h.Own(tun)
	}
	if err == nil {
		err = h.SetUp(name)
	}
	if err != nil {
		return nil, fmt.Errorf("host %s: interface %s: %w", h, name, err)
	}
	return tun, nil
}

// Offload makes a TUN or TAP interface send packets with incomplete checksums, and segments to be split (TUN_F_CSUM,
// TUN_F_TSO4, TUN_F_TSO6), as virtual machines ask.
func Offload(tun *os.File) error {
	raw, err := tun.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, 1|2|4) })
	return errors.Join(err, failed)
}

// Cable passes what each of two TUN or TAP interfaces sends to the other, as a virtual machine's monitor does, until a
// file is closed.
func Cable(a, b *os.File) {
	pass := func(to, from *os.File) {
		packet := make([]byte, TunHeader+1<<16)
		for {
			n, err := from.Read(packet)
			if err != nil {
				return
			}
			_, _ = to.Write(packet[:n]) // what cannot be sent is lost, as on a wire
		}
	}
	go pass(a, b)
	go pass(b, a)
}
