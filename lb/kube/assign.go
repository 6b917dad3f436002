package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Pool is an address pool and the Services that may use it.
type Pool struct {
	lb.Pool
	// Nodes makes this the pool of the nodes' own addresses. Its Ranges are NodeRanges.
	Nodes      bool
	Class      string   // of the Services, or "" for all
	Namespaces []string // or empty for all namespaces
	Selector   labels.Selector
	// ExternalIPs lets Services use addresses of the pool as spec.externalIPs, which anyone who can write a Service can
	// set.
	ExternalIPs bool
	// Grace is how long an address that is no longer in any pool is still served. It is not announced.
	Grace time.Duration
}

func (p Pool) serves(s *core.Service) bool { return p.refuses(s) == "" }

// refuses says why a Service may not use a pool, or returns "" if it may.
func (p Pool) refuses(s *core.Service) string {
	switch {
	case p.Class != "" && p.Class != classOf(s):
		return "is for another class"
	case len(p.Namespaces) > 0 && !slices.Contains(p.Namespaces, s.Namespace):
		return "is for other namespaces"
	case p.Selector != nil && !p.Selector.Matches(labels.Set(s.Labels)):
		return "has a service_selector that does not match"
	}
	return ""
}

// assigner translates Services into requests to the shared allocator, and its errors into advice for Kubernetes users.
type assigner struct {
	classes []string
	pools   []Pool // by Priority, as the allocator tries them
	alloc   *lb.Allocator
	nodes   int // nodes that may have addresses, or 0 if unknown
	// poolNodes lists the nodes that may have addresses, by name, or is nil if unknown. readyOn returns the names
	// of the nodes with a ready endpoint of a Service. It is nil if that is unknown.
	poolNodes []poolNode
	readyOn   func(service string) map[string]bool
}

func newAssigner(classes []string, pools []Pool) *assigner {
	pools = slices.Clone(pools)
	slices.SortStableFunc(pools, func(a, b Pool) int { return a.Priority - b.Priority })
	ranges := make([]lb.Pool, len(pools))
	for i, p := range pools {
		ranges[i] = p.Pool
	}
	return &assigner{classes: classes, pools: pools, alloc: lb.NewAllocator(ranges)}
}

// reserve records the addresses that a Service has in addition to assigned ones: its externalIPs, the status of a
// Service of another class, and more.
func (a *assigner) reserve(s *core.Service, more []netip.Addr) {
	addrs := slices.DeleteFunc(externalIPsOf(s), func(x netip.Addr) bool { return !permitsExternal(a.pools, s, x) })
	if isOfOtherClass(s, a.classes) {
		addrs = append(addrs, statusAddresses(s)...)
	}
	a.alloc.Reserve(a.holder(s), union(addrs, more))
}

// unreserve removes the externalIPs of a deleted Service.
func (a *assigner) unreserve(name string) { a.alloc.Reserve(lb.Holder{Service: name}, nil) }

func (a *assigner) release(name string) { a.alloc.Release(name) }

// assign assigns and returns the addresses of a Service: one per family, or one per family and node. Its error tells
// the user what to do; the Service then keeps its addresses.
func (a *assigner) assign(s *core.Service) ([]netip.Addr, error) {
	r, err := a.request(s)
	if err != nil {
		return nil, err
	}
	addrs, err := a.alloc.Assign(r)
	if err != nil {
		return nil, a.explain(s, err)
	}
	return a.expand(s, addrs), nil
}

func (a *assigner) request(s *core.Service) (lb.Request, error) {
	wanted, err := requested(s)
	onNodes := a.onNodes(s)
	r := lb.Request{
		Holder: a.holder(s), Pool: annotation(s, wantPool), Addresses: wanted,
		Allows: func(pool string) bool {
			i := slices.IndexFunc(a.pools, func(p Pool) bool { return p.Name == pool })
			return i >= 0 && a.pools[i].serves(s) && a.pools[i].Nodes == onNodes
		},
	}
	// With PreferDualStack one family is enough, unless the user requests addresses explicitly.
	policy := s.Spec.IPFamilyPolicy
	preferDual := policy != nil && *policy == core.IPFamilyPolicyPreferDualStack && len(wanted) == 0
	for _, f := range s.Spec.IPFamilies {
		family := lb.IPv6
		if f == core.IPv4Protocol {
			family = lb.IPv4
		}
		r.Families = append(r.Families, lb.FamilyRequest{Family: family, Optional: preferDual})
	}
	if err == nil {
		r.PerFamily, err = a.perFamily(s), checkPerNode(s, wanted)
	}
	if err == nil && onNodes {
		err = a.requestNodes(&r)
	}
	return r, err
}

// isPerNode reports whether a Service wants one address of each family per node.
func isPerNode(s *core.Service) bool {
	on, err := strconv.ParseBool(annotation(s, perNode))
	return err == nil && on
}

// checkPerNode says why the per-node annotation has no effect, or returns nil.
func checkPerNode(s *core.Service, wanted []netip.Addr) error {
	text := annotation(s, perNode)
	if _, err := strconv.ParseBool(text); err != nil && text != "" {
		return fmt.Errorf(`%s is %.200q; write "true"`, perNode[0], text)
	}
	if isPerNode(s) && len(wanted) > 0 {
		return fmt.Errorf("both %s and named addresses are requested; remove one", perNode[0])
	}
	return nil
}

// excluded returns the addresses in a Service's status whose pool the Service may not use.
func (a *assigner) excluded(s *core.Service) []netip.Addr {
	return slices.DeleteFunc(statusAddresses(s), func(addr netip.Addr) bool {
		p := poolOf(a.pools, addr)
		return p == nil || p.serves(s)
	})
}

// asksForMore reports whether a Service requests, by address or by pool, addresses that it does not have, or more of
// them.
func (a *assigner) asksForMore(s *core.Service, has []netip.Addr) bool {
	if wanted, err := requested(s); err != nil || len(wanted) > 0 {
		return err != nil || !sameAddresses(wanted, has)
	}
	pool := annotation(s, wantPool)
	return a.waits(s, has) || slices.ContainsFunc(has, func(x netip.Addr) bool {
		p := poolOf(a.pools, x)
		return p == nil || pool != "" && p.Name != pool
	})
}

// perFamily returns how many addresses of each family a Service needs. With one per node, the number never shrinks when
// nodes disappear, because clients know the addresses.
func (a *assigner) perFamily(s *core.Service) int {
	if !isPerNode(s) {
		return 1
	}
	has := map[lb.Family]int{}
	for _, addr := range a.alloc.Given(nameOf(s)) {
		has[lb.FamilyOf(addr)]++
	}
	return min(max(a.nodes, has[lb.IPv4], has[lb.IPv6], 1), lb.VIPsPerNodeMax)
}

// waits reports whether a Service could get another address.
func (a *assigner) waits(s *core.Service, addrs []netip.Addr) bool {
	return len(addrs) < len(s.Spec.IPFamilies)*a.perFamily(s)
}

// holder returns the properties that decide which Services can share an address with s.
func holder(s *core.Service) lb.Holder {
	h := lb.Holder{
		Service: nameOf(s), Namespace: s.Namespace, ShareKey: annotation(s, wantShare),
		Created: s.CreationTimestamp.Time, ID: string(s.UID),
	}
	for name := range strings.FieldsFuncSeq(annotation(s, shareWith), isListSeparator) {
		h.ShareWith = append(h.ShareWith, name)
	}
	for _, p := range s.Spec.Ports {
		if port, ok := portOfSpec(p); ok {
			h.Ports = append(h.Ports, port)
		}
	}
	if len(h.Ports) > sharedPortsMax {
		h.ShareKey = ""
	}
	return h
}

func isListSeparator(r rune) bool { return r == ',' || r == ' ' }

// errNotAllowed is the end of an error about a pool that a Service may not use.
var errNotAllowed = errors.New("not for this Service: see its class, namespaces and service_selector")

// explain adds to an allocator error what a Kubernetes user can do about it.
func (a *assigner) explain(s *core.Service, err error) error {
	var e *lb.AssignError
	if !errors.As(err, &e) {
		return err
	}
	switch e.Cause {
	case lb.PortInUse:
		if e.Addr.IsUnspecified() {
			return explainNodes(e)
		}
		return fmt.Errorf("%s belongs to %s, and cannot be shared with it because both have port %s",
			e.Addr, e.Service, portText(e.Port))
	case lb.NoSuchPool:
		return fmt.Errorf("%w; pools: %s", err, names(a.pools))
	case lb.PoolNotAllowed:
		return fmt.Errorf("the pool %q is %w", e.Pools[0], errNotAllowed)
	case lb.NoPool:
		if len(a.pools) == 0 {
			return errors.New(textNoPool)
		}
		return fmt.Errorf("no pool permits this Service: %s; name one with the annotation steelyard.dev/pool, or "+
			"change the pools", a.whyNot(s))
	case lb.NoFreeAddress:
		return fmt.Errorf("%w; add addresses to a pool, or delete a Service that has one", err)
	case lb.AddrNotAllowed:
		return fmt.Errorf("%s is in the pool %q, which is %w", e.Addr, e.Pools[0], errNotAllowed)
	case lb.AddrInUse:
		return fmt.Errorf("%w; to share it, set the annotation steelyard.dev/share to the same value on both", err)
	case lb.NotSharedWith:
		return fmt.Errorf("%w, whose share key is valid only in its namespace; it can name the namespace %s in the "+
			"annotation %s, or the pool can set share_across_namespaces", err, s.Namespace, shareWith[0])
	case lb.FamilyNotRequested:
		return fmt.Errorf("%s is requested, but the Service has no such family: see spec.ipFamilies", e.Addr)
	}
	return err
}

// whyNot says why a Service that names no pool gets no address. It covers only the first pools, because an Event must
// be short.
func (a *assigner) whyNot(s *core.Service) string {
	const shown = 5
	var all []string
	for i, p := range a.pools {
		if i == shown {
			all = append(all, fmt.Sprintf("and %d more", len(a.pools)-shown))
			break
		}
		reason := "has no auto_assign"
		if p.AutoAssign {
			reason = p.refuses(s)
		}
		all = append(all, p.Name+" "+reason)
	}
	return strings.Join(all, ", ")
}

// requested returns the addresses that a Service requests explicitly.
func requested(s *core.Service) (addrs []netip.Addr, err error) {
	text := annotation(s, wantAddresses)
	if s.Spec.LoadBalancerIP != "" {
		if text != "" {
			return nil, errors.New("both spec.loadBalancerIP and an annotation request addresses; remove one")
		}
		text = s.Spec.LoadBalancerIP
	}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		addr, err := netip.ParseAddr(part)
		if err != nil || addr.Zone() != "" { // a zone could be any text
			return nil, fmt.Errorf("%.200q is requested, but is not an IP address", part)
		}
		if slices.ContainsFunc(addrs, func(o netip.Addr) bool { return o.Is4() == addr.Is4() }) {
			return nil, fmt.Errorf("two addresses of one family are requested: %s", printable.Cut(text))
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

func names(pools []Pool) string {
	var all []string
	for _, p := range pools {
		all = append(all, p.Name)
	}
	return strings.Join(all, ", ")
}

// poolOf returns the pool that contains addr, or nil.
func poolOf(pools []Pool, addr netip.Addr) *Pool {
	for i := range pools {
		if pools[i].Contains(addr) {
			return &pools[i]
		}
	}
	return nil
}
