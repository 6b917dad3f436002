package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
)

// reasonMoved is the Event reason for a Service that has lost an address, which clients may still use.
const reasonMoved = "AddressMoved"

// moved emits an Event if the Service has lost addresses.
func (t *term) moved(s *core.Service, now []string, why string) {
	lost := slices.DeleteFunc(statusAddresses(s), func(a netip.Addr) bool { return slices.Contains(now, a.String()) })
	if len(lost) == 0 {
		return
	}
	has := ""
	if len(now) > 0 {
		has = ", which has " + strings.Join(now, ", ") + " now"
	}
	text := fmt.Sprintf("%s was taken from the Service%s: %s", strings.Join(texts(lost), ", "), has, why)
	t.events.Event(s, core.EventTypeWarning, reasonMoved, note(text))
}

// whyMoved says why a Service's addresses changed. Only its own specification can take one away,
// except a node's.
func whyMoved(s *core.Service, d decision) string {
	if d.onNodes {
		return "other nodes serve it"
	}
	if s.Spec.LoadBalancerIP != "" || annotation(s, wantAddresses) != "" {
		return "it requests others by name"
	}
	if pool := annotation(s, wantPool); pool != "" {
		return fmt.Sprintf("it requests the pool %q", pool)
	}
	return "it requests other families or a different number of addresses"
}
