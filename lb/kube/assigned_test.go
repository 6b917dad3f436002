package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A Service that cannot have an address has a condition with the reason, until it has one. An Event says it once.
func TestConditionAssigned(t *testing.T) {
	other := meta.Condition{Type: "LoadBalancerPortsError", Status: meta.ConditionFalse, Reason: "X"}
	wrong := wanting("web", func(s *core.Service) {
		s.Annotations = map[string]string{"steelyard.dev/pool": "x"}
		s.Status.Conditions = []meta.Condition{other}
	})
	term, client, events := testTerm(t, wrong)
	api := client.CoreV1().Services("default")
	reconcile := func() *core.Service {
		t.Helper()
		s := must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		must.Do(t, term.services.Update(s))
		must.Do(t, term.reconcile(t.Context(), webName))
		s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		return s
	}
	condition := func(s *core.Service) string {
		if len(s.Status.Conditions) != 2 || s.Status.Conditions[0] != other {
			t.Errorf("conditions %+v; want another's as well", s.Status.Conditions)
		}
		c := assignedCondition(s)
		if c == nil {
			return "none"
		}
		return fmt.Sprintf("%s %s %s", c.Status, c.Reason, c.Message)
	}
	const want = `False AllocationFailed there is no pool "x"; pools: public`
	if got := condition(reconcile()); got != want {
		t.Errorf("condition %q; want %q", got, want)
	}
	patches(client)
	reconcile()
	if got := patches(client); len(got) > 0 {
		t.Errorf("written again: %q", got)
	}
	if n := len(events.Events); n != 1 {
		t.Errorf("%d Events; want one", n)
	}
	s := reconcile()
	s.Annotations = nil
	must.Get(api.Update(t.Context(), s, meta.UpdateOptions{}))(t)
	s = reconcile()
	if got := condition(s); got != "True Assigned " || len(s.Status.LoadBalancer.Ingress) != 1 {
		t.Errorf("condition %q, status %+v", got, s.Status.LoadBalancer)
	}
	s.Spec.Type = core.ServiceTypeClusterIP
	must.Get(api.Update(t.Context(), s, meta.UpdateOptions{}))(t)
	if s = reconcile(); len(s.Status.Conditions) != 1 || len(s.Status.LoadBalancer.Ingress) > 0 {
		t.Errorf("as ClusterIP: %+v", s.Status)
	}
}

// An annotation that looks like ours but is not gets an Event, once for each set of them.
func TestUnknownAnnotations(t *testing.T) {
	for _, tt := range []struct {
		annotations []string
		want        string
	}{
		{nil, ""},
		{[]string{"steelyard.dev/pool", "metallb.io/adress-pool", "example.com/pool"}, ""},
		{
			[]string{"steelyard.dev/pools", "steelyard.dev/adresses"},
			"Warning UnknownAnnotation steelyard.dev/adresses, steelyard.dev/pools has no effect; " +
				"the annotations are steelyard.dev/addresses, steelyard.dev/pool, steelyard.dev/share, " +
				"steelyard.dev/share-with, steelyard.dev/address-per-node",
		},
	} {
		s := wanting("web", func(s *core.Service) {
			given("203.0.113.1")(s)
			s.Finalizers, s.Annotations = []string{finalizer}, map[string]string{}
			for _, name := range tt.annotations {
				s.Annotations[name] = ""
			}
			slim(s)
		})
		term, _, events := testTerm(t, s)
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		var got []string
		for len(events.Events) > 0 {
			got = append(got, <-events.Events)
		}
		if text := strings.Join(got, "\n"); text != tt.want {
			t.Errorf("%v: %q; want %q", tt.annotations, text, tt.want)
		}
	}
}

// The Services that wait for an address are shown with the reason.
func TestWaiting(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward = lb.MethodTunnel })
	f.have(t,
		aService(func(s *core.Service) { s.Name = "has" }),
		aService(func(s *core.Service) { local(s); s.Name, s.Status = "local", core.ServiceStatus{} }),
		aService(func(s *core.Service) { s.Name, s.Status = "new", core.ServiceStatus{} }),
		aService(func(s *core.Service) {
			s.Name, s.Status = "failed", core.ServiceStatus{Conditions: []meta.Condition{{
				Type: conditionAssigned, Status: meta.ConditionFalse, Message: "no free address",
			}}}
		}),
		aService(func(s *core.Service) {
			s.Name, s.Status, s.Spec.LoadBalancerClass = "other", core.ServiceStatus{}, ptr("x/y")
		}),
	)
	var got []string
	for _, s := range f.Waiting() {
		got = append(got, fmt.Sprintf("%s %d/%s %s %s", s.Service, s.Port, s.Protocol, s.Forward, s.Reason))
	}
	const none = ", and this node has no [[pool]]"
	want := []string{
		"default/failed 80/tcp tunnel no address: no free address",
		"default/local 80/tcp nat no address: no address is assigned yet" + none,
		"default/new 80/tcp tunnel no address: no address is assigned yet" + none,
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q; want %q", got, want)
	}
}

// Two allocators with different pools, which lead in two namespaces, do not overwrite each other's conditions forever.
func TestConditionsOfTwoAllocators(t *testing.T) {
	for name, change := range map[string]func(*core.Service){
		"has an address of one": func(s *core.Service) { given("203.0.113.1")(s); s.Finalizers = []string{finalizer} },
		"asks for one of none": func(s *core.Service) {
			s.Annotations = map[string]string{wantPool[0]: "x"}
		},
	} {
		one, client, _ := testTerm(t, wanting("web", change))
		two := newTerm(one.Allocator, []Pool{poolOfOne("203.0.113.9")})
		two.services = one.services
		t.Cleanup(two.queue.ShutDown)
		for range 10 {
			for _, term := range []*term{one, two} {
				s, err := client.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{})
				if err == nil {
					err = term.services.Update(s)
				}
				if err == nil {
					err = term.reconcile(t.Context(), webName)
				}
				must.Do(t, err)
			}
		}
		if got := patches(client); len(got) == 0 || len(got) > 2 {
			t.Errorf("%s: %d writes: %q", name, len(got), got)
		}
	}
}
