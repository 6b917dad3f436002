package members

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// networkHeader is the offset of the IP header for a load (SKF_NET_OFF). filterMax is the maximum number of
// instructions; for more members, no filter is attached.
const (
	networkHeader = 0xfff00000
	filterMax     = 4096
)

// filter makes the kernel drop datagrams from hosts that are not members. Otherwise, any host's flood could fill the
// socket's queue, and members whose messages are lost would seem to have failed.
func (t *transport) filter(peers []netip.Addr) error {
	program, err := bpf.Assemble(only(peers))
	if err != nil {
		return fmt.Errorf("assemble the filter: %w", err)
	}
	raw, err := t.udp.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = attach(int(fd), program) })
	if err != nil {
		return err
	}
	return failed
}

func attach(fd int, program []bpf.RawInstruction) error {
	if len(program) >= filterMax {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		if errors.Is(err, unix.ENOENT) { // there is no filter
			return nil
		}
		return err
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{
		Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0])),
	})
}

// only returns a filter that accepts datagrams from these addresses of one family.
func only(peers []netip.Addr) (program []bpf.Instruction) {
	for _, a := range peers {
		source, address := uint32(networkHeader+12), a.AsSlice()
		if a.Is6() {
			source = networkHeader + 8
		}
		words := len(address) / 4
		for n := range words {
			program = append(program, bpf.LoadAbsolute{Off: source + uint32(4*n), Size: 4}, bpf.JumpIf{
				Cond: bpf.JumpNotEqual, Val: binary.BigEndian.Uint32(address[4*n:]), SkipTrue: uint8(2*(words-n-1) + 1),
			})
		}
		program = append(program, bpf.RetConstant{Val: 1 << 16})
	}
	return append(program, bpf.RetConstant{Val: 0})
}
