package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// An older Service that shares an address by the key of another one, and then changes so that only one of them can have
// it, loses it: also when it changes while there is no leader. The other one is not written.
func TestSharerThatChangesLosesTheAddress(t *testing.T) {
	note := func(name, value string) func(*core.Service) {
		return func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/" + name: value} }
	}
	samePort := func(s *core.Service) { s.Spec.Ports[0].Port = 80 }
	named := func(s *core.Service) {
		samePort(s)
		s.Annotations["steelyard.dev/addresses"] = "203.0.113.2"
	}
	const lost = "guest [203.0.113.1], host [203.0.113.2]"
	for _, tt := range []struct {
		name    string
		change  func(*core.Service)
		without bool // a leader
		want    string
	}{
		{"the port", samePort, false, lost},
		{"the port, without a leader", samePort, true, lost},
		{"the key", note("share", "y"), false, lost},
		{"the key, without a leader", note("share", "y"), true, lost},
		{"no key", func(s *core.Service) { s.Annotations = nil }, true, lost},
		{"the port, and it asks for the address", named, true, "guest [], host [203.0.113.2]"},
		{
			"another port", func(s *core.Service) { s.Spec.Ports[0].Port = 82 }, true,
			"guest [203.0.113.2], host [203.0.113.2]",
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			server := newAPIServer(t, 1)
			settle := func() { time.Sleep(10 * time.Minute) }
			start := func() (stop func()) {
				ctx, cancel := context.WithCancel(t.Context())
				client := server.client("agent", &faults{})
				a := NewAllocator(AllocatorOptions{
					Client: client, Lease: client, Node: "n", Namespace: "steelyard",
					Pools: []Pool{poolOfOne("203.0.113.1"), poolOfOne("203.0.113.2")},
					Log:   slog.New(slog.DiscardHandler),
				})
				a.events = &record.FakeRecorder{}
				go a.lead(ctx)
				settle()
				return func() { cancel(); settle() }
			}
			edit := func(name string, change func(*core.Service)) {
				server.edit("default/"+name, func(s *core.Service) *core.Service {
					if s == nil {
						s = wanting(name, note("share", "x"))
					}
					change(s)
					return s
				})
			}
			stop := start()
			edit("guest", func(s *core.Service) { s.Spec.LoadBalancerClass = ptr("x/y") }) // created first
			edit("other", func(s *core.Service) { s.Annotations = nil })                   // has the first address
			settle()
			edit("host", same)
			settle()
			edit("guest", func(s *core.Service) { s.Spec.LoadBalancerClass, s.Spec.Ports[0].Port = nil, 81 })
			settle()
			edit("other", func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP })
			settle()
			server.mu.Lock()
			server.written = func(_ string, old, _ *core.Service) {
				if old.Name == "host" {
					t.Errorf("%s: the host is written", tt.name)
				}
			}
			server.mu.Unlock()
			if tt.without {
				stop()
			}
			edit("guest", tt.change)
			if tt.without {
				stop = start()
			}
			settle()
			stop()
			server.mu.Lock()
			defer server.mu.Unlock()
			guest, host := server.services["default/guest"], server.services["default/host"]
			if got := fmt.Sprintf("guest %v, host %v", statusAddresses(guest), statusAddresses(host)); got != tt.want {
				t.Errorf("%s: %s; want %s", tt.name, got, tt.want)
			}
			if agreedAt(host) == 0 || len(statusOf(guest)) > 0 && agreementOf(guest).terms != terms(guest) {
				t.Errorf("%s: agreed with %q and %q", tt.name, agreementOf(host), agreementOf(guest))
			}
		})
	}
}

// The terms of a Service do not depend on the order of its ports, and are short enough for a condition.
func TestTerms(t *testing.T) {
	s := wanting("web", func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/allow-shared-ip": "x"}
		s.Spec.Ports = []core.ServicePort{{Port: 443, Protocol: core.ProtocolUDP}, {Port: 80}}
	})
	if got, want := terms(s), `443/UDP, 80/TCP by the key "x"`; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	s.Spec.Ports[0], s.Spec.Ports[1] = s.Spec.Ports[1], s.Spec.Ports[0]
	if got, want := terms(s), `443/UDP, 80/TCP by the key "x"`; got != want {
		t.Errorf("in another order %s; want %s", got, want)
	}
	s.Status.Conditions = conditionsAfter(s, decision{addrs: []string{"203.0.113.1"}, agreed: agreement{terms(s), 7}})
	if agreedAt(s) != 7 || len(conditionsOfOthers(s)) > 0 {
		t.Errorf("conditions %+v", s.Status.Conditions)
	}
	s.Annotations["metallb.io/allow-shared-ip"] = strings.Repeat("x", 5000)
	if got := terms(s); !strings.HasPrefix(got, "2 ports, sum ") || len(got) > termsLength {
		t.Errorf("with a long key %s", got)
	}
}
