package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
)

// reasonMoved is the reason of the Event on a Service from which an address was taken: clients may still use it.
const reasonMoved = "AddressMoved"

// moved emits an Event if a Service had other addresses than those it has now.
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

// whyMoved returns why a Service gets other addresses: nothing but its own specification takes one from it.
func whyMoved(s *core.Service) string {
	if s.Spec.LoadBalancerIP != "" || annotation(s, wantAddresses) != "" {
		return "it asks for other ones by name"
	}
	if pool := annotation(s, wantPool); pool != "" {
		return fmt.Sprintf("it asks for the pool %q", pool)
	}
	return "it asks for other families or for another number of addresses"
}
