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

// decision says what to do with the addresses in a Service's status.
type decision struct {
	addrs  []string // the status as it should be
	record string   // the Service's ports on these addresses, if they may be shared
	write  bool     // addrs or record differ from the status, and we may write them
	// reason and warning are for an Event, or "" if there is none.
	reason, warning string
	waits           bool // another decision is possible once an address or a port is free
	onNodes         bool // addrs are the nodes'
}

// pending is what may still be written to a Service's status.
type pending struct {
	addrs []netip.Addr
	ports []lb.Port
}

// The reasons of the Event and the condition: the Service cannot have its address; its address is no longer in any
// pool; another Service has a port that it requests.
const (
	reasonFailed    = "AllocationFailed"
	reasonUnpooled  = "AddressInNoPool"
	reasonPortInUse = "PortInUse"
)

// adopt records the addresses in a Service's status, whoever wrote them, and p, which may still be written to it.
func (a *assigner) adopt(s *core.Service, p pending) {
	h := a.has(s)
	h.Ports = union(h.Ports, p.ports)
	a.alloc.Take(h, a.pooled(s, union(statusAddresses(s), p.addrs)))
	a.reserve(s, nil)
}

// decide returns what should become of a Service's status. It adopts the status, whoever wrote it. It changes a wrong
// status only if the addresses are ours, or if addresses are added to another controller's for the first time.
// Otherwise two controllers would overwrite each other forever.
func (a *assigner) decide(s *core.Service, p pending, extended bool) decision {
	has := statusAddresses(s)
	a.adopt(s, p)
	asIs := decision{addrs: statusOf(s), record: recordOf(s), onNodes: a.onNodes(s)}
	if asIs.onNodes && a.poolNodes == nil {
		asIs.waits = true // setPoolNodes queues it
		return asIs
	}
	ours := isOurs(s)
	addrs, err := a.assign(s)
	kept := a.unpooled(s, has)
	switch {
	case errors.Is(err, errNotAllowed) && !a.asksForMore(s, has):
		// The Service keeps its addresses, and complain reports that the pool is not for it.
	case err != nil:
		asIs.reason, asIs.warning, asIs.waits = reasonFailed, err.Error(), true
		if _, inUse := errors.AsType[portInUseError](err); inUse {
			asIs.reason = reasonPortInUse
		}
		if kept.IsValid() {
			asIs.reason, asIs.warning = reasonUnpooled, unpooled(kept)+err.Error()
		}
	case sameAddresses(addrs, has) && len(addrs) == len(s.Status.LoadBalancer.Ingress):
		asIs.waits = a.waits(s, addrs)
		return a.grant(s, p, asIs)
	case !ours && (extended || !extends(s, addrs)):
		asIs.reason = "ForeignAddress"
		asIs.warning = fmt.Sprintf("status.loadBalancer was written by %s and is left unchanged; otherwise "+
			"%v would be assigned; %s", strings.Join(managers(s, addressField), ", "), addrs, textOthers)
	case kept.IsValid():
		asIs.reason = reasonUnpooled
		asIs.warning = unpooled(kept) + "to get a different one, set the annotation steelyard.dev/pool"
	default:
		return a.grant(s, p, decision{
			addrs: texts(addrs), write: true, waits: a.waits(s, addrs), onNodes: asIs.onNodes,
		})
	}
	a.adopt(s, p)
	if !ours {
		return asIs
	}
	return a.grant(s, p, asIs)
}

// unpooled returns an address that a Service keeps although it is no longer in any pool, or zero. A Service that
// requests another address or a pool keeps none.
func (a *assigner) unpooled(s *core.Service, has []netip.Addr) (kept netip.Addr) {
	i := slices.IndexFunc(has, func(x netip.Addr) bool { return poolOf(a.pools, x) == nil })
	if a.onNodes(s) {
		return kept
	}
	if i >= 0 && annotation(s, wantPool) == "" && annotation(s, wantAddresses) == "" && s.Spec.LoadBalancerIP == "" {
		kept = has[i]
	}
	return kept
}

func unpooled(kept netip.Addr) string {
	return fmt.Sprintf("%s is no longer in a pool; the Service keeps it, but it is not announced; ", kept)
}

// extends reports whether writing addrs to a Service's status keeps every entry that others have written.
func extends(s *core.Service, addrs []netip.Addr) bool {
	return !slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i core.LoadBalancerIngress) bool {
		addr, err := netip.ParseAddr(i.IP)
		return err != nil || !slices.Contains(addrs, addr) || i.Hostname != "" ||
			i.IPMode != nil && *i.IPMode != core.LoadBalancerIPModeVIP
	})
}

// pooled returns those addresses of a Service that are in a pool, with allNodes for the nodes'.
func (a *assigner) pooled(s *core.Service, addrs []netip.Addr) (all []netip.Addr) {
	onNodes, ours := a.onNodes(s), isOurs(s)
	for _, x := range addrs {
		if poolOf(a.pools, x) == nil {
			if !onNodes || !ours && !a.isNode(x) {
				continue
			}
			x = allNodes(x)
		}
		if !slices.Contains(all, x) {
			all = append(all, x)
		}
	}
	return all
}

// union returns the elements of a and b in order, without duplicates.
func union[T comparable](a, b []T) (all []T) {
	for _, x := range slices.Concat(a, b) {
		if !slices.Contains(all, x) {
			all = append(all, x)
		}
	}
	return all
}

// settle records that a Service's status matches the decision.
func (a *assigner) settle(s *core.Service, d decision) {
	h := a.holder(s)
	if d.record == "" {
		h.ShareKey = ""
	} else {
		h.Ports = portsOf(d.record)
	}
	a.alloc.Take(h, a.pooled(s, parsed(d.addrs)))
	a.reserve(s, nil)
}

func texts(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}

// parsed returns the addresses in texts and skips host names.
func parsed(texts []string) (addrs []netip.Addr) {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
