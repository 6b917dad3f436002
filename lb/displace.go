package lb

import (
	"cmp"
	"net/netip"
	"slices"
)

// Who has an address keeps it. Statuses of Services can be written by others, and a change of ports or of a share key
// can make sharing impossible. Then two services hold an address that they may not share. The one that has not changed
// keeps it: otherwise a service that shares an address could take it from the other one. If both or none have changed,
// the one that was created first keeps it, on all nodes and whatever the order of the changes is.

// Adopt assigns those of addrs to a service that it may keep beside the services that hold them, and releases the ones
// that it had. The services from which it takes an address are displaced. The errors are about the other ones of addrs.
func (a *Allocator) Adopt(h Holder, addrs []netip.Addr) (errs []*AssignError) {
	var own []netip.Addr
	for _, addr := range addrs {
		if err := a.conflict(h, addr, true); err != nil {
			errs = append(errs, err)
		} else if !slices.Contains(own, addr) {
			own = append(own, addr)
		}
	}
	a.Take(h, own)
	a.displace(h, own)
	return errs
}

// Displaced returns the services that have lost an address to one that comes before them, and forgets them. They have
// it reserved until the next call of Reserve.
func (a *Allocator) Displaced() []string {
	names := a.displaced
	a.displaced = nil
	return names
}

// Freed reports whether an address has lost a holder since the last call: a request that failed may succeed now.
func (a *Allocator) Freed() bool {
	freed := a.freed
	a.freed = false
	return freed
}

// displace takes addrs, which h has, from the services that may not share them with h and that come after it.
func (a *Allocator) displace(h Holder, addrs []netip.Addr) {
	for _, addr := range addrs {
		for _, other := range slices.Clone(a.holders[addr]) { // replace changes the list
			name := other.Service
			if name == h.Service || !h.before(other) || !a.isAssigned(name, addr) || h.clash(other, addr) == nil {
				continue
			}
			rest := slices.DeleteFunc(slices.Clone(a.assigned[name]), func(x netip.Addr) bool { return x == addr })
			a.replace(a.reserved, other, append(slices.Clone(a.reserved[name]), addr)) // it may be in its status yet
			a.replace(a.assigned, other, rest)
			a.displaced = append(a.displaced, name)
		}
	}
}

func (a *Allocator) isAssigned(service string, addr netip.Addr) bool {
	return slices.Contains(a.assigned[service], addr)
}

// before reports whether h keeps an address that o may not share with it.
func (h Holder) before(o Holder) bool {
	return cmp.Or(cmp.Compare(o.Agreed, h.Agreed), h.Created.Compare(o.Created), cmp.Compare(h.ID, o.ID)) < 0
}

// clash returns why h and o cannot share addr; nil: they can.
func (h Holder) clash(o Holder, addr netip.Addr) *AssignError {
	both := slices.IndexFunc(h.Ports, func(p Port) bool { return slices.ContainsFunc(o.Ports, p.Overlaps) })
	switch {
	case both >= 0:
		return &AssignError{Cause: PortInUse, Addr: addr, Service: o.Service, Port: h.Ports[both]}
	case h.ShareKey == "" || h.ShareKey != o.ShareKey:
		return &AssignError{Cause: AddrInUse, Addr: addr, Service: o.Service}
	}
	return nil
}

// conflict returns why h cannot hold addr together with its holders, with the first of them by name; nil: it can. Has:
// h has the address assigned, and keeps it beside services that come after it or only reserve it.
func (a *Allocator) conflict(h Holder, addr netip.Addr, has bool) *AssignError {
	for _, other := range a.holders[addr] {
		if other.Service == h.Service || has && (h.before(other) || !a.isAssigned(other.Service, addr)) {
			continue
		}
		if err := h.clash(other, addr); err != nil {
			return err
		}
	}
	return nil
}
