// Package route reads the kernel's view of the network: routes, next hops, source addresses, neighbours, and changes to
// them.
package route

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// LoopbackIndex is the index of lo in every network namespace.
const LoopbackIndex = 1

// maxOurs is the maximum number of our source addresses per backend (bpf/types.h).
const maxOurs = len(bpf.Backend{}.Snat)

// Sources holds our source addresses towards another host, or none if there is no route. The first is the one that the
// kernel selects. Others in the same subnet add source ports.
type Sources struct {
	Addrs []netip.Addr
	Hop
}

// Hop is the next hop of a route.
type Hop struct {
	NIC     int        // interface index, or 0 if there is no route
	Gateway netip.Addr // zero if the other host is on the link
}

// SourceFinder finds sources. It lists this host's addresses once, and again whenever the kernel selects an address
// that is not in the list. The zero value is ready to use.
type SourceFinder struct {
	listed []netlink.Addr
}

// Find returns our source addresses towards another host.
func (f *SourceFinder) Find(to netip.Addr) Sources {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return Sources{}
	}
	r := routes[0]
	step, next := Hop{NIC: r.LinkIndex}, to
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		step.Gateway = gw.Unmap()
		next = step.Gateway
	}
	best, ok := netip.AddrFromSlice(r.Src)
	if !ok {
		return Sources{Hop: step}
	}
	best = best.Unmap()
	s := Sources{Addrs: []netip.Addr{best}, Hop: step}
	for _, a := range f.on(r.LinkIndex, best) {
		addr, ok := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		addr = addr.Unmap()
		more := len(s.Addrs) < maxOurs && !slices.Contains(s.Addrs, addr)
		if ok && more && usable(a) && netip.PrefixFrom(addr, ones).Contains(next) {
			s.Addrs = append(s.Addrs, addr)
		}
	}
	return s
}

// on returns an interface's addresses, or none if they cannot be listed. best is the address of this host that the
// kernel selected.
func (f *SourceFinder) on(nic int, best netip.Addr) (addrs []netlink.Addr) {
	if !slices.ContainsFunc(f.listed, func(a netlink.Addr) bool { return a.IP.Equal(best.AsSlice()) }) {
		listed, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return nil
		}
		f.listed = listed
	}
	for _, a := range f.listed {
		if a.LinkIndex == nic {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// usable reports whether an address can be the source of packets to other hosts.
func usable(a netlink.Addr) bool {
	const unfit = unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
	return a.Flags&unfit == 0 && a.Scope == int(netlink.SCOPE_UNIVERSE)
}

// AddressOn returns a usable source address of the given family on an interface that Find has found, or zero.
func (f *SourceFinder) AddressOn(nic int, is4 bool) netip.Addr {
	for _, a := range f.listed {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); ok && a.LinkIndex == nic && usable(a) && addr.Is4() == is4 {
			return addr
		}
	}
	return netip.Addr{}
}

// Contains reports whether one of the prefixes contains addr.
func Contains(prefixes []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
}
