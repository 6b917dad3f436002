package kube

import (
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// candidates runs allocators, each with its own client of one fake API server.
type candidates struct {
	t       *testing.T
	server  *fake.Clientset
	noWatch bool                   // the Role does not permit to watch Leases
	refused atomic.Pointer[string] // the node whose requests about Leases fail; nil: none
}

// start runs an allocator and returns its client, and a function that stops it.
func (c *candidates) start(node string) (*fake.Clientset, func()) {
	client := fake.NewClientset()
	tracker := c.server.Tracker()
	client.PrependReactor("*", "*", k8stest.ObjectReaction(tracker))
	client.PrependReactor("*", "leases", func(k8stest.Action) (bool, runtime.Object, error) {
		refused := c.refused.Load()
		return refused != nil && *refused == node, nil, errTest
	})
	client.PrependWatchReactor("*", func(a k8stest.Action) (bool, watch.Interface, error) {
		if resource := a.GetResource().GroupResource(); c.noWatch && resource.Resource == "leases" {
			return true, nil, apierrors.NewForbidden(resource, leaseName, errTest)
		}
		w, err := tracker.Watch(a.GetResource(), a.GetNamespace())
		return true, w, err
	})
	a := NewAllocator(AllocatorOptions{
		Client: client, Lease: client, Node: node, Namespace: "steelyard", Log: slog.New(slog.DiscardHandler),
	})
	return client, must.Run(c.t, a.Run)
}

// hold gives the Lease to a node.
func (c *candidates) hold(node string) {
	held := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: leaseName}}
	held.Spec.HolderIdentity, held.Spec.RenewTime = &node, &meta.MicroTime{Time: time.Now()}
	held.Spec.LeaseDurationSeconds = ptr(int32(15))
	must.Do(c.t, c.server.Tracker().Add(held))
}

func (c *candidates) holder() string {
	l, err := c.server.CoordinationV1().Leases("steelyard").Get(c.t.Context(), leaseName, meta.GetOptions{})
	if err != nil {
		return err.Error()
	}
	return holderOf(l)
}

// requests counts what a client has asked about Leases, by verb, and forgets it.
func requests(client *fake.Clientset) map[string]int {
	n := map[string]int{}
	for _, a := range client.Actions() {
		if a.GetResource().Resource == "leases" {
			n[a.GetVerb()]++
		}
	}
	client.ClearActions()
	return n
}

// Agents that do not lead ask for nothing: they are told. When the leader gives up the Lease, another one takes it at
// once; when it fails, after leaseDuration.
func TestElectionWithoutPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &candidates{t: t, server: fake.NewClientset()}
		clients, stops := map[string]*fake.Clientset{}, map[string]func(){}
		start := func(name string) { clients[name], stops[name] = c.start(name) }
		start("n0")
		pass(time.Minute)
		for _, name := range []string{"n1", "n2", "n3"} {
			start(name)
		}
		pass(time.Minute)
		if got := c.holder(); got != "n0" {
			t.Fatalf("leader %q; want the first", got)
		}
		quiet := func() {
			t.Helper()
			for _, client := range clients {
				client.ClearActions()
			}
			pass(10 * time.Minute)
			for name, client := range clients {
				if n := requests(client); name != c.holder() && len(n) > 0 {
					t.Errorf("%s, which does not lead, asked %v in ten minutes; want nothing", name, n)
				}
			}
		}
		quiet()
		stop := func(name string) {
			stops[name]()
			delete(stops, name)
			delete(clients, name)
		}
		stop("n0")
		pass(leaseSpread + 100*time.Millisecond)
		second := c.holder()
		if stops[second] == nil {
			t.Fatalf("the leader stopped, and the Lease has %q; want another one", second)
		}
		quiet()

		c.refused.Store(&second)
		began := time.Now()
		for c.holder() == second && time.Since(began) < time.Minute {
			pass(100 * time.Millisecond)
		}
		if took := time.Since(began); took > leaseDuration+leaseSpread+time.Second {
			t.Errorf("the next leader came after %s; want at most %s", took, leaseDuration+leaseSpread)
		}
		if third := c.holder(); third == second || stops[third] == nil {
			t.Errorf("the leader failed, and the Lease has %q", third)
		}
		for _, stop := range stops {
			stop()
		}
	})
}

// An agent that may not watch the Lease, by an older Role, reads it.
func TestElectionWithoutWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &candidates{t: t, server: fake.NewClientset()}
		c.hold("n9")
		c.noWatch = true
		_, stop := c.start("n1")
		pass(leaseDuration - time.Second)
		if got := c.holder(); got != "n9" {
			t.Errorf("after %s the Lease has %q", leaseDuration-time.Second, got)
		}
		pass(2 * leaseDuration)
		if got := c.holder(); got != "n1" {
			t.Errorf("the Lease was not renewed, and has %q; want n1", got)
		}
		stop()
	})
}

// A node that has the Lease from before a restart leads at once, and needs no watch for it.
func TestElectionOfTheHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &candidates{t: t, server: fake.NewClientset(), noWatch: true}
		c.hold("n1")
		client, stop := c.start("n1")
		pass(leaseDuration / 2)
		if n := requests(client); n["update"] == 0 {
			t.Errorf("after %s it has not renewed the Lease: %v", leaseDuration/2, n)
		}
		stop()
	})
}

// A Service gets its address and its finalizer by one request.
func TestManyServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const services = 100
		client := fake.NewClientset()
		for i := range services {
			s := wanting(fmt.Sprint("s", i), func(s *core.Service) { s.ResourceVersion = "" })
			must.Do(t, client.Tracker().Add(s))
		}
		from, to := netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.0.255.255")
		a := NewAllocator(AllocatorOptions{
			Client: client, Lease: client, Node: "n1", Namespace: "steelyard", Log: slog.New(slog.DiscardHandler),
			Pools: []Pool{{Pool: lb.Pool{AutoAssign: true, Ranges: []lb.AddrRange{{From: from, To: to}}}}},
		})
		must.Run(t, a.Run)
		pass(10 * time.Second)
		patched, most := map[string]int{}, 0
		for _, x := range client.Actions() {
			if p, ok := x.(k8stest.PatchAction); ok {
				patched[p.GetName()]++
				most = max(most, patched[p.GetName()])
			}
		}
		if len(patched) != services || most != 1 {
			t.Errorf("%d Services were written, one of them %d times; want %d, once", len(patched), most, services)
		}
	})
}

// An API server that refuses the Lease is a problem, until it accepts it. Neither ends the agent.
func TestForbiddenLease(t *testing.T) {
	for _, verb := range []string{"get", "create"} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := fake.NewClientset()
				var permitted atomic.Bool
				client.PrependReactor(verb, "leases", func(k8stest.Action) (bool, runtime.Object, error) {
					if permitted.Load() {
						return false, nil, nil
					}
					resource := schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}
					return true, nil, apierrors.NewForbidden(resource, leaseName, errTest)
				})
				var problem atomic.Pointer[error]
				a := NewAllocator(AllocatorOptions{
					Client: client, Lease: client, Node: "n", Namespace: "steelyard",
					Log: slog.New(slog.DiscardHandler), Problem: func(err error) { problem.Store(&err) },
				})
				stop := must.Run(t, a.Run)
				pass(time.Minute)
				if err := *problem.Load(); !apierrors.IsForbidden(err) {
					t.Errorf("problem %v; want forbidden", err)
				}
				permitted.Store(true)
				pass(forbiddenRetry + time.Minute)
				if err := *problem.Load(); err != nil || a.Leader() != "n" {
					t.Errorf("problem %v, leader %q; want none, n", err, a.Leader())
				}
				stop()
			})
		})
	}
}
