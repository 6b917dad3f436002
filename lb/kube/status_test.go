package kube

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
)

// Our writes are recognised as ours in metadata.managedFields, as the API server's field manager records them, even
// after slim; what another writer has overwritten is not.
func TestManagedFields(t *testing.T) {
	term, client, _ := testTerm(t)
	api := client.CoreV1().Services("default")
	s := must.Get(api.Create(t.Context(), wanting("web", same), meta.CreateOptions{FieldManager: "user"}))(t)
	s = must.Get(term.write(t.Context(), s, true, []string{"203.0.113.1"}, nil))(t)
	for range 2 {
		if got := fmt.Sprint(managers(s, addressField), managers(s, finalizerField)); got != "[steelyard] [steelyard]" {
			t.Errorf("written by %s: %+v", got, s.ManagedFields)
		}
		if !wroteStatus(s) || !hasOurFinalizer(s) {
			t.Errorf("not recognised: %+v", s.ManagedFields)
		}
		must.Get(slim(s))(t)
	}
	s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
	s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "192.0.2.1"}}
	s.Finalizers = slices.DeleteFunc(s.Finalizers, func(string) bool { return true })
	s = must.Get(api.UpdateStatus(t.Context(), s, meta.UpdateOptions{FieldManager: "other"}))(t)
	if got := fmt.Sprint(managers(s, addressField), wroteStatus(s), hasOurFinalizer(s)); got != "[other] false false" {
		t.Errorf("overwritten: %s: %+v", got, s.ManagedFields)
	}
}

// A Service whose address somebody else has written gets the other family when it wants both. Who writes the address
// alone again is not overwritten forever, and what we would have to change is left as it is.
func TestForeignStatusIsExtended(t *testing.T) {
	const v4, both = "[203.0.113.1]", "[203.0.113.1 2001:db8::1]"
	proxy, hostname := core.LoadBalancerIPModeProxy, "x.example"
	for _, tt := range []struct {
		name   string
		status func(*core.Service)
		want   string
		again  string // after somebody else has written the status again
	}{
		{"an address", foreign("203.0.113.1"), both, v4},
		{"an address of an older version", given("203.0.113.1"), both, both},
		{"of the second family", foreign("2001:db8::1"), both, "[2001:db8::1]"},
		{"in no pool", foreign("192.0.2.1"), "[192.0.2.1]", "[192.0.2.1]"},
		{"with a proxy", func(s *core.Service) {
			foreign("203.0.113.1")(s)
			s.Status.LoadBalancer.Ingress[0].IPMode = &proxy
		}, v4, v4},
		{"with a name", func(s *core.Service) {
			foreign("203.0.113.1")(s)
			s.Status.LoadBalancer.Ingress[0].Hostname = hostname
		}, v4, v4},
	} {
		synctest.Test(t, func(t *testing.T) {
			server := newAPIServer(t, 1)
			ctx, cancel := context.WithCancel(t.Context())
			client := server.client("agent", &faults{})
			a := NewAllocator(AllocatorOptions{
				Client: client, Lease: client, Node: "n", Namespace: "steelyard",
				Pools: []Pool{poolOfOne("203.0.113.1"), poolOfOne("2001:db8::1")}, Log: slog.New(slog.DiscardHandler),
			})
			a.events = &record.FakeRecorder{}
			go a.lead(ctx)
			step := func(when, want string, change func(*core.Service)) {
				t.Helper()
				server.edit(webName, func(s *core.Service) *core.Service {
					if s == nil {
						s = wanting("web", same)
					}
					change(s)
					return s
				})
				time.Sleep(10 * time.Minute)
				server.mu.Lock()
				defer server.mu.Unlock()
				if got := fmt.Sprint(statusAddresses(server.services[webName])); got != want {
					t.Errorf("%s: %s: %s; want %s", tt.name, when, got, want)
				}
			}
			families := func(s *core.Service, all ...core.IPFamily) {
				s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = ptr(core.IPFamilyPolicyPreferDualStack), all
			}
			first := fmt.Sprint(statusAddresses(wanting("web", tt.status)))
			step("one family", first, func(s *core.Service) {
				tt.status(s)
				families(s, core.IPv4Protocol)
				if addr := statusAddresses(s)[0]; addr.Is6() {
					families(s, core.IPv6Protocol)
				}
			})
			step("both families", tt.want, func(s *core.Service) { families(s, core.IPv4Protocol, core.IPv6Protocol) })
			step("written again", tt.again, func(s *core.Service) {
				s.Status = core.ServiceStatus{}
				tt.status(s)
				setManager(s, "other")
			})
			cancel()
			time.Sleep(5 * time.Minute)
		})
	}
}
