package guard

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// checkDevice returns an error if an accepted connection arrived on an interface other than device. The kernel stores
// the interface: tcp_v6_syn_recv_sock and tcp_v4_syn_recv_sock set np->mcast_oif and inet->mc_index.
func checkDevice(fd int, is4 bool, device string) error {
	level, enable, option := unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, unix.IPV6_2292PKTOPTIONS
	if is4 {
		level, enable, option = unix.IPPROTO_IP, unix.IP_PKTINFO, unix.IP_PKTOPTIONS
	}
	if err := unix.SetsockoptInt(fd, level, enable, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	defer unix.SetsockoptInt(fd, level, enable, 0) // otherwise the kernel copies each packet
	var buffer [256]byte
	size := uint32(len(buffer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&buffer)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return os.NewSyscallError("getsockopt", errno)
	}
	messages, err := unix.ParseSocketControlMessage(buffer[:size])
	if err != nil {
		return err
	}
	index, offset := 0, 16 // struct in6_pktinfo: the index follows the address
	if is4 {
		offset = 0 // struct in_pktinfo begins with the index
	}
	for _, m := range messages {
		if len(m.Data) >= offset+4 && int(m.Header.Level) == level {
			index = int(binary.NativeEndian.Uint32(m.Data[offset:]))
			break
		}
	}
	arrived, err := net.InterfaceByIndex(index)
	if err != nil {
		return fmt.Errorf("find the interface of the connection: %w", err)
	}
	if arrived.Name != device {
		return fmt.Errorf("the peer connects through %s, but device is %s", arrived.Name, device)
	}
	return nil
}
