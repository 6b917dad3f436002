package metallb

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Convert returns the configuration that corresponds to the objects in files, and the number of comments about what has
// no equivalent. Each such comment begins with "# MetalLB: ".
func Convert(files ...io.Reader) (text string, comments int, err error) {
	o := &objects{profiles: map[string]named[bfdProfile]{}, communities: map[string]string{}}
	for _, f := range files {
		if err := o.read(f); err != nil {
			return "", 0, err
		}
	}
	if len(o.pools)+len(o.peers) == 0 {
		return "", 0, fmt.Errorf("no IPAddressPool and no BGPPeer found")
	}
	w := &writer{}
	w.notes("", o.notes)
	w.line("[kubernetes]")
	if err := w.all(o); err != nil {
		return "", 0, err
	}
	return w.b.String(), w.comments, nil
}

// writer writes TOML.
type writer struct {
	b        strings.Builder
	comments int
}

func (w *writer) line(format string, args ...any) { fmt.Fprintf(&w.b, format+"\n", args...) }

// note writes a comment about an object.
func (w *writer) note(about, format string, args ...any) {
	w.comments++
	if about != "" {
		about += ": "
	}
	w.line("# MetalLB: %s%s", about, fmt.Sprintf(format, args...))
}

func (w *writer) notes(about string, notes []string) {
	for _, n := range notes {
		w.note(about, "%s", n)
	}
}

func (w *writer) str(key, value string) {
	if value != "" {
		w.line("%s = %s", key, strconv.Quote(value))
	}
}

func (w *writer) num(key string, value int) {
	if value != 0 {
		w.line("%s = %d", key, value)
	}
}

func (w *writer) strs(key string, values []string) {
	if len(values) == 0 {
		return
	}
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = strconv.Quote(v)
	}
	w.line("%s = [%s]", key, strings.Join(quoted, ", "))
}

// all writes all sections.
func (w *writer) all(o *objects) error {
	ways := map[string]*ways{}
	for _, p := range o.pools {
		found, err := o.waysOf(p)
		if err != nil {
			return fmt.Errorf("IPAddressPool %s: %w", p.name, err)
		}
		ways[p.name] = found
	}
	if len(o.l2) > 0 {
		w.l2(o.l2)
	}
	if len(o.peers) > 0 {
		w.peers(o, ways)
	}
	for _, p := range o.pools {
		w.pool(o, p, ways[p.name])
	}
	return nil
}

// ways holds the advertisements of a pool.
type ways struct {
	l2  []named[l2Advertisement]
	bgp []named[bgpAdvertisement]
}

func (o *objects) waysOf(p named[pool]) (w *ways, err error) {
	w = &ways{}
	if w.l2, err = selecting("L2Advertisement", o.l2, p); err == nil {
		w.bgp, err = selecting("BGPAdvertisement", o.bgp, p)
	}
	return w, err
}

// selecting returns those of all that select a pool.
func selecting[T interface {
	selects(named[pool]) (bool, error)
}](kind string, all []named[T], p named[pool]) (some []named[T], err error) {
	for _, a := range all {
		ok, err := a.spec.selects(p)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", kind, a.name, err)
		}
		if ok {
			some = append(some, a)
		}
	}
	return some, nil
}

// l2 writes [l2] with the interfaces of all advertisements, or without interfaces if one advertisement names none.
func (w *writer) l2(all []named[l2Advertisement]) {
	w.line("\n[l2]")
	var interfaces []string
	every := false
	for _, a := range all {
		about := "L2Advertisement " + a.name
		w.notes(about, a.notes)
		every = every || len(a.spec.Interfaces) == 0
		interfaces = append(interfaces, a.spec.Interfaces...)
		if len(a.spec.Interfaces) > 0 && len(all) > 1 {
			w.note(about, "interfaces are the same for all pools")
		}
		if len(a.spec.Nodes)+len(a.spec.Preferred) > 0 {
			w.note(about, "any node may answer for an address; label nodes that must not with "+
				"node.kubernetes.io/exclude-from-external-load-balancers")
		}
		if len(a.spec.Services) > 0 {
			w.note(about, "serviceSelectors have no equivalent: all Services are announced")
		}
	}
	if !every {
		slices.Sort(interfaces)
		w.strs("interfaces", slices.Compact(interfaces))
	}
}

// pool writes a [[pool]].
func (w *writer) pool(o *objects, p named[pool], found *ways) {
	about := "IPAddressPool " + p.name
	w.line("\n[[pool]]")
	w.notes(about, p.notes)
	w.str("name", p.name)
	w.strs("addresses", p.spec.Addresses)
	switch {
	case len(found.l2)+len(found.bgp) == 0:
		w.note(about, "it has no advertisement, so MetalLB does not announce it; with [bgp] or [l2], Steelyard does")
	case len(found.bgp) == 0 && len(o.bgp) > 0:
		w.strs("announce", []string{"l2"})
	case len(found.l2) == 0 && len(o.l2) > 0:
		w.strs("announce", []string{"bgp"})
	}
	if p.spec.AutoAssign != nil && !*p.spec.AutoAssign {
		w.line("auto_assign = false")
	}
	if p.spec.AvoidBuggyIPs {
		w.line("avoid_buggy_ips = true")
	}
	a := p.spec.ServiceAllocation
	w.num("priority", o.priority(a.Priority))
	w.strs("namespaces", a.Namespaces)
	if len(a.NamespaceSelectors) > 0 {
		w.note(about, "namespaceSelectors have no equivalent: list the namespaces in namespaces")
	}
	w.selector(about, "service_selector", a.ServiceSelectors)
	w.attributes(o, about, found.bgp)
}

// priority returns a pool's priority. In MetalLB, pools without one are used last.
func (o *objects) priority(own int) int {
	most := 0
	for _, p := range o.pools {
		most = max(most, p.spec.ServiceAllocation.Priority)
	}
	if own == 0 && most > 0 {
		return most + 1
	}
	return own
}

// attributes writes the attributes of a pool's routes. MetalLB sends a route with the communities of all its
// advertisements.
func (w *writer) attributes(o *objects, about string, all []named[bgpAdvertisement]) {
	var communities []string
	var pref uint32
	v4, v6 := 0, 0
	for i, a := range all {
		w.notes("BGPAdvertisement "+a.name, a.notes)
		for _, c := range a.spec.Communities {
			communities = append(communities, strings.TrimPrefix(cmp.Or(o.communities[c], c), "large:"))
		}
		differ := i > 0 && (a.spec.AggregationLength != v4 || a.spec.AggregationV6 != v6 || a.spec.LocalPref != pref)
		if i == 0 {
			v4, v6, pref = a.spec.AggregationLength, a.spec.AggregationV6, a.spec.LocalPref
		}
		if differ {
			w.note(about, "BGPAdvertisements %s and %s differ; the first one's aggregation and preference are used",
				all[0].name, a.name)
		}
		if len(a.spec.Nodes) > 0 {
			w.note(about, "nodeSelectors of BGPAdvertisement %s have no equivalent: any node may announce it", a.name)
		}
		if len(a.spec.Services) > 0 {
			w.note(about, "serviceSelectors of BGPAdvertisement %s have no equivalent: it is for all", a.name)
		}
	}
	slices.Sort(communities)
	w.strs("communities", slices.Compact(communities))
	w.num("local_pref", int(pref))
	w.num("aggregate_v4", v4)
	w.num("aggregate_v6", v6)
}

// selector writes a label selector. Of several, MetalLB requires one, which cannot be written as one selector.
func (w *writer) selector(about, key string, all []meta.LabelSelector) {
	switch {
	case len(all) == 0:
	case len(all) > 1:
		w.note(about, "%d alternative selectors have no equivalent: write one in %s", len(all), key)
	default:
		s, err := meta.LabelSelectorAsSelector(&all[0])
		if err != nil {
			w.note(about, "a selector is wrong: %v", err)
			return
		}
		w.str(key, s.String())
	}
}
