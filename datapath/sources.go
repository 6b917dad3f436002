package datapath

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// maxOurs is the number of our source addresses per backend (bpf/types.h).
const maxOurs = len(bpf.Backend{}.Snat)

// sources are our source addresses towards another host, the one that the kernel selects first. Others in the same
// subnet add source ports. Without a route there are none.
type sources struct {
	addrs []netip.Addr
	firstHop
}

// firstHop is the first step of a route.
type firstHop struct {
	nic int        // index of the interface; 0: no route
	gw  netip.Addr // zero: the other host is on the link
}

// sourceFinder finds sources. It lists the addresses of this host once, and again when the kernel selects one that is
// not in the list. The zero value is ready.
type sourceFinder struct {
	listed []netlink.Addr
}

func (f *sourceFinder) find(to netip.Addr) sources {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return sources{}
	}
	r := routes[0]
	step, next := firstHop{nic: r.LinkIndex}, to
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		step.gw = gw.Unmap()
		next = step.gw
	}
	best, ok := netip.AddrFromSlice(r.Src)
	if !ok {
		return sources{firstHop: step}
	}
	best = best.Unmap()
	s := sources{addrs: []netip.Addr{best}, firstHop: step}
	for _, a := range f.on(r.LinkIndex, best) {
		addr, ok := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		addr = addr.Unmap()
		more := len(s.addrs) < maxOurs && !slices.Contains(s.addrs, addr)
		if ok && more && usable(a) && netip.PrefixFrom(addr, ones).Contains(next) {
			s.addrs = append(s.addrs, addr)
		}
	}
	return s
}

// on returns the addresses of an interface. best is one of this host that the kernel selected. Without a list there is
// only that one.
func (f *sourceFinder) on(nic int, best netip.Addr) (addrs []netlink.Addr) {
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

// findEach returns the sources towards each of the hosts.
func (f *sourceFinder) findEach(hosts []netip.Addr) map[netip.Addr]sources {
	found := make(map[netip.Addr]sources, len(hosts))
	for _, a := range hosts {
		found[a] = f.find(a)
	}
	return found
}

// refreshSources reads our source addresses towards backends from the kernel again. The lock is not held meanwhile. A
// change that is missed in between causes another refresh.
func (s *services) refreshSources() {
	s.mu.Lock()
	hosts := s.backends.allHosts()
	s.mu.Unlock()
	finder := &sourceFinder{}
	found := finder.findEach(hosts)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.backends.refresh(finder, found)
}

// usable reports whether an address can be the source of packets to other hosts.
func usable(a netlink.Addr) bool {
	const unfit = unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
	return a.Flags&unfit == 0 && a.Scope == int(netlink.SCOPE_UNIVERSE)
}

// routers returns the routers towards backends, and for equal paths those that the kernel selects.
func (s *services) routers() (all []router) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[router]bool{}
	for _, b := range s.backends.byAddr {
		x := router{b.nic, b.gw}
		if !b.local && b.gw.IsValid() && !seen[x] {
			seen[x] = true
			all = append(all, x)
		}
	}
	return all
}
