package kube

import (
	"fmt"
	"strings"
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

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// candidates runs allocators, each with its own client of one fake API server.
type candidates struct {
	t       *testing.T
	server  *fake.Clientset
	noWatch bool                   // the Role does not permit watching Leases
	refused atomic.Pointer[string] // the node whose requests about Leases fail, or nil
	last    *Allocator             // started last
	// conflicts is the number of the next updates of Leases that fail with a conflict.
	conflicts atomic.Int32
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
	client.PrependReactor("update", "leases", func(k8stest.Action) (bool, runtime.Object, error) {
		return c.conflicts.Add(-1) >= 0, nil, apierrors.NewConflict(schema.GroupResource{}, leaseName, errTest)
	})
	client.PrependWatchReactor("*", func(a k8stest.Action) (bool, watch.Interface, error) {
		if resource := a.GetResource().GroupResource(); c.noWatch && resource.Resource == "leases" {
			return true, nil, apierrors.NewForbidden(resource, leaseName, errTest)
		}
		w, err := tracker.Watch(a.GetResource(), a.GetNamespace())
		return true, w, err
	})
	o := AllocatorOptions{Client: client, Lease: client, Node: node, Namespace: "steelyard", Log: discard}
	c.last = NewAllocator(o)
	return client, must.Run(c.t, c.last.Run)
}

// hold gives the Lease to a node.
func (c *candidates) hold(node string) {
	held := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: leaseName}}
	held.Spec.HolderIdentity, held.Spec.RenewTime = &node, &meta.MicroTime{Time: time.Now()}
	held.Spec.LeaseDurationSeconds = new(int32(15))
	must.Do(c.t, c.server.Tracker().Add(held))
}

func (c *candidates) holder() string {
	l, err := c.server.CoordinationV1().Leases("steelyard").Get(c.t.Context(), leaseName, meta.GetOptions{})
	if err != nil {
		return err.Error()
	}
	return holderOf(l)
}

// requests counts a client's requests about Leases by verb, and clears them.
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

// Agents that do not lead send no requests, because their watch tells them of changes. When the leader releases the
// Lease, another agent takes it immediately; when the leader fails, after leaseDuration.
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
		got := c.holder()
		must.Need(t, got == "n0", "leader %q; want the first", got)
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
		must.Need(t, stops[second] != nil, "the leader stopped, and the Lease has %q; want another one", second)
		quiet()

		c.refused.Store(&second)
		began := time.Now()
		for c.holder() == second && time.Since(began) < time.Minute {
			pass(100 * time.Millisecond)
		}
		if took := time.Since(began); took > leaseDuration+leaseSpread+time.Second {
			t.Errorf("the next leader came after %s; want at most %s", took, leaseDuration+leaseSpread)
		}
		third := c.holder()
		must.True(t, third != second && stops[third] != nil, "the leader failed, and the Lease has %q", third)
		for _, stop := range stops {
			stop()
		}
	})
}

// An agent whose older Role does not permit watching the Lease reads it instead.
func TestElectionWithoutWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &candidates{t: t, server: fake.NewClientset()}
		c.hold("n9")
		c.noWatch = true
		_, stop := c.start("n1")
		pass(leaseDuration - time.Second)
		must.Row(t, fmt.Sprintf("after %s the Lease has", leaseDuration-time.Second), "n9", c.holder())
		pass(2 * leaseDuration)
		must.Row(t, "the Lease was not renewed, and has", "n1", c.holder())
		stop()
	})
}

// A node that has the Lease from before a restart leads immediately, and needs no watch for it. If it cannot renew the
// Lease, it stops before another node may take it, and leads again when it can.
func TestElectionOfTheHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &candidates{t: t, server: fake.NewClientset(), noWatch: true}
		c.hold("n1")
		client, stop := c.start("n1")
		pass(leaseDuration / 2)
		n := requests(client)
		must.True(t, n["update"] > 1, "after %s it has not renewed the Lease: %v", leaseDuration/2, n)
		leads := func(want bool) *term {
			t.Helper()
			c.last.mu.Lock()
			defer c.last.mu.Unlock()
			must.Row(t, "it leads", want, c.last.term != nil)
			return c.last.term
		}
		first := leads(true)
		c.conflicts.Store(1)
		pass(time.Minute)
		must.True(t, leads(true) == first && c.conflicts.Load() < 0, "its term has ended, or it renews no Lease")
		c.refused.Store(new("n1"))
		pass(renewDeadline + time.Millisecond)
		leads(false)
		c.refused.Store(nil)
		pass(time.Minute)
		leads(true)
		stop()
	})
}

// A Service gets its address and its finalizer with one request.
func TestManyServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const services = 100
		client := fake.NewClientset()
		for i := range services {
			s := wanting(fmt.Sprint("s", i), func(s *core.Service) { s.ResourceVersion = "" })
			must.Do(t, client.Tracker().Add(s))
		}
		a := NewAllocator(AllocatorOptions{
			Client: client, Lease: client, Node: "n1", Namespace: "steelyard", Log: discard,
			Pools: []Pool{poolFrom("public", "10.0.0.0", "10.0.255.255")},
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
		must.True(t, len(patched) == services && most == 1,
			"%d Services were written, one of them %d times; want %d, once", len(patched), most, services)
	})
}

// An API server that refuses the Lease is a problem until it accepts a request. Neither stops the agent.
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
					Log: discard, Problem: func(err error) { problem.Store(&err) },
				})
				stop := must.Run(t, a.Run)
				pass(time.Minute)
				err := *problem.Load()
				must.True(t, apierrors.IsForbidden(err), "problem %v; want forbidden", err)
				permitted.Store(true)
				pass(forbiddenRetry + time.Minute)
				err = *problem.Load()
				must.True(t, err == nil && a.Leader() == "n", "problem %v, leader %q; want none, n", err, a.Leader())
				stop()
			})
		})
	}
}

// Cleanup removes what is ours and leaves the rest, and does nothing while an agent assigns addresses.
func TestCleanup(t *testing.T) {
	finalized := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { s.Finalizers = []string{finalizer}; more(s) }
	}
	others := func(s *core.Service) {
		s.Finalizers = []string{finalizer}
		foreign("192.0.2.1")(s)
		s.ManagedFields = s.ManagedFields[:1] // nobody is recorded as the writer of the finalizer
	}
	restored := func(s *core.Service) {
		others(s)
		s.ManagedFields[0].Manager = fieldManager
	}
	client := fake.NewClientset()
	for _, s := range []*core.Service{
		wanting("ours", finalized(given("203.0.113.1"))), wanting("others", others), wanting("none", same),
		wanting("adopted", finalized(foreign("203.0.113.2"))), wanting("restored", restored),
	} {
		must.Do(t, client.Tracker().Add(s))
	}
	lease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: leaseName}}
	lease.Spec.HolderIdentity, lease.Spec.RenewTime = new("n1"), &meta.MicroTime{Time: time.Now()}
	foreignLease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: "other"}}
	for _, l := range []*coordination.Lease{lease, foreignLease} {
		must.Do(t, client.Tracker().Add(l))
	}
	var done []string
	namespace := "typo" // it has no Leases
	run := func() error {
		return Cleanup(t.Context(), client, namespace, func(what string) { done = append(done, what) })
	}
	for _, namespace = range []string{"typo", "steelyard"} {
		err := run()
		must.True(t, err != nil && strings.Contains(err.Error(), "n1 assigns addresses") && len(done) == 0,
			"while an agent leads, namespace %s: %v, %v", namespace, err, done)
	}
	lease.Spec.RenewTime.Time = time.Now().Add(-time.Hour)
	leases := client.CoordinationV1().Leases("steelyard")
	must.Get(leases.Update(t.Context(), lease, meta.UpdateOptions{}))(t)
	must.Do(t, run())
	want := []string{"Service default/adopted", "Service default/ours", "Service default/restored",
		"Lease steelyard/steelyard"}
	must.Row(t, "cleaned up", want, done)
	for name, want := range map[string]string{
		"ours": "[] []", "adopted": "[203.0.113.2] []", "others": "[192.0.2.1] [" + finalizer + "]", "none": "[] []",
		"restored": "[] []",
	} {
		s := must.Get(client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
		must.Row(t, name+" has", want, fmt.Sprint(statusAddresses(s), s.Finalizers))
	}
}
