package kube

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/steelyard-lb/steelyard/lb"
)

// Pool is a pool, and which Services may have its addresses.
type Pool struct {
	lb.Pool
	Namespaces []string // empty: all
	Selector   labels.Selector
}

func (p Pool) serves(s *core.Service) bool {
	return (len(p.Namespaces) == 0 || slices.Contains(p.Namespaces, s.Namespace)) &&
		(p.Selector == nil || p.Selector.Matches(labels.Set(s.Labels)))
}

// Annotations of a Service: ours, then those that MetalLB's users have.
var (
	wantAddresses = []string{"steelyard.dev/addresses", "metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"}
	wantPool      = []string{"steelyard.dev/pool", "metallb.io/address-pool", "metallb.universe.tf/address-pool"}
	wantShare     = []string{"steelyard.dev/share", "metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"}
)

func annotation(s *core.Service, names []string) string {
	for _, n := range names {
		if v := strings.TrimSpace(s.Annotations[n]); v != "" {
			return v
		}
	}
	return ""
}

// assigner decides which Service has which addresses. What a Service has it keeps, whatever else changes.
type assigner struct {
	pools []Pool
	users map[netip.Addr]map[string]*core.Service
	has   map[string][]netip.Addr
	// external has the addresses that Services name themselves: they are nobody else's, whoever gave them.
	external map[string][]netip.Addr
}

func newAssigner(pools []Pool) *assigner {
	pools = slices.Clone(pools)
	slices.SortStableFunc(pools, func(a, b Pool) int { return a.Priority - b.Priority })
	return &assigner{pools: pools, users: map[netip.Addr]map[string]*core.Service{}, has: map[string][]netip.Addr{}, external: map[string][]netip.Addr{}}
}

func keyOf(s *core.Service) string { return s.Namespace + "/" + s.Name }

// adopt notes what the status of a Service says, as far as it is ours to give.
func (a *assigner) adopt(s *core.Service) {
	var addrs []netip.Addr
	for _, i := range s.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(i.IP); err == nil && a.poolOf(addr) != nil {
			addrs = append(addrs, addr)
		}
	}
	a.take(s, addrs)
}

func (a *assigner) take(s *core.Service, addrs []netip.Addr) {
	a.release(keyOf(s))
	a.has[keyOf(s)] = addrs
	a.use(s, addrs)
}

// reserve notes the externalIPs of a Service.
func (a *assigner) reserve(s *core.Service) {
	a.unreserve(keyOf(s))
	if addrs := externalsOf(s); len(addrs) > 0 {
		a.external[keyOf(s)] = addrs
		a.use(s, addrs)
	}
}

func (a *assigner) use(s *core.Service, addrs []netip.Addr) {
	for _, addr := range addrs {
		if a.users[addr] == nil {
			a.users[addr] = map[string]*core.Service{}
		}
		a.users[addr][keyOf(s)] = s
	}
}

// release frees what a Service was given.
func (a *assigner) release(key string) {
	addrs := a.has[key]
	delete(a.has, key)
	a.unuse(key, addrs)
}

func (a *assigner) unreserve(key string) {
	addrs := a.external[key]
	delete(a.external, key)
	a.unuse(key, addrs)
}

func (a *assigner) unuse(key string, addrs []netip.Addr) {
	for _, addr := range addrs {
		if slices.Contains(a.has[key], addr) || slices.Contains(a.external[key], addr) {
			continue
		}
		if delete(a.users[addr], key); len(a.users[addr]) == 0 {
			delete(a.users, addr)
		}
	}
}

func (a *assigner) poolOf(addr netip.Addr) *Pool { return poolOf(a.pools, addr) }

func poolOf(pools []Pool, addr netip.Addr) *Pool {
	for i := range pools {
		if slices.ContainsFunc(pools[i].Ranges, func(r lb.AddrRange) bool { return r.Contains(addr) }) {
			return &pools[i]
		}
	}
	return nil
}

// assign returns the addresses that a Service is to have, one of each of its families, and takes them. Its error says what to
// do; what the Service had stays.
func (a *assigner) assign(s *core.Service) ([]netip.Addr, error) {
	wanted, err := requested(s)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, f := range s.Spec.IPFamilies {
		addr, err := a.one(s, f == core.IPv4Protocol, wanted)
		if err != nil {
			// With PreferDualStack one family may do.
			if len(addrs) > 0 && s.Spec.IPFamilyPolicy != nil && *s.Spec.IPFamilyPolicy == core.IPFamilyPolicyPreferDualStack && len(wanted) == 0 {
				break
			}
			return nil, err
		}
		addrs = append(addrs, addr)
	}
	for _, w := range wanted {
		if !slices.Contains(addrs, w) {
			return nil, fmt.Errorf("%s is asked for, and the Service has no such family: see spec.ipFamilies", w)
		}
	}
	a.take(s, addrs)
	return addrs, nil
}

// requested returns the addresses that a Service asks for by name.
func requested(s *core.Service) (addrs []netip.Addr, err error) {
	text := annotation(s, wantAddresses)
	if s.Spec.LoadBalancerIP != "" {
		if text != "" {
			return nil, errors.New("both spec.loadBalancerIP and an annotation ask for addresses; leave one out")
		}
		text = s.Spec.LoadBalancerIP
	}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		addr, err := netip.ParseAddr(part)
		if err != nil {
			return nil, fmt.Errorf("%q is asked for, and is not an IP address", part)
		}
		if slices.ContainsFunc(addrs, func(o netip.Addr) bool { return o.Is4() == addr.Is4() }) {
			return nil, fmt.Errorf("two addresses of one family are asked for: %s", text)
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// one finds an address of one family: the one that is asked for, the one that it has, one that may be shared, a free one.
func (a *assigner) one(s *core.Service, is4 bool, wanted []netip.Addr) (netip.Addr, error) {
	for _, w := range wanted {
		if w.Is4() == is4 {
			return w, a.may(s, w)
		}
	}
	pools, err := a.poolsFor(s)
	if err != nil {
		return netip.Addr{}, err
	}
	in := func(addr netip.Addr) bool {
		p := a.poolOf(addr)
		return p != nil && slices.ContainsFunc(pools, func(o Pool) bool { return o.Name == p.Name })
	}
	named := annotation(s, wantPool) != ""
	for _, addr := range a.has[keyOf(s)] {
		// A pool that is no longer for everybody does not take away what it has given.
		if p := a.poolOf(addr); addr.Is4() == is4 && p != nil && (in(addr) || !named && p.serves(s)) && a.may(s, addr) == nil {
			return addr, nil
		}
	}
	if annotation(s, wantShare) != "" {
		for _, addr := range slices.SortedFunc(maps.Keys(a.users), netip.Addr.Compare) {
			if addr.Is4() == is4 && in(addr) && a.may(s, addr) == nil {
				return addr, nil
			}
		}
	}
	for _, p := range pools {
		for _, r := range p.Ranges {
			if r.From.Is4() != is4 {
				continue
			}
			for addr := r.From; r.Contains(addr); addr = addr.Next() {
				if a.users[addr] == nil && !(p.AvoidBuggy && buggy(addr)) {
					return addr, nil
				}
			}
		}
	}
	family := "IPv6"
	if is4 {
		family = "IPv4"
	}
	return netip.Addr{}, fmt.Errorf("no free %s address in %s; add addresses to a pool, or delete a Service that has one", family, names(pools))
}

func buggy(addr netip.Addr) bool {
	return addr.Is4() && (addr.As4()[3] == 0 || addr.As4()[3] == 255)
}

// poolsFor returns the pools that a Service may be given addresses from, best first.
func (a *assigner) poolsFor(s *core.Service) (pools []Pool, err error) {
	name := annotation(s, wantPool)
	for _, p := range a.pools {
		switch {
		case name != "" && p.Name != name || name == "" && !p.AutoAssign:
		case p.serves(s):
			pools = append(pools, p)
		case name != "":
			return nil, fmt.Errorf("the pool %q is not for this Service: see its namespaces and service_selector", name)
		}
	}
	switch {
	case len(pools) > 0:
		return pools, nil
	case name != "":
		return nil, fmt.Errorf("there is no pool %q; pools: %s", name, names(a.pools))
	}
	return nil, errors.New("no pool is for this Service; name one with the annotation steelyard.dev/pool, or set auto_assign")
}

// may reports why a Service cannot have an address: it is in no pool for it, or others have it and do not share it.
func (a *assigner) may(s *core.Service, addr netip.Addr) error {
	p := a.poolOf(addr)
	if p == nil {
		return fmt.Errorf("%s is in no pool", addr)
	}
	if !p.serves(s) {
		return fmt.Errorf("%s is in the pool %q, which is not for this Service: see its namespaces and service_selector", addr, p.Name)
	}
	for key, other := range a.users[addr] {
		if key == keyOf(s) {
			continue
		}
		share := annotation(s, wantShare)
		if share == "" || share != annotation(other, wantShare) {
			return fmt.Errorf("%s belongs to %s; to share it, give both the annotation steelyard.dev/share with one value", addr, key)
		}
		for _, p := range s.Spec.Ports {
			for _, o := range other.Spec.Ports {
				if p.Port == o.Port && protocolOf(&p.Protocol) == protocolOf(&o.Protocol) {
					return fmt.Errorf("%s cannot be shared with %s: both have port %d/%s", addr, key, p.Port, protocolOf(&p.Protocol))
				}
			}
		}
	}
	return nil
}

func names(pools []Pool) string {
	var all []string
	for _, p := range pools {
		all = append(all, p.Name)
	}
	return strings.Join(all, ", ")
}
