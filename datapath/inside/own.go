package inside

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// own is this node's addresses, and the source of packets by interface.
type own struct {
	addrs   map[netip.Addr]bool
	sources map[uint32]source
	node    source // what interfaces without an address use
}

type source struct{ v4, v6 netip.Addr }

// readOwn reads the addresses from the kernel, without loopback and link-local ones.
func readOwn() (o own, err error) {
	o = own{addrs: map[netip.Addr]bool{}, sources: map[uint32]source{}}
	list, err := whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, unix.AF_UNSPEC) })
	if err != nil {
		return o, fmt.Errorf("list the addresses: %w", err)
	}
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		if !ok || ip.IsLoopback() || ip.IsLinkLocalUnicast() || a.Flags&unix.IFA_F_TENTATIVE != 0 {
			continue
		}
		o.addrs[ip] = true
		s := o.sources[uint32(a.LinkIndex)]
		if at := s.of(ip); !at.IsValid() && a.Flags&unix.IFA_F_SECONDARY == 0 {
			*at = ip
		}
		o.sources[uint32(a.LinkIndex)] = s
	}
	o.node = source{o.routeSource(true), o.routeSource(false)}
	return o, nil
}

// source returns the node's source of a family.
func (o own) source(is4 bool) netip.Addr {
	if is4 {
		return o.node.v4
	}
	return o.node.v6
}

// of returns where the address of ip's family is stored.
func (s *source) of(ip netip.Addr) *netip.Addr {
	if ip.Is4() {
		return &s.v4
	}
	return &s.v6
}

// routeSource returns the source of this node's packets to the default route of a family, or else the address of the
// interface with the lowest index.
func (o own) routeSource(is4 bool) netip.Addr {
	to := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	if !is4 {
		to = netip.MustParseAddr("2001:db8::1")
	}
	routes, err := netlink.RouteGet(to.AsSlice())
	if err == nil && len(routes) > 0 {
		if src, ok := netip.AddrFromSlice(routes[0].Src); ok && o.addrs[src.Unmap()] {
			return src.Unmap()
		}
	}
	for _, index := range slices.Sorted(maps.Keys(o.sources)) {
		s := o.sources[index]
		if a := *s.of(to); a.IsValid() {
			return a
		}
	}
	return netip.Addr{}
}

// putSources writes the source of each interface. An interface without an address uses the node's, which has index 0.
func (o own) putSources(maps *prog.Objects) error {
	links, err := whole(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	indexes := map[uint32]bool{0: true}
	for _, l := range links {
		indexes[uint32(l.Attrs().Index)] = true
	}
	for index := range indexes {
		s := o.sources[index]
		for _, is4 := range []bool{true, false} {
			node := o.source(is4)
			if node.IsValid() && !s.of(node).IsValid() {
				*s.of(node) = node
			}
		}
		var value prog.Source
		if s.v4.IsValid() {
			b := s.v4.As4()
			value.V4 = binary.NativeEndian.Uint32(b[:])
		}
		if s.v6.IsValid() {
			value.V6 = toAddr(s.v6)
		}
		err = errors.Join(err, maps.Sources.Put(index, value))
	}
	return errors.Join(err, removeKeys(maps.Sources, func(index uint32) bool { return !indexes[index] }))
}
