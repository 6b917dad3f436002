package datapath

import (
	"encoding/binary"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// The only place where Go's addresses and ports become those of C. IPv4 is carried as ::ffff:a.b.c.d.

func toAddr(a netip.Addr) (out syAddr) {
	if !a.IsValid() {
		return out
	}
	b := a.As16()
	for i := range out.W {
		out.W[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// fromAddr returns the zero Addr for the zero address, which no backend has.
func fromAddr(a syAddr) netip.Addr {
	if a == (syAddr{}) {
		return netip.Addr{}
	}
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// swap turns a port from host to network byte order, and back.
func swap(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

func toFrontendKey(f lb.Frontend) syFrontendKey {
	return syFrontendKey{Vip: toAddr(f.VIP), Port: swap(f.Port), Proto: uint8(f.Protocol)}
}

func fromFrontendKey(k syFrontendKey) lb.Frontend {
	return lb.Frontend{VIP: fromAddr(k.Vip), Port: swap(k.Port), Protocol: lb.Protocol(k.Proto)}
}

func toBackend(at netip.AddrPort, snat netip.Addr) syBackend {
	return syBackend{Addr: toAddr(at.Addr()), Snat: toAddr(snat), Port: swap(at.Port())}
}

func fromBackend(b syBackend) netip.AddrPort {
	return netip.AddrPortFrom(fromAddr(b.Addr), swap(b.Port))
}

// twinKey is where the other direction of a flow is found (bpf/flow.h).
func twinKey(k syFlowKey, f syFlow) syFlowKey {
	return syFlowKey{T: reversed(f.T), Proto: k.Proto}
}

func reversed(t syTuple) syTuple {
	return syTuple{Src: t.Dst, Dst: t.Src, Sport: t.Dport, Dport: t.Sport}
}
