package kube

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// stumbling returns a boundary in which one part panics on one object while on is set.
func stumbling(part lb.Part, object string) (b *lb.Boundary, on *atomic.Bool) {
	on = new(atomic.Bool)
	on.Store(true)
	return &lb.Boundary{Log: discard, Before: func(p lb.Part, o string) {
		if p == part && o == object && on.Load() {
			panic("injected")
		}
	}}, on
}

// numbered returns the nth of many Services, and its slice.
func numbered(name string, n int) (*core.Service, *endpointSlice) {
	s := aService(func(s *core.Service) {
		s.Name, s.Status.LoadBalancer.Ingress[0].IP = name, fmt.Sprintf("203.0.113.%d", n)
	})
	return s, slimSlice(of(name, slice(8080, ep("10.0.0.1", "n1", "rs"))))
}

// A panic in the view of one Service, or in one of its slices, leaves the Service as it was, or as the kernel has it;
// 200 others are served. The Service is tried again when it changes.
func TestPanicOfAService(t *testing.T) {
	for _, part := range []lb.Part{lb.PartService, lb.PartSlice} {
		t.Run(string(part), func(t *testing.T) {
			object := map[lb.Part]string{lb.PartService: "default/bad", lb.PartSlice: "default/bad-1"}[part]
			b, on := stumbling(part, object)
			f := newFixture(t, func(o *Options) { o.Boundary = b })
			f.have(t, node("n1", "192.0.2.1"))
			sink := fakeSink{f.recorded}
			reconcile := func(name string, n int) *lb.Service {
				t.Helper()
				s, _ := numbered(name, n)
				x := must.Get(f.slim(of(name, slice(8080, ep("10.0.0.1", "n1", "rs")))))(t)
				f.have(t, s, x)
				f.reconcile("default/"+name, sink)
				return f.put["default/"+name]
			}
			bad := reconcile("bad", 250)
			for i := range 200 {
				s := reconcile(fmt.Sprint("other", i), i)
				must.Need(t, s != nil && len(s.Ports[0].Backends) == 1, "service %d is %+v", i, s)
			}
			must.Need(t, bad != nil && bad.Frozen && len(bad.VIPs) == 1 && len(b.Troubles()) == 1,
				"%+v, troubles %q; want it frozen", bad, b.Troubles())
			on.Store(false)
			bad = reconcile("bad", 251)
			must.True(t, !bad.Frozen && bad.VIPs[0].String() == "203.0.113.251" && len(b.Troubles()) == 0,
				"changed: %+v, troubles %q", bad, b.Troubles())
			on.Store(true)
			now := reconcile("bad", 252)
			must.True(t, now == bad, "%+v after a panic; want it as it was", now)
		})
	}
}

// The Event about a Service has the trouble's own reason.
func TestEventOfATrouble(t *testing.T) {
	f := newFixture(t, asIs)
	s, _ := numbered("web", 1)
	f.have(t, s)
	f.recorder.Store(&f.events)
	for part, want := range map[lb.Part]string{
		lb.PartEndpoints: "TooManyEndpoints", lb.PartRoom: "NoRoom", lb.PartService: "Frozen", lb.PartPlan: "Frozen",
		lb.PartEndpoint: "EndpointIgnored",
	} {
		f.Tell(lb.Trouble{Part: part, Object: "default/web", Reason: "why"})
		must.Row(t, part, []string{"Warning " + want + " node n1: why"}, drained(f.emitted))
	}
}

// A panic about one node, or about a part of the node table, leaves it as it was.
func TestPanicOfANode(t *testing.T) {
	b, on := stumbling(lb.PartNode, "n2")
	f := newFixture(t, func(o *Options) { o.Boundary, o.Forward = b, lb.MethodTunnel })
	address := func(name string) string {
		f.readNodes()
		return fmt.Sprint(f.top.nodes[name])
	}
	on.Store(false)
	f.keepNode(node("n1", "192.0.2.1"))
	f.keepNode(node("n2", "192.0.2.2"))
	on.Store(true)
	f.keepNode(node("n2", "192.0.2.22"))
	f.keepNode(node("n3", "192.0.2.3"))
	must.True(t, address("n2") == "192.0.2.2" && address("n3") == "192.0.2.3",
		"nodes %v; want n2 as it was", f.top.nodes)
	on.Store(false)
	f.keepNode(node("n2", "192.0.2.22"))
	must.True(t, address("n2") == "192.0.2.22", "nodes %v; want n2 as it is", f.top.nodes)

	b, on = stumbling(lb.PartConfigMap, shardName(1))
	f = newFixture(t, func(o *Options) { o.Boundary, o.Forward = b, lb.MethodTunnel })
	o := &otherNodes{Source: f.Source, shards: map[string]map[string]*core.Node{}}
	put := func(last string) {
		for i := range nodeShards {
			m := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Name: shardName(i)}}
			m.Data = map[string]string{fmt.Sprint("m", i): fmt.Sprintf("192.0.2.%d%s", i, last)}
			o.shard(m)
		}
	}
	on.Store(false)
	put("1")
	on.Store(true)
	put("2")
	must.True(t, address("m1") == "192.0.2.11" && address("m2") == "192.0.2.22",
		"nodes %v; want m1 as it was", f.top.nodes)
	on.Store(false)
	must.True(t, len(b.Troubles()) == 1, "troubles %q", b.Troubles())
	if put("3"); address("m1") != "192.0.2.13" || len(b.Troubles()) > 0 {
		t.Errorf("nodes %v, troubles %q", f.top.nodes, b.Troubles())
	}
}

// A Service that the allocator cannot handle keeps its addresses, and nobody else gets them; other Services get theirs.
// It is handled again when it changes.
func TestPanicOfAnAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newAllocators(t, 1)
		var on *atomic.Bool
		m.boundary, on = stumbling(lb.PartAddresses, "default/bad")
		on.Store(false)
		m.start(0)
		m.edit("default/bad", func(*core.Service) *core.Service { return wanting("bad", same) })
		addresses := func(name string) []string {
			time.Sleep(time.Minute)
			m.mu.Lock()
			defer m.mu.Unlock()
			return statusOf(m.services["default/"+name])
		}
		first := addresses("bad")
		must.Need(t, len(first) == 1, "addresses %v; want one", first)
		relabel := func(value string) {
			m.change("default/bad", func(s *core.Service) {
				s.Annotations = map[string]string{"steelyard.dev/pool": value}
			})
		}
		on.Store(true)
		relabel("public")
		for i := range 6 {
			name := fmt.Sprint("other", i)
			m.edit("default/"+name, func(*core.Service) *core.Service { return wanting(name, same) })
			a := addresses(name)
			must.True(t, len(a) == 1 && a[0] != first[0], "%s has %v; want an address other than %v", name, a, first)
		}
		must.Row(t, "addresses", first, addresses("bad"))
		got := m.boundary.Troubles()
		must.True(t, len(got) == 1 && strings.Contains(got[0], "addresses default/bad"), "troubles %q", got)
		on.Store(false)
		relabel("")
		must.Row(t, "addresses after a change", first, addresses("bad"))
		must.Row(t, "troubles after a change", nil, m.boundary.Troubles())
		m.stopAll()
		time.Sleep(5 * time.Minute)
	})
}

// A Secret whose content panics changes nothing.
func TestPanicOfASecret(t *testing.T) {
	b, on := stumbling(lb.PartSecret, "steelyard/"+KeySecret)
	k := NewKeyKeeper(KeyOptions{Namespace: "steelyard", Boundary: b}, nil)
	secret := &core.Secret{Data: newKeys(time.Unix(1, 0)).Data()}
	if _, err := k.parse(secret); !errors.Is(err, errKeysInvalid) || len(b.Troubles()) != 1 {
		t.Errorf("%v, troubles %q; want keys that are not valid", err, b.Troubles())
	}
	on.Store(false)
	_, err := k.parse(secret)
	must.True(t, err == nil && len(b.Troubles()) == 0, "%v, troubles %q without the panic", err, b.Troubles())
}
