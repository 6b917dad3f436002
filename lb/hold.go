package lb

import (
	"cmp"
	"net/netip"
	"slices"
)

// A service keeps its address and its ports. A later service, or one that requests another port, gets only what no
// other service has.

// Denied returns an error for each of h's ports that another service has on one of h's assigned addresses. Two services
// claim the same port only if another controller has written an address that was in use. The one created first then
// gets the port.
func (a *Allocator) Denied(h Holder) []*AssignError { return a.denied(h, a.assigned[h.Service]) }

func (a *Allocator) denied(h Holder, addrs []netip.Addr) (errs []*AssignError) {
	for _, p := range h.Ports {
		for _, addr := range addrs {
			if first := a.portHolder(h, p, addr); first != "" {
				errs = append(errs, &AssignError{Cause: PortInUse, Addr: addr, Service: first, Port: p})
				break
			}
		}
	}
	return errs
}

// portHolder returns the service that has port p at addr, or "" if h may have it.
func (a *Allocator) portHolder(h Holder, p Port, addr netip.Addr) string {
	i, held := a.holder(addr, h.Service)
	held = held && slices.ContainsFunc(a.holders[addr][i].Ports, p.Overlaps)
	for _, other := range a.holders[addr] {
		first := other.Service != h.Service && a.isAssigned(other.Service, addr) && !(held && h.before(other))
		if first && slices.ContainsFunc(other.Ports, p.Overlaps) {
			return other.Service
		}
	}
	return ""
}

// granted returns h with only the ports that it can have at addrs.
func (a *Allocator) granted(h Holder, addrs []netip.Addr) Holder {
	denied := a.denied(h, addrs)
	h.Ports = slices.DeleteFunc(slices.Clone(h.Ports), func(p Port) bool {
		return slices.ContainsFunc(denied, func(e *AssignError) bool { return e.Port == p })
	})
	return h
}

// Shares reports whether another service has one of this service's addresses.
func (a *Allocator) Shares(service string) bool {
	return slices.ContainsFunc(a.assigned[service], func(addr netip.Addr) bool {
		return slices.ContainsFunc(a.holders[addr], func(o Holder) bool {
			return o.Service != service && a.isAssigned(o.Service, addr)
		})
	})
}

// Freed reports whether an address has lost a holder since the last call. A request that failed may then succeed.
func (a *Allocator) Freed() bool {
	freed := a.freed
	a.freed = false
	return freed
}

func (a *Allocator) isAssigned(service string, addr netip.Addr) bool {
	return slices.Contains(a.assigned[service], addr)
}

// before reports whether h wins a port that both h and o claim.
func (h Holder) before(o Holder) bool {
	return cmp.Or(h.Created.Compare(o.Created), cmp.Compare(h.ID, o.ID), cmp.Compare(h.Service, o.Service)) < 0
}

// conflict says why h, which does not have addr, cannot share it with its holders, or returns nil if it can. It reports
// the first conflicting holder by name.
func (a *Allocator) conflict(h Holder, addr netip.Addr) *AssignError {
	for _, o := range a.holders[addr] {
		both := slices.IndexFunc(h.Ports, func(p Port) bool { return slices.ContainsFunc(o.Ports, p.Overlaps) })
		switch {
		case o.Service == h.Service:
		case both >= 0:
			return &AssignError{Cause: PortInUse, Addr: addr, Service: o.Service, Port: h.Ports[both]}
		case h.ShareKey == "" || h.ShareKey != o.ShareKey:
			return &AssignError{Cause: AddrInUse, Addr: addr, Service: o.Service}
		case !o.SharesWith(h.Namespace) && !a.sharesAcross(addr):
			return &AssignError{Cause: NotSharedWith, Addr: addr, Service: o.Service}
		}
	}
	return nil
}

// SharesWith reports whether services in a namespace may use h's key to share its addresses.
func (h Holder) SharesWith(namespace string) bool {
	return h.Namespace == namespace || slices.Contains(h.ShareWith, namespace)
}

func (a *Allocator) sharesAcross(addr netip.Addr) bool {
	p := a.poolOf(addr)
	return p >= 0 && a.pools[p].ShareAcross
}
