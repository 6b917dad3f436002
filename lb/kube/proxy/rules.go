// Package proxy describes to which endpoints the service proxy of a node sends new connections, and reads what
// kube-proxy does. It leaves out source ranges, affinity, masquerading, and on which of the node's addresses node ports
// are open.
package proxy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// Destination is where clients of a Service connect to.
type Destination struct {
	Addr     netip.Addr // 0.0.0.0 or :: for a node port, on any address of the node
	Port     uint16
	Protocol lb.Protocol
}

func (d Destination) String() string {
	if d.Addr.IsUnspecified() {
		return fmt.Sprintf("node port %d/%s (%s)", d.Port, d.Protocol, lb.FamilyOf(d.Addr))
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(d.Addr, d.Port), d.Protocol)
}

// Rule says what happens to new connections to a destination: those from this node and its pods, and those from outside
// of the cluster. A ClusterIP has no outside.
type Rule struct {
	Service         string // namespace/name:port
	Inside, Outside Choice
}

// String returns a phrase such as "to 10.244.0.5:80" or, if connections from outside are treated differently,
// "to 10.244.0.5:80, from outside dropped".
func (r Rule) String() string {
	text := r.Inside.String()
	if out := r.Outside.String(); out != text && out != "" {
		text += ", from outside " + out
	}
	return text
}

// Choice is the set of endpoints of which one is chosen. If it is empty, Empty says what happens instead.
type Choice struct {
	Endpoints []netip.AddrPort // sorted
	Empty     Empty
}

// Empty is what happens without an endpoint.
type Empty string

const (
	Refused Empty = "refused" // the client is told at once
	Dropped Empty = "dropped" // other nodes have endpoints
)

func (c Choice) String() string {
	if len(c.Endpoints) == 0 {
		return string(c.Empty)
	}
	texts := make([]string, len(c.Endpoints))
	for i, e := range c.Endpoints {
		texts[i] = e.String()
	}
	return "to " + strings.Join(texts, " ")
}

// Rules holds all rules of a proxy.
type Rules map[Destination]Rule

// Compare returns where this node's rules differ from kube-proxy's, sorted by Service. Rules that only this node has
// count as added, and rules that only kube-proxy has as removed.
func Compare(here, kubeProxy Rules) (all []lb.Change) {
	for to, h := range here {
		k, both := kubeProxy[to]
		switch {
		case !both:
			all = append(all, change(lb.Added, h.Service, to, h.String()))
		case h.String() != k.String():
			all = append(all, change(lb.Changed, h.Service, to, fmt.Sprintf("%s; kube-proxy: %s", h, k)))
		}
	}
	for to, k := range kubeProxy {
		if _, both := here[to]; !both {
			all = append(all, change(lb.Removed, k.Service, to, k.String()))
		}
	}
	slices.SortFunc(all, func(a, b lb.Change) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Text, b.Text))
	})
	return all
}

func change(op lb.ChangeOp, service string, to Destination, text string) lb.Change {
	return lb.Change{Op: op, Object: "service " + cmp.Or(service, "unknown"), Text: to.String() + " " + text}
}
