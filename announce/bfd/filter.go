package bfd

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The kernel drops packets that are not from a neighbor. Any host can flood the ports, and such packets must neither
// fill the sockets' queues nor take the thread's time. While a session is up, the kernel also drops packets with a low
// TTL or without our discriminator, so an attacker who forges the neighbor's address must know the discriminator.
// Before that, these packets are accepted because they show why the session does not come up.

// receiveBuffer is the buffer size of a receiving socket, in bytes, for a few thousand packets.
const receiveBuffer = 4 << 20

// networkHeader is the offset of the IP header for a load (SKF_NET_OFF).
const networkHeader = 0xfff00000

// yourDiscriminator is the offset of Your Discriminator from the UDP header, where loads start.
const yourDiscriminator = 8 + 8

// filterMax is the maximum number of instructions. If the neighbors need more, the socket accepts all packets.
const filterMax = 4096

// attach sets the sockets' filters. m.mu is held.
func (m *Monitor) attach() {
	for _, d := range m.devices {
		for _, l := range d.listeners {
			program, err := bpf.Assemble(m.filter(l))
			if err == nil {
				err = unix.SetsockoptSockFprog(l.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{
					Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0])),
				})
			}
			if err != nil {
				m.o.Log.Warn("packets from unknown senders not filtered by the kernel", "err", err)
			}
		}
	}
}

// filter returns the filter of a socket, which accepts packets from the neighbors of its sessions.
func (m *Monitor) filter(l listener) (program []bpf.Instruction) {
	ttl, source := bpf.LoadAbsolute{Off: networkHeader + 8, Size: 1}, uint32(networkHeader+12)
	if l.family == unix.AF_INET6 {
		ttl, source = bpf.LoadAbsolute{Off: networkHeader + 7, Size: 1}, networkHeader+8
	}
	for _, s := range m.sessions {
		if s.Multihop != l.multihop || s.family() != l.family {
			continue
		}
		var checks []bpf.Instruction
		if s.state == Up {
			checks = []bpf.Instruction{
				ttl, bpf.JumpIf{Cond: bpf.JumpLessThan, Val: uint32(s.lowestTTL()), SkipTrue: 3},
				bpf.LoadAbsolute{Off: yourDiscriminator, Size: 4},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: s.local, SkipTrue: 1},
			}
		}
		address := s.Addr.AsSlice()
		words := len(address) / 4
		for n := range words {
			program = append(program, bpf.LoadAbsolute{Off: source + uint32(4*n), Size: 4}, bpf.JumpIf{
				Cond: bpf.JumpNotEqual, Val: binary.BigEndian.Uint32(address[4*n:]),
				SkipTrue: uint8(2*(words-n-1) + len(checks) + 1),
			})
		}
		program = append(append(program, checks...), bpf.RetConstant{Val: 1 << 16})
	}
	if len(program) >= filterMax {
		return []bpf.Instruction{bpf.RetConstant{Val: 1 << 16}}
	}
	return append(program, bpf.RetConstant{Val: 0})
}

// lowestTTL returns the lowest accepted TTL of the neighbor's packets.
func (s *session) lowestTTL() uint8 {
	if s.Multihop {
		return s.MinTTL
	}
	return maxTTL
}

// dropped returns the number of packets that the kernel has dropped, because of a filter or a full queue. m.mu is held.
func (m *Monitor) dropped() (sum uint64) {
	for _, d := range m.devices {
		for _, l := range d.listeners {
			sum += l.dropped()
		}
	}
	return sum
}

func (l listener) dropped() uint64 {
	var info [unix.SK_MEMINFO_DROPS + 1]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(l.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return uint64(info[unix.SK_MEMINFO_DROPS])
}
