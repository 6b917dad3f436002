package inside

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// readEarlier reads the addresses and the mode that an earlier agent has written.
func (i *Inside) readEarlier() error {
	var ranges prog.Ranges
	if err := i.objects.Ranges.Lookup(uint32(0), &ranges); err != nil {
		return fmt.Errorf("read the ranges: %w", err)
	}
	i.older.held = ranges.Mode == prog.Beside || ranges.Mode == prog.Draining && !i.o.Drain
	var addr prog.Addr
	var kind uint32
	all := i.objects.Addrs.Iterate()
	for all.Next(&addr, &kind) {
		a := fromAddr(addr)
		if i.kinds[a] = kind; kind&^(prog.Own|prog.NodePorts) != 0 {
			i.earlier[a] = kind &^ (prog.Own | prog.NodePorts)
		}
	}
	return all.Err()
}

// refresh reads this node's addresses, and writes what depends on them. With force it does so even if they are the
// same, because another program may have removed a route.
func (i *Inside) refresh(force bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	o, err := readOwn()
	if err != nil {
		return err
	}
	if !force && reflect.DeepEqual(o, i.own) {
		return nil
	}
	i.own = o
	return errors.Join(i.putAll(), o.putSources(i.objects)) // replies to a source must be known before it is used
}

// kind returns what an address is, or 0.
func (i *Inside) kind(a netip.Addr) (kind uint32) {
	s := i.services.addrs[a]
	switch {
	case a.IsUnspecified(): // node ports
		return 0
	case s != nil && (s.cluster > 0 || s.whole > 0):
		kind = prog.Cluster
	case s != nil:
		kind = prog.Shared
	default:
		kind = i.earlier[a]
	}
	// An address of the node that is a VIP as well still has ports of processes.
	if i.own.addrs[a] && (s == nil || s.cluster == 0) && i.earlier[a]&prog.Cluster == 0 {
		if in(i.o.NodePorts, a) || len(i.o.NodePorts) == 0 {
			return prog.Own | prog.NodePorts
		}
		return prog.Own
	}
	if i.own.addrs[a] {
		kind |= prog.Own
	}
	return kind
}

// in reports whether one of the prefixes contains an address.
func in(all []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
}

// putTouched writes what the addresses are that services have gained or lost.
func (i *Inside) putTouched() (err error) {
	cover, routes := false, false
	for a := range i.services.touched {
		if failed := i.putKind(a, i.kind(a)); failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		delete(i.services.touched, a)
		_, stays := i.kinds[a]
		cover = cover || stays && !in(i.v4, a) && !in(i.v6, a)
		routes = routes || !in(i.routed, a) || slices.Contains(i.routed, netip.PrefixFrom(a, a.BitLen()))
	}
	if cover {
		err = errors.Join(err, i.putRanges())
	}
	if routes {
		i.route()
	}
	return err
}

// putAll writes what all addresses are.
func (i *Inside) putAll() (err error) {
	all := maps.Clone(i.kinds)
	for a := range i.services.addrs {
		all[a] = 0
	}
	for a := range i.own.addrs {
		all[a] = 0
	}
	for a := range all {
		err = errors.Join(err, i.putKind(a, i.kind(a)))
	}
	err = errors.Join(err, i.putRanges())
	i.route()
	return err
}

func (i *Inside) putKind(a netip.Addr, kind uint32) error {
	if i.kinds[a] == kind {
		return nil
	}
	if kind == 0 {
		if err := ignoreMissing(i.objects.Addrs.Delete(toAddr(a))); err != nil {
			return fmt.Errorf("remove the address %s: %w", a, err)
		}
		delete(i.kinds, a)
		return nil
	}
	if err := i.objects.Addrs.Put(toAddr(a), kind); err != nil {
		return fmt.Errorf("write the address %s: %w", a, err)
	}
	i.kinds[a] = kind
	return nil
}

func (i *Inside) putRanges() error {
	all := slices.SortedFunc(maps.Keys(i.kinds), netip.Addr.Compare)
	first6, _ := slices.BinarySearchFunc(all, netip.IPv6Unspecified(), netip.Addr.Compare)
	v4, v6 := cover(all[:first6], maxRanges), cover(all[first6:], maxRanges)
	value := encode(v4, v6)
	switch {
	case i.o.Drain:
		value.Mode = prog.Draining
	case i.older.held:
		value.Mode = prog.Beside
	}
	if value == i.ranges {
		return nil
	}
	if err := i.objects.Ranges.Put(uint32(0), value); err != nil {
		return fmt.Errorf("write the ranges: %w", err)
	}
	i.v4, i.v6, i.ranges = v4, v6, value
	return nil
}

// clusterRoutes is how many routes the ClusterIPs of a family may have. Several ranges may be far apart.
const clusterRoutes = 8

// route leads the packets that this node sends to services to the routed device, except those to its own addresses,
// which never leave the stack, and to addresses that are another machine's as well.
func (i *Inside) route() {
	if len(i.earlier) > 0 {
		return
	}
	var to []netip.Prefix
	for _, is4 := range []bool{true, false} {
		var cluster, whole []netip.Addr
		for a, s := range i.services.addrs {
			switch {
			case a.Is4() != is4 || a.IsUnspecified() || i.own.addrs[a]:
			case s.cluster > 0:
				cluster = append(cluster, a)
			case s.whole > 0:
				whole = append(whole, a)
			}
		}
		if !i.own.source(is4).IsValid() { // nor does the node send packets of this family
			continue
		}
		slices.SortFunc(cluster, netip.Addr.Compare)
		to = append(to, cover(cluster, clusterRoutes)...)
		for _, a := range whole {
			to = append(to, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	i.setFault("routes to Services", i.device.Route(to, i.own.node.v4, i.own.node.v6))
	i.routed = to
}
