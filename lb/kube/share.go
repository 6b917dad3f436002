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

// Services that share an address have different ports of it. Who has a port keeps it: a Service whose ports are changed
// gets those that no other one has. So the status of a Service that may share its addresses records the ports that it
// has of them. All agents read there who came first: the leader, also one that was not there before, and the nodes,
// while there is no leader. The roles that Kubernetes has for users permit no write of a status.

// conditionShared is a condition of Services with a share key that have an address, and of those that share one. Its
// message is the ports that a Service has of its addresses.
const conditionShared = ourPrefix + "AddressShared"

// noPorts is the message of a Service that has none of its ports: others have them all.
const noPorts = "no port"

// sharedPortsMax bounds the ports of a Service that can share addresses: the message of a condition has 32 KiB at most.
const sharedPortsMax = 2000

// portsText is the text of these ports, in any order.
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

// portsOf returns the ports of a text. Another text has none.
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

// recordOf returns the record in the status of a Service; "": it has none.
func recordOf(s *core.Service) string {
	c := apimeta.FindStatusCondition(s.Status.Conditions, conditionShared)
	if c == nil {
		return ""
	}
	return c.Message
}

// byKeyText separates the ports from the rest of a record of version 0.1.
const byKeyText = " by the key "

// holds returns what a Service has by its status: the recorded ports; without a record all that are in its
// specification, and then no other Service can share its addresses yet.
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

// recordFor returns the record of a Service that has these ports; "": it needs none.
func (a *assigner) recordFor(h lb.Holder) string {
	if h.ShareKey == "" && !a.alloc.Shares(h.Service) {
		return ""
	}
	return portsText(h.Ports)
}

// grant adds to a decision which ports of its addresses the Service has. Until the status is written, what it has stays
// its own, as well as what it is to have.
func (a *assigner) grant(s *core.Service, p pending, d decision) decision {
	h := holder(s)
	denied := a.alloc.Denied(h)
	h.Ports = without(h.Ports, denied)
	if d.record = a.recordFor(h); len(d.addrs) == 0 {
		d.record = ""
	}
	if d.write = d.write || d.record != recordOf(s); d.write || len(p.addrs) > 0 {
		had := holds(s)
		had.Ports = union(union(had.Ports, p.ports), h.Ports)
		a.alloc.Take(had, a.pooled(union(union(statusAddresses(s), p.addrs), parsed(d.addrs))))
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
		all = append(all, fmt.Sprintf("%s at %s belongs to %s", portText(e.Port), e.Addr, e.Service))
	}
	return strings.Join(all, ", ") + "; the Service keeps its addresses for its other ports"
}
