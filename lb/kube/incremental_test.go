package kube

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// watched is a fixture whose caches change as an informer changes them: first the cache, then the handlers.
type watched struct {
	*fixture
	services, slices *handlers
}

func newWatched(t testing.TB, change func(*Options)) *watched {
	w := &watched{newFixture(t, change), &handlers{}, &handlers{}}
	w.watch(w.services, func(x any) string { return nameOf(x.(*core.Service)) })
	w.watch(w.slices, sliceKey)
	return w
}

// set puts an object into its cache, or removes it.
func set(store cache.Indexer, h *handlers, x meta.Object, present bool) {
	if s, ok := x.(*discovery.EndpointSlice); ok {
		x = slimSlice(s)
	}
	old, known, _ := store.Get(x)
	switch {
	case present && known:
		store.Update(x)
		h.OnUpdate(old, x)
	case present:
		store.Add(x)
		h.OnAdd(x, false)
	case known:
		store.Delete(x)
		h.OnDelete(old)
	}
}

// setNode puts a node into its cache, or removes it.
func (w *watched) setNode(n *core.Node, present bool) {
	if present {
		w.keepNode(n)
	} else if _, known, _ := w.nodes.Get(n); known {
		w.dropNode(n)
	}
}

// settle handles what is queued.
func (w *watched) settle(sink lb.Sink) {
	for w.queue.Len() > 0 {
		key, _ := w.queue.Get()
		w.handle(key, sink)
		w.queue.Done(key)
	}
}

// withoutStale returns a copy of a service without deleted backends, which depend on earlier changes.
func withoutStale(s *lb.Service) *lb.Service {
	c := *s
	c.Ports = slices.Clone(s.Ports)
	for i := range c.Ports {
		c.Ports[i].Backends = nil
		for _, b := range s.Ports[i].Backends {
			if !b.Deleted {
				c.Ports[i].Backends = append(c.Ports[i].Backends, b)
			}
		}
	}
	return &c
}

// After each of many random changes, the source has put the same as a source that starts then.
func TestIncremental(t *testing.T) {
	for _, forward := range []lb.Method{lb.MethodTunnel, lb.MethodNAT} {
		r := rand.New(rand.NewPCG(1, 2))
		options := func(o *Options) { o.Forward, o.Unschedulable = forward, true }
		w := newWatched(t, options)
		sink := fakeSink{&recorded{}}
		ip := func(n int) string { return fmt.Sprintf("10.0.0.%d", 1+r.IntN(n)) }
		nodeName := func() string { return fmt.Sprintf("n%d", 1+r.IntN(4)) }
		for step := range 4000 {
			switch r.IntN(3) {
			case 0:
				s := aService(func(s *core.Service) {
					s.Name = fmt.Sprintf("s%d", r.IntN(5))
					s.Status.LoadBalancer.Ingress[0].IP = fmt.Sprintf("203.0.113.%d", r.IntN(4))
					if r.IntN(4) == 0 {
						s.Status = core.ServiceStatus{}
					}
					if r.IntN(2) == 0 {
						local(s)
					}
				})
				set(w.Source.services, w.services, s, r.IntN(5) > 0)
			case 1:
				e := slice(8080)
				for range r.IntN(4) {
					e.Endpoints = append(e.Endpoints, ep(ip(9), nodeName(), []string{"rs", "st", "", "rs"}[r.IntN(4)]))
				}
				e = of(fmt.Sprintf("s%d", r.IntN(5)), e)
				e.Name += fmt.Sprint(r.IntN(2))
				set(w.Source.slices, w.slices, e, r.IntN(5) > 0)
			default:
				n := node(nodeName(), fmt.Sprintf("192.0.2.%d", 1+r.IntN(3)))
				if r.IntN(4) == 0 {
					n.Labels = nil
				}
				n.Spec.Unschedulable = r.IntN(6) == 0
				n.Status.Conditions = []core.NodeCondition{{LastHeartbeatTime: meta.Now()}}
				if forward == lb.MethodTunnel || n.Name == "n1" {
					w.setNode(n, r.IntN(5) > 0)
				}
			}
			w.settle(sink)
			fresh := newFixture(t, options)
			for _, x := range w.nodes.List() {
				fresh.have(t, x)
			}
			for _, x := range slices.Concat(w.Source.services.List(), w.Source.slices.List()) {
				fresh.have(t, x)
			}
			for _, x := range w.Source.services.List() {
				fresh.reconcile(nameOf(x.(*core.Service)), sink)
			}
			must.Need(t, len(w.put) == len(fresh.put),
				"step %d: %d services; want %d", step, len(w.put), len(fresh.put))
			for name, want := range fresh.put {
				if got := withoutStale(w.put[name]); !reflect.DeepEqual(got, withoutStale(want)) {
					t.Fatalf("%s, step %d, %s:\n%+v\nwant\n%+v", forward, step, name, got, want)
				}
			}
		}
	}
}

// largeCluster fills the caches of a source with Services of 10 endpoints, and reconciles them.
func largeCluster(b *testing.B, services, nodes int) *watched {
	w := newWatched(b, func(o *Options) { o.Forward = lb.MethodTunnel })
	for i := range nodes {
		w.nodes.Add(node(fmt.Sprintf("n%d", i), addrN(172, i).String()))
	}
	w.readNodes()
	for i := range services {
		s := aService(func(s *core.Service) {
			s.Name, s.Status.LoadBalancer.Ingress[0].IP = fmt.Sprintf("s%d", i), addrN(100, i).String()
		})
		slice := sliceOf(i, nodes, "")
		slim(s)
		w.Source.services.Add(s)
		w.Source.slices.Add(slimSlice(slice))
		w.reconcile(nameOf(s), fakeSink{&recorded{}})
	}
	return w
}

func addrN(first byte, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{first, byte(n >> 16), byte(n >> 8), byte(n)})
}

// sliceOf returns the slice of the nth service. last has the conditions of its last endpoint; "" means ready.
func sliceOf(n, nodes int, last string) *discovery.EndpointSlice {
	s := slice(8080)
	for k := range 10 {
		flags := "rs"
		if k == 9 && last != "" {
			flags = last
		}
		s.Endpoints = append(s.Endpoints, ep(addrN(10, 10*n+k).String(), fmt.Sprintf("n%d", (n+k)%nodes), flags))
	}
	return of(fmt.Sprintf("s%d", n), s)
}

// BenchmarkEvents measures single events with 5,000 Services on 1,000 nodes.
func BenchmarkEvents(b *testing.B) {
	w := largeCluster(b, 5000, 1000)
	sink := fakeSink{w.recorded}
	beat := func(name string, addr netip.Addr) {
		n := node(name, addr.String())
		n.Status.Conditions = []core.NodeCondition{
			{Type: core.NodeReady, Status: core.ConditionTrue, LastHeartbeatTime: meta.Now()},
		}
		w.setNode(n, true)
	}
	for _, x := range []struct {
		name string
		do   func(i int)
	}{
		{"endpoint", func(i int) {
			set(w.Source.slices, w.slices, sliceOf(77, 1000, []string{"rs", "st"}[i%2]), true)
		}},
		{"heartbeat of this node", func(int) { beat("n1", addrN(172, 1)) }},
		{"heartbeat of another node", func(int) { beat("n2", addrN(172, 2)) }},
		{"another node moves", func(i int) { beat("n2", addrN(172, 2000+i%2)) }},
		{"everything", func(int) { w.queue.Add(everything) }},
	} {
		b.Run(x.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				x.do(i)
				w.settle(sink)
				w.sink = w.sink[:0]
			}
		})
	}
}

// BenchmarkMemory reports what a Service of ten endpoints takes in the caches and as lb.Service (docs/sizing.md).
func BenchmarkMemory(b *testing.B) {
	const services = 5000
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for b.Loop() {
		before := heap()
		w := largeCluster(b, services, 1000)
		w.sink = nil
		b.ReportMetric((heap()-before)/services, "B/service-of-10")
		runtime.KeepAlive(w)
	}
}
