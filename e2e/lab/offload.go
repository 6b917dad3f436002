package lab

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of the ethtool ioctl (include/uapi/linux/ethtool.h).
const (
	ethtoolSetTxChecksum = 0x17
	ethtoolSetGRO        = 0x2c
)

// ethtoolValue is struct ethtool_value.
type ethtoolValue struct{ cmd, data uint32 }

// ifreq is struct ifreq with the pointer that SIOCETHTOOL requires.
type ifreq struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

// SoftwareChecksums is like LinkOptions.SoftwareChecksums, but for one interface.
func (h *Host) SoftwareChecksums(dev string) error {
	return h.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := ethtool(fd, dev, ethtoolValue{ethtoolSetTxChecksum, 0}); err != nil {
			return fmt.Errorf("turn transmit checksum offload off: %w", err)
		}
		if err := ethtool(fd, dev, ethtoolValue{ethtoolSetGRO, 1}); err != nil {
			return fmt.Errorf("turn generic receive offload on: %w", err)
		}
		return nil
	})
}

// ethtool calls the SIOCETHTOOL ioctl. x/sys/unix supports only its ETHTOOL_GDRVINFO.
func ethtool(fd int, dev string, v ethtoolValue) error {
	req := ifreq{data: unsafe.Pointer(&v)}
	copy(req.name[:unix.IFNAMSIZ-1], dev)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	runtime.KeepAlive(&v)
	if errno != 0 {
		return errno
	}
	return nil
}
