package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// decision is what is to become of the addresses in the status of a Service.
type decision struct {
	addrs  []string // the status as it is to be
	record string   // the ports that it has of them, if they may be shared
	write  bool     // addrs or record differ from the status, and are ours to write
	// reason and warning are those of an Event; "": none.
	reason, warning string
	waits           bool // another decision is possible when an address or a port is free
}

// pending is what may be written to the status of a Service yet.
type pending struct {
	addrs []netip.Addr
	ports []lb.Port
}

// The reasons of the Event, and of the condition, of a Service that cannot have the address that it is to have, of one
// whose address is in no pool any more, and of one that asks for a port which another Service has.
const (
	reasonFailed    = "AllocationFailed"
	reasonUnpooled  = "AddressInNoPool"
	reasonPortInUse = "PortInUse"
)

// adopt records the addresses in the status of a Service, whoever wrote them, and those that may be written to it yet.
func (a *assigner) adopt(s *core.Service, p pending) {
	h := holds(s)
	h.Ports = union(h.Ports, p.ports)
	a.alloc.Take(h, a.pooled(union(statusAddresses(s), p.addrs)))
	a.reserve(s, nil)
}

// decide returns what is to become of the status of a Service. A status is adopted, whoever wrote it. One that is not
// as it should be is changed only if its addresses are from us, or if others are to be added to them and that was not
// done before: else two controllers would overwrite each other for ever.
func (a *assigner) decide(s *core.Service, p pending, extended bool) decision {
	has := statusAddresses(s)
	a.adopt(s, p)
	asIs := decision{addrs: statusOf(s), record: recordOf(s)}
	ours := isOurs(s)
	addrs, err := a.assign(s)
	kept := a.unpooled(s, has)
	switch {
	case errors.Is(err, errNotAllowed) && !a.asksForMore(s, has):
		// It keeps what it has, and complain says that the pool is not for it.
	case err != nil:
		asIs.reason, asIs.warning, asIs.waits = reasonFailed, err.Error(), true
		if kept.IsValid() {
			asIs.reason, asIs.warning = reasonUnpooled, unpooled(kept)+err.Error()
		}
	case sameAddresses(addrs, has) && len(addrs) == len(s.Status.LoadBalancer.Ingress):
		asIs.waits = a.waits(s, addrs)
		return a.grant(s, p, asIs)
	case !ours && (extended || !extends(s, addrs)):
		asIs.reason = "ForeignAddress"
		asIs.warning = fmt.Sprintf("status.loadBalancer was written by %s and is left as it is; without it "+
			"%v would be assigned", strings.Join(managers(s, addressField), ", "), addrs)
	case kept.IsValid():
		asIs.reason = reasonUnpooled
		asIs.warning = unpooled(kept) + "to get another one, set the annotation steelyard.dev/pool"
	default:
		return a.grant(s, p, decision{addrs: texts(addrs), write: true, waits: a.waits(s, addrs)})
	}
	a.adopt(s, p)
	if !ours {
		return asIs
	}
	return a.grant(s, p, asIs)
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

// pooled returns those of addrs that are in a pool.
func (a *assigner) pooled(addrs []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(addrs, func(x netip.Addr) bool { return poolOf(a.pools, x) == nil })
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
	h := holder(s)
	if d.record == "" {
		h.ShareKey = ""
	} else {
		h.Ports = portsOf(d.record)
	}
	a.alloc.Take(h, a.pooled(parsed(d.addrs)))
	a.reserve(s, nil)
}

func texts(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}

// parsed returns the addresses of texts. A host name is none.
func parsed(texts []string) (addrs []netip.Addr) {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
