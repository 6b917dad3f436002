package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
)

// decision is what is to become of the addresses in the status of a Service.
type decision struct {
	addrs  []string  // the status as it is to be
	agreed agreement // with which it shares them
	write  bool      // addrs or agreed differ from the status, and are ours to write
	// reason and warning are those of an Event; "": none.
	reason, warning string
	waits           bool // another decision is possible when an address is free
}

// The reasons of the Event, and of the condition, of a Service that cannot have the address that it is to have, and of
// one whose address is in no pool any more.
const (
	reasonFailed   = "AllocationFailed"
	reasonUnpooled = "AddressInNoPool"
)

// adopt records the addresses in the status of a Service, whoever wrote them, and those that may be written to it yet.
// It returns those that belong to others.
func (a *assigner) adopt(s *core.Service, pending []netip.Addr) (lost []netip.Addr) {
	pooled := a.held(slices.Concat(statusAddresses(s), pending), nil)
	for _, err := range a.alloc.Adopt(holder(s), pooled) {
		lost = append(lost, err.Addr)
	}
	a.reserve(s, lost) // nobody else gets them while they are in the status
	return lost
}

// decide returns what is to become of the status of a Service. A status whose addresses the Service may have is
// adopted, whoever wrote it. One that is not as it should be is changed only if its addresses are from us, or if others
// are to be added to them and that was not done before: else two controllers would overwrite each other for ever.
// pending are addresses that may be written to the status yet.
func (a *assigner) decide(s *core.Service, pending []netip.Addr, extended bool) decision {
	has := statusAddresses(s)
	lost := a.adopt(s, pending)
	asIs := decision{addrs: statusOf(s), agreed: agreementOf(s)}
	ours := isOurs(s)
	addrs, err := a.assign(s)
	switch {
	case errors.Is(err, errNotAllowed) && len(lost) == 0 && !a.asksForMore(s, has):
		return asIs // it keeps what it has, and complain says that the pool is not for it
	case err != nil:
		asIs.reason, asIs.warning, asIs.waits = reasonFailed, err.Error(), true
		if kept := a.unpooled(s, has); kept.IsValid() {
			asIs.reason, asIs.warning = reasonUnpooled, unpooled(kept)+err.Error()
		}
		if ours && len(lost) > 0 { // somebody else has them
			asIs.write = true
			asIs.addrs = texts(slices.DeleteFunc(has, func(x netip.Addr) bool { return slices.Contains(lost, x) }))
		}
		return asIs
	case sameAddresses(addrs, has) && len(addrs) == len(s.Status.LoadBalancer.Ingress):
		asIs.waits = a.waits(s, addrs)
		if asIs.agreed.terms != terms(s) {
			asIs.write, asIs.agreed = true, a.agreement(s)
			a.take(s, asIs.agreed, addrs)
		}
		return asIs
	}
	kept := a.unpooled(s, has)
	switch {
	case !ours && (extended || !extends(s, addrs)):
		asIs.reason = "ForeignAddress"
		asIs.warning = fmt.Sprintf("status.loadBalancer was written by %s and is left as it is; without it "+
			"%v would be assigned", strings.Join(managers(s, addressField), ", "), addrs)
	case kept.IsValid():
		asIs.reason = reasonUnpooled
		asIs.warning = unpooled(kept) + "to get another one, set the annotation steelyard.dev/pool"
	default:
		// What it has stays its own until the status is written.
		d := decision{addrs: texts(addrs), agreed: a.agreement(s), write: true, waits: a.waits(s, addrs)}
		a.take(s, d.agreed, union(addrs, a.held(slices.Concat(has, pending), lost)))
		return d
	}
	a.adopt(s, pending)
	return asIs
}

// unpooled returns an address that a Service keeps although no pool has it any more: one that asks for another address
// or for a pool keeps none. Zero: it has none.
func (a *assigner) unpooled(s *core.Service, has []netip.Addr) (kept netip.Addr) {
	i := slices.IndexFunc(has, func(x netip.Addr) bool { return poolOf(a.pools, x) == nil })
	if i >= 0 && annotation(s, wantPool) == "" && annotation(s, wantAddresses) == "" && s.Spec.LoadBalancerIP == "" {
		kept = has[i]
	}
	return kept
}

func unpooled(kept netip.Addr) string {
	return fmt.Sprintf("%s is in no pool any more; the Service keeps it, and it is not announced; ", kept)
}

// extends reports whether addrs in the status of a Service change no entry of others.
func extends(s *core.Service, addrs []netip.Addr) bool {
	return !slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i core.LoadBalancerIngress) bool {
		addr, err := netip.ParseAddr(i.IP)
		return err != nil || !slices.Contains(addrs, addr) || i.Hostname != "" ||
			i.IPMode != nil && *i.IPMode != core.LoadBalancerIPModeVIP
	})
}

// held returns those of addrs that others must not get yet.
func (a *assigner) held(addrs, lost []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(addrs, func(x netip.Addr) bool {
		return poolOf(a.pools, x) == nil || slices.Contains(lost, x)
	})
}

// union returns the elements of a and b, each once, in their order.
func union[T comparable](a, b []T) (all []T) {
	for _, x := range slices.Concat(a, b) {
		if !slices.Contains(all, x) {
			all = append(all, x)
		}
	}
	return all
}

// settle records that the status of a Service is as was decided.
func (a *assigner) settle(s *core.Service, d decision) {
	var now []netip.Addr
	for _, text := range d.addrs {
		if x, err := netip.ParseAddr(text); err == nil && poolOf(a.pools, x) != nil {
			now = append(now, x)
		}
	}
	a.take(s, d.agreed, now)
	a.reserve(s, nil)
}

// take records that a Service has addresses from now on, with this agreement.
func (a *assigner) take(s *core.Service, agreed agreement, addrs []netip.Addr) {
	h := holder(s)
	h.Agreed = agreed.at
	a.alloc.Take(h, addrs)
}

func texts(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}
