package kube

import (
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A Service from which an address is taken gets an Event with the reason. The deletion of the Service is no reason.
func TestAddressMoved(t *testing.T) {
	const taken = "Warning AddressMoved 203.0.113.1 was taken from the Service"
	for _, tt := range []struct {
		change func(*core.Service)
		want   string
	}{
		{same, ""},
		{
			func(s *core.Service) { s.Spec.LoadBalancerIP = "203.0.113.2" },
			taken + ", which has 203.0.113.2 now: it asks for other ones by name",
		},
		{
			func(s *core.Service) { s.Annotations = map[string]string{wantPool[0]: "more"} },
			taken + `, which has 198.51.100.1 now: it asks for the pool "more"`,
		},
		{
			func(s *core.Service) { s.Spec.IPFamilies = []core.IPFamily{core.IPv6Protocol} },
			taken + ", which has 2001:db8::1 now: it asks for other families or for another number of addresses",
		},
		{
			func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP },
			taken + ": its type or its class is another one now",
		},
		{func(s *core.Service) { s.DeletionTimestamp = &meta.Time{} }, ""},
	} {
		s := wanting("web", func(s *core.Service) {
			given("203.0.113.1")(s)
			s.Finalizers = []string{finalizer}
			setManager(s, fieldManager)
			tt.change(s)
		})
		term, _, events := testTerm(t, s)
		more := poolOfOne("198.51.100.1")
		more.Name, more.AutoAssign = "more", false
		term.assigner = newAssigner("", append(term.o.Pools, more, poolOfOne("2001:db8::1")))
		must.Do(t, term.reconcile(t.Context(), webName))
		got := ""
		for len(events.Events) > 0 {
			if text := <-events.Events; strings.Contains(text, "AddressMoved") {
				got += text
			}
		}
		if got != tt.want {
			t.Errorf("%q; want %q", got, tt.want)
		}
	}
}
