package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// poolTable has the properties of pools that the checks of other sections use.
type poolTable struct {
	names  map[string]string // paths by name
	broken bool              // a pool has errors, so do not report addresses outside pools
	ranges []pooledRange
}

type pooledRange struct {
	lb.AddrRange
	item item
}

var (
	objectName    = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	namespaceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

// name reads the unique name of a pool or service. Later errors about the table show it.
func (t *table) name(kind string, taken map[string]string) string {
	i, ok := t.need("name", fmt.Sprintf("write name = %q", "web"))
	if !ok {
		return ""
	}
	s, ok := i.str("web")
	if !ok {
		return ""
	}
	t.object = fmt.Sprintf("%s %q", kind, s)
	i.object, t.d.objects[t.path] = t.object, t.object
	if !objectName.MatchString(s) {
		i.errorf(`write up to 63 letters, digits, "-", "_" and "."`, "%q is not a name", s)
		return ""
	}
	if other, ok := taken[s]; ok {
		i.errorf("use unique names", "%s on line %d also has this name", other, t.d.line(other))
		return ""
	}
	taken[s] = t.path
	return s
}

func (d *decoder) pool(t *table) {
	p := Pool{AutoAssign: true}
	p.Name = t.name("pool", d.pools.names)
	if p.Nodes = d.poolOfNodes(t); !p.Nodes {
		p.Ranges = d.poolRanges(t)
	}
	d.pools.broken = d.pools.broken || p.Name == ""
	p.Announce = d.announce(t)
	p.AutoAssign = t.boolean("auto_assign", p.AutoAssign)
	p.AvoidBuggyIPs = t.boolean("avoid_buggy_ips", p.AvoidBuggyIPs)
	if i, ok := t.get("class"); ok {
		p.Class, ok = i.class()
		k := d.config.Kubernetes
		if ok && k != nil && p.Class != "" && !slices.Contains(k.LoadBalancerClasses, p.Class) {
			i.errorf("add it there", "kubernetes.load_balancer_class has no %q", p.Class)
		}
	}
	p.Namespaces = t.matching("namespaces", "default", namespaceName, `write lower-case letters, digits and "-"`,
		"namespace")
	p.ServiceSelector = t.selector("service_selector")
	p.ExternalIPs = t.boolean("external_ips", p.ExternalIPs)
	p.ShareAcross = t.boolean("share_across_namespaces", p.ShareAcross)
	p.Grace = t.duration("grace", 10*time.Minute, 0, 24*time.Hour)
	p.Priority = integer(t, "priority", p.Priority, -1<<31, 1<<31-1)
	p.Attributes = t.attributes()
	p.Prepend = integer(t, "prepend", p.Prepend, 0, 10)
	p.AggregateV4, p.AggregateV6 = t.aggregates(0, 0)
	t.done()
	d.config.Pools = append(d.config.Pools, p)
}

// poolOfNodes reports whether a pool has the nodes' addresses, which only the nodes' service proxy can serve.
func (d *decoder) poolOfNodes(t *table) bool {
	const nodes = "node"
	all, _ := t.at("addresses").elements()
	at := slices.IndexFunc(all, func(i item) bool { return i.value == nodes })
	if at < 0 {
		return false
	}
	t.get("addresses")
	i := all[at]
	other := slices.IndexFunc(d.config.Pools, func(p Pool) bool { return p.Nodes })
	switch k := d.config.Kubernetes; {
	case len(all) > 1:
		i.errorf("give the others a pool of their own", "%q must be the only element", nodes)
	case other >= 0:
		i.errorf("list it once", "pool %q has the nodes' addresses already", d.config.Pools[other].Name)
	case k == nil || k.Proxy != ProxyReplace:
		i.errorf(`set proxy = "replace" in [kubernetes]`,
			"the nodes' addresses need the agent as service proxy, because they have ports of other programs")
	}
	for _, key := range []string{
		"announce", "avoid_buggy_ips", "external_ips", "share_across_namespaces", "grace", "communities", "local_pref",
		"med", "prepend", "aggregate_v4", "aggregate_v6",
	} {
		if t.has(key) {
			t.at(key).warnf("leave it out", "has no effect on the nodes' addresses")
		}
	}
	return true
}

// poolRanges reads addresses and compares them with the previous pools.
func (d *decoder) poolRanges(t *table) []lb.AddrRange {
	var ranges []lb.AddrRange
	for _, e := range t.some("addresses", "203.0.113.0/28", `write addresses = ["203.0.113.0/28"]`) {
		r, ok := e.addrRange()
		if !ok {
			d.pools.broken = true
			continue
		}
		for _, o := range d.pools.ranges {
			if overlap(r, o.AddrRange) {
				where := o.item.where()
				if o.item.object != "" {
					where = fmt.Sprintf("%s (%s)", where, o.item.object)
				}
				e.errorf("list each address once",
					"%s overlaps with %s, %s", formatRange(r), formatRange(o.AddrRange), where)
			}
		}
		for _, own := range d.own {
			if r.Contains(own.addr) {
				e.errorf("leave it out; ranges can be written like \"203.0.113.40-203.0.113.50\"",
					"%s has %s, which is %s", formatRange(r), own.addr, own.key)
			}
		}
		d.pools.ranges = append(d.pools.ranges, pooledRange{r, e})
		ranges = append(ranges, r)
	}
	d.pools.broken = d.pools.broken || len(ranges) == 0
	return ranges
}

// announce reads a pool's announcers, which must be on.
func (d *decoder) announce(t *table) []lb.AnnouncerKind {
	return distinct(t.list("announce", "bgp"), func(i item) (lb.AnnouncerKind, bool) {
		s, ok := i.word("announcer", words(lb.AnnouncerKinds))
		kind := lb.AnnouncerKind(s)
		if !ok {
			return "", false
		}
		if on := map[lb.AnnouncerKind]bool{
			lb.AnnounceBGP: d.config.BGP != nil, lb.AnnounceL2: d.config.L2 != nil,
		}; !on[kind] {
			i.errorf(fmt.Sprintf("add a section [%s] or remove this", kind), "%s is off", kind)
			return "", false
		}
		return kind, true
	})
}

// poolOf returns the pool that contains addr.
func (d *decoder) poolOf(addr netip.Addr) *Pool {
	for n := range d.config.Pools {
		if p := &d.config.Pools[n]; p.Contains(addr) {
			return p
		}
	}
	return nil
}

func (d *decoder) poolNamed(name string) *Pool {
	for n := range d.config.Pools {
		if p := &d.config.Pools[n]; p.Name == name {
			return p
		}
	}
	return nil
}

// describePools formats the pools like "public (203.0.113.0/28, 2001:db8:1::/124), office (198.51.100.0/24)".
func (d *decoder) describePools() string {
	list := make([]string, len(d.config.Pools))
	for n, p := range d.config.Pools {
		ranges := make([]string, len(p.Ranges))
		for m, r := range p.Ranges {
			ranges[m] = formatRange(r)
		}
		list[n] = fmt.Sprintf("%s (%s)", p.Name, strings.Join(ranges, ", "))
	}
	return strings.Join(list, ", ")
}
