package kube

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	core "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"

	"github.com/steelyard-lb/steelyard/lb"
)

// Services that share an address have different ports on it. A Service keeps its ports, and a Service whose ports
// change gets only ports that no other one has. The status of a Service that may share addresses therefore records its
// ports on them. All agents learn from this record which Service came first, including a new leader, and the nodes
// while there is no leader. The Kubernetes roles for users do not permit writing a status.

// conditionShared is a condition of Services that have an address and a share key, or share an address. Its message
// lists the ports that the Service has on its addresses.
const conditionShared = ourPrefix + "AddressShared"

// noPorts is the message for a Service that has none of its ports, because others have them all.
const noPorts = "no port"

// sharedPortsMax limits the ports of a Service that can share addresses, so that the intents of all workers fit into
// the ledger. A condition's message could list more.
const sharedPortsMax = 400

// portsText lists ports in sorted order.
func portsText(ports []lb.Port) string {
	if len(ports) == 0 {
		return noPorts
	}
	names := make([]string, len(ports))
	for i, p := range ports {
		names[i] = portText(p)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// portText is "80/TCP".
func portText(p lb.Port) string { return strings.ToUpper(p.Name()) }

// portsOf parses a list from portsText and skips everything else.
func portsOf(text string) (ports []lb.Port) {
	for name := range strings.SplitSeq(text, ", ") {
		number, protocol, _ := strings.Cut(name, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		p := lb.Port{Port: uint16(n)}
		if err == nil && p.Protocol.UnmarshalText([]byte(strings.ToLower(protocol))) == nil {
			ports = append(ports, p)
		}
	}
	return ports
}

// recordOf returns the record in a Service's status, or "" if it has none.
func recordOf(s *core.Service) string {
	c := apimeta.FindStatusCondition(s.Status.Conditions, conditionShared)
	if c == nil {
		return ""
	}
	return c.Message
}

// byKeyText separates the ports from the rest of a version 0.1 record.
const byKeyText = " by the key "

// holds returns what a Service has according to its status: the recorded ports or, without a record, all ports in its
// specification. Without a record no other Service can share its addresses yet.
func holds(s *core.Service) lb.Holder {
	h := holder(s)
	record, _, _ := strings.Cut(recordOf(s), byKeyText)
	if record == "" {
		h.ShareKey = ""
		return h
	}
	h.Ports = portsOf(record)
	return h
}

// recordFor returns the record of a Service with these ports, or "" if it needs none.
func (a *assigner) recordFor(h lb.Holder) string {
	if h.ShareKey == "" && !a.alloc.Shares(h.Service) {
		return ""
	}
	return portsText(h.Ports)
}

// grant adds to a decision the ports that the Service has on its addresses. Until the status is written, the Service
// has both its current and its future ports.
func (a *assigner) grant(s *core.Service, p pending, d decision) decision {
	h := a.holder(s)
	denied := a.alloc.Denied(h)
	h.Ports = without(h.Ports, denied)
	if d.record = a.recordFor(h); len(d.addrs) == 0 {
		d.record = ""
	}
	if d.write = d.write || d.record != recordOf(s); d.write || len(p.addrs) > 0 {
		had := a.has(s)
		had.Ports = union(union(had.Ports, p.ports), h.Ports)
		a.alloc.Take(had, a.pooled(s, union(union(statusAddresses(s), p.addrs), parsed(d.addrs))))
	}
	if len(denied) > 0 {
		d.waits = true
		if d.warning == "" {
			d.reason, d.warning = reasonPortInUse, portsInUse(denied)
		}
	}
	return d
}

func without(ports []lb.Port, denied []*lb.AssignError) []lb.Port {
	return slices.DeleteFunc(ports, func(p lb.Port) bool {
		return slices.ContainsFunc(denied, func(e *lb.AssignError) bool { return e.Port == p })
	})
}

// portsInUse says which ports a Service does not get.
func portsInUse(denied []*lb.AssignError) string {
	const shown = 5
	var all []string
	for i, e := range denied {
		if i == shown {
			all = append(all, fmt.Sprintf("and %d more", len(denied)-shown))
			break
		}
		at := e.Addr.String()
		if e.Addr.IsUnspecified() {
			at = "the nodes"
		}
		all = append(all, fmt.Sprintf("%s at %s belongs to %s", portText(e.Port), at, e.Service))
	}
	return strings.Join(all, ", ") + "; the Service keeps its addresses for its other ports"
}
