package flow

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Remover removes NAT flows in batches with the program sy_gc, which deletes an entry only if it still belongs to the
// flow that was read (bpf/gc.h).
type Remover struct {
	program *ebpf.Program
	list    bpf.GCList
	added   int
	Removed int
}

// NewRemover returns a Remover for flows that have been idle since before now. With ended it is for ended flows, which
// it removes even if they still have packets.
func NewRemover(program *ebpf.Program, ended bool, now time.Duration) *Remover {
	return &Remover{program: program, list: bpf.GCList{Ended: uint32(bpf.Truth(ended)), Since: bpf.FlowClock(now)}}
}

// Add adds a flow to the list. It flushes the list first if it is full or of another table.
func (r *Remover) Add(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) error {
	if r.list.Items > 0 && r.list.Table != uint32(t.ID) || int(r.list.Items) == len(r.list.Item) {
		if err := r.Flush(); err != nil {
			return err
		}
	}
	r.list.Table = uint32(t.ID)
	r.list.Item[r.list.Items] = bpf.GCItem{Key: k, Backend: f.Backend, Seen: f.F.Seen, Generation: f.F.Generation}
	r.added++
	r.list.Items++
	return nil
}

// Flush removes the listed flows.
func (r *Remover) Flush() error {
	if r.list.Items == 0 {
		return nil
	}
	data := unsafe.Slice((*byte)(unsafe.Pointer(&r.list)), unsafe.Sizeof(r.list))
	n, err := r.program.Run(&ebpf.RunOptions{Data: data})
	r.list.Items = 0
	if err != nil {
		return fmt.Errorf("remove flows: %w", err)
	}
	r.Removed += int(n)
	return nil
}

// Resetter sends TCP resets to clients from the address that they have connected to.
type Resetter struct{ v4, v6 int }

func NewResetter() (*Resetter, error) {
	v4, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		return nil, fmt.Errorf("open a raw socket (CAP_NET_RAW): %w", err)
	}
	v6, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		v6 = -1 // a kernel without IPv6 has no IPv6 flows
	}
	return &Resetter{v4, v6}, nil
}

func (r *Resetter) Close() {
	unix.Close(r.v4)
	if r.v6 >= 0 {
		unix.Close(r.v6)
	}
}

// Reset sends a RST that ends the receiver's side of a connection. seq is the last sequence number that the receiver
// acknowledged, the only one that it accepts without a challenge ACK (RFC 5961 §3.2).
func (r *Resetter) Reset(from, to netip.AddrPort, seq uint32) error {
	packet := resetPacket(from, to, seq)
	var err error
	if to.Addr().Is4() {
		err = unix.Sendto(r.v4, packet, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
	} else {
		err = unix.Sendto(r.v6, packet, 0, &unix.SockaddrInet6{Addr: to.Addr().As16()})
	}
	if err != nil {
		return fmt.Errorf("send a reset to %s: %w", to, err)
	}
	return nil
}

// resetPacket returns an IP packet with a TCP RST (RFC 9293, 3.1).
func resetPacket(from, to netip.AddrPort, seq uint32) []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp[0:], from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	binary.BigEndian.PutUint32(tcp[4:], seq)
	tcp[12], tcp[13] = 5<<4, 4 // header length in words; RST
	pseudo := append(from.Addr().AsSlice(), to.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, unix.IPPROTO_TCP, 0, 20)
	binary.BigEndian.PutUint16(tcp[16:], checksum.Internet(pseudo, tcp))

	if from.Addr().Is4() {
		ip := make([]byte, 20) // the kernel fills in length, id and checksum (raw(7))
		ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_TCP
		copy(ip[12:], from.Addr().AsSlice())
		copy(ip[16:], to.Addr().AsSlice())
		return append(ip, tcp...)
	}
	ip := make([]byte, 40)
	ip[0], ip[5], ip[6], ip[7] = 0x60, 20, unix.IPPROTO_TCP, 64
	copy(ip[8:], from.Addr().AsSlice())
	copy(ip[24:], to.Addr().AsSlice())
	return append(ip, tcp...)
}
