package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The API server accepts the names of the field managers, and each class has one.
func TestManagerOf(t *testing.T) {
	long := "example.com/" + strings.Repeat("x", 200)
	seen := map[string]bool{}
	for _, class := range []string{"", "x", "x/y", long + "1", long + "2"} {
		name := managerOf(class)
		if len(name) > 128 || !isSteelyard(name) || seen[name] {
			t.Errorf("class %.20q: %q", class, name)
		}
		seen[name] = true
	}
	if managerOf("") != "steelyard" {
		t.Errorf("default class: %q", managerOf(""))
	}
}

// One allocator serves several classes, each from the pools for it. The first names its Lease and writes. A Service of
// a class that nobody serves gets one Event, after a minute.
func TestClasses(t *testing.T) {
	of := func(name, class string, age time.Duration) *core.Service {
		return wanting(name, func(s *core.Service) {
			s.CreationTimestamp = meta.NewTime(time.Now().Add(-age))
			if class != "" {
				s.Spec.LoadBalancerClass = &class
			}
		})
	}
	const long = 2 * othersTime
	term, client, events := testTerm(t, of("a", "", long), of("b", "x/y", long), of("c", "z", long), of("d", "z", 0))
	term.o.Classes = []string{"", "x/y"}
	second := poolOfOne("203.0.113.9")
	second.Class, second.Priority = "x/y", -1
	term.assigner = newAssigner(term.o.Classes, append(term.o.Pools, second))
	var got []string
	for _, name := range []string{"a", "b", "c", "c", "d"} {
		must.Do(t, term.reconcile(t.Context(), "default/"+name))
		s := must.Get(client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
		text := name + fmt.Sprint(statusAddresses(s))
		for range len(events.Events) {
			text += " " + <-events.Events
		}
		got = append(got, text)
	}
	must.Equal(t, []string{
		"a[203.0.113.1] Normal IPAllocated assigned [203.0.113.1]",
		"b[203.0.113.9] Normal IPAllocated assigned [203.0.113.9]",
		`c[] Warning NoAgentForClass no agent of Steelyard serves the class "z": ` +
			"see load_balancer_class in [kubernetes]",
		"c[]", "d[]",
	}, got)
	if term.leaseName() != leaseName {
		t.Errorf("the Lease is %s", term.leaseName())
	}
}

// Allocators of two classes leave alone what is the other's: each Service is written once. A Service that moves from
// one class to the other gets an address of that one, and keeps the finalizer.
func TestTwoClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newAPIServer(t, 1)
		writes := map[string]int{}
		ctx, cancel := context.WithCancel(t.Context())
		server.written = func(client string, _, now *core.Service) {
			if writes[client+" "+now.Name]++; writes[client+" "+now.Name] > 50 {
				cancel() // they overwrite each other
			}
		}
		defer func() {
			cancel()
			time.Sleep(5 * time.Minute)
		}()
		start := func(class, first, last string) {
			ranges := []lb.AddrRange{{From: netip.MustParseAddr(first), To: netip.MustParseAddr(last)}}
			client := server.client("of:"+class, &faults{})
			a := NewAllocator(AllocatorOptions{
				Client: client, Lease: client, Node: "n", Namespace: "steelyard", Classes: []string{class},
				Pools: []Pool{{Pool: lb.Pool{Name: "p", AutoAssign: true, Ranges: ranges}}},
				Log:   slog.New(slog.DiscardHandler),
			})
			a.events = &record.FakeRecorder{}
			go a.lead(ctx)
			time.Sleep(10 * time.Minute)
		}
		create := func(name, class string, more func(*core.Service)) {
			server.edit("default/"+name, func(*core.Service) *core.Service {
				return wanting(name, func(s *core.Service) {
					if class != "" {
						s.Spec.LoadBalancerClass = &class
					}
					more(s)
				})
			})
		}
		state := func() (all []string) {
			server.mu.Lock()
			defer server.mu.Unlock()
			for _, name := range sortedKeys(server.services) {
				s := server.services[name]
				has := fmt.Sprint(statusAddresses(s), len(s.Finalizers), len(s.Status.Conditions))
				all = append(all, s.Name+" "+has)
			}
			return all
		}
		check := func(when string, want ...string) {
			t.Helper()
			if got := state(); !slices.Equal(got, want) {
				t.Errorf("%s: %q; want %q", when, got, want)
			}
		}
		noPool := func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/pool": "x"} }
		create("a1", "", same)
		create("a2", "", noPool)
		create("b1", "x/y", same)
		create("b2", "x/y", noPool)
		create("b3", "x/y", func(s *core.Service) { // by an older version
			s.Finalizers = []string{finalizer}
			given("198.51.100.3")(s)
		})
		start("", "203.0.113.1", "203.0.113.8")
		check("one allocator", "a1 [203.0.113.1] 1 0", "a2 [] 0 1", "b1 [] 0 0", "b2 [] 0 0", "b3 [198.51.100.3] 1 0")
		start("x/y", "198.51.100.1", "198.51.100.8")
		check("two", "a1 [203.0.113.1] 1 0", "a2 [] 0 1", "b1 [198.51.100.1] 1 0", "b2 [] 0 1", "b3 [198.51.100.3] 1 0")
		if got := fmt.Sprint(writes); got != "map[of: a1:1 of: a2:1 of:x/y b1:1 of:x/y b2:1]" {
			t.Errorf("writes %s; want each Service once", got)
		}

		server.edit("default/a1", func(s *core.Service) *core.Service {
			s.Spec.LoadBalancerClass = ptr("x/y")
			return s
		})
		server.edit("default/b3", func(s *core.Service) *core.Service {
			s.Spec.Type, s.Spec.LoadBalancerClass = core.ServiceTypeClusterIP, nil
			return s
		})
		time.Sleep(10 * time.Minute)
		check("moved", "a1 [198.51.100.2] 1 0", "a2 [] 0 1", "b1 [198.51.100.1] 1 0", "b2 [] 0 1", "b3 [] 0 0")
		server.edit("default/b1", func(s *core.Service) *core.Service {
			s.Spec.LoadBalancerClass = nil
			return s
		})
		time.Sleep(10 * time.Minute)
		check("and back", "a1 [198.51.100.2] 1 0", "a2 [] 0 1", "b1 [203.0.113.1] 1 0", "b2 [] 0 1", "b3 [] 0 0")
	})
}
