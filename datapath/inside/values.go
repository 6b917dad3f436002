package inside

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// toAddr returns the C form of an address: IPv4 as ::ffff:a.b.c.d.
func toAddr(a netip.Addr) (out prog.Addr) {
	b := a.As16()
	for i := range out.W {
		out.W[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// fromAddr is the inverse of toAddr.
func fromAddr(a prog.Addr) netip.Addr {
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

func toEndpoint(at netip.AddrPort) prog.Endpoint {
	return prog.Endpoint{Addr: toAddr(at.Addr()), Port: bits.ReverseBytes16(at.Port())}
}

func toAllow(group uint32, p netip.Prefix) prog.AllowKey {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	return prog.AllowKey{Prefix: uint32(32 + n), Group: bits.ReverseBytes32(group), Source: toAddr(p.Addr())}
}

func truth(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
