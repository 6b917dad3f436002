package lb

import (
	"cmp"
	"net/netip"
	"slices"
)

// Who has an address keeps it, and with it the ports that it has. A service that comes later, or asks for another port,
// gets what nobody else has.

// Denied returns, for each of h's ports that it cannot have at the addresses that are assigned to it, which service has
// it. Two services hold one port only if another controller has written an address that was taken: then the one that
// was created first has it.
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

// portHolder returns the service that has a port of h at addr; "": none, or h itself.
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

// granted returns h with the ports that it can have at addrs.
func (a *Allocator) granted(h Holder, addrs []netip.Addr) Holder {
	denied := a.denied(h, addrs)
	h.Ports = slices.DeleteFunc(slices.Clone(h.Ports), func(p Port) bool {
		return slices.ContainsFunc(denied, func(e *AssignError) bool { return e.Port == p })
	})
	return h
}

// Shares reports whether another service has an address of this one.
func (a *Allocator) Shares(service string) bool {
	return slices.ContainsFunc(a.assigned[service], func(addr netip.Addr) bool {
		return slices.ContainsFunc(a.holders[addr], func(o Holder) bool {
			return o.Service != service && a.isAssigned(o.Service, addr)
		})
	})
}

// Freed reports whether an address has lost a holder since the last call: a request that failed may succeed now.
func (a *Allocator) Freed() bool {
	freed := a.freed
	a.freed = false
	return freed
}

func (a *Allocator) isAssigned(service string, addr netip.Addr) bool {
	return slices.Contains(a.assigned[service], addr)
}

// before reports whether h keeps a port that both h and o hold.
func (h Holder) before(o Holder) bool {
	return cmp.Or(h.Created.Compare(o.Created), cmp.Compare(h.ID, o.ID), cmp.Compare(h.Service, o.Service)) < 0
}

// conflict returns why h, which does not have addr, cannot have it beside its holders, with the first of them by name;
// nil: it can.
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

// SharesWith reports whether services of a namespace may share the addresses of h by its key.
func (h Holder) SharesWith(namespace string) bool {
	return h.Namespace == namespace || slices.Contains(h.ShareWith, namespace)
}

func (a *Allocator) sharesAcross(addr netip.Addr) bool {
	p := a.poolOf(addr)
	return p >= 0 && a.pools[p].ShareAcross
}
