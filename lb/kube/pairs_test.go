package kube

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// manyPorts returns a Service with this number of ports.
func manyPorts(name, address string, ports int) *core.Service {
	s := aService(func(s *core.Service) {
		s.Name, s.Spec.Ports, s.Status.LoadBalancer.Ingress[0].IP = name, nil, address
	})
	for p := range int32(ports) {
		s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Name: fmt.Sprint(p), Port: 1000 + p})
	}
	return s
}

func manyEndpoints(name string, ports, endpoints int) *endpointSlice {
	out := &endpointSlice{service: "default/" + name, family: "IPv4"}
	out.Namespace, out.Name = "default", name+"-1"
	for p := range ports {
		port := slicePort{name: fmt.Sprint(p), protocol: core.ProtocolTCP, port: uint16(1000 + p)}
		out.ports = append(out.ports, port)
	}
	for e := range endpoints {
		addr := netip.AddrFrom4([4]byte{10, 1, byte(e >> 8), byte(e)})
		out.endpoints = append(out.endpoints, endpoint{
			at: netip.AddrPortFrom(addr, 0), node: fmt.Sprintf("n%d", 1+e%2), ready: true, serving: true,
		})
	}
	return out
}

// A new Service with too many pairs of endpoint and port is refused. A Service in force keeps its address when it
// grows. Every node uses the same endpoints of it, and a change of one replaces one.
func TestTooManyEndpoints(t *testing.T) {
	var troubles []string
	b := &lb.Boundary{}
	f := newFixture(t, func(o *Options) {
		o.MaxEndpoints, o.Forward, o.Boundary, b.Log = 100, lb.MethodTunnel, b, o.Log
	})
	b.Changed = func(x lb.Trouble) { troubles = append(troubles, x.Object+": "+x.Reason) }
	f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
	f.complete = true
	sink := fakeSink{f.recorded}
	reconcile := func(name string, ports, endpoints int) *lb.Service {
		t.Helper()
		f.have(t, manyPorts(name, "203.0.113.1", ports), manyEndpoints(name, ports, endpoints))
		f.reconcile("default/"+name, sink)
		return f.put["default/"+name]
	}

	s := reconcile("new", 10, 11)
	if len(s.VIPs) > 0 || len(s.Refused) != 1 || !strings.HasPrefix(s.Refused[0].Reason, "refused: it has 110 pairs") {
		t.Errorf("VIPs %v, refused %v; want one that is refused", s.VIPs, s.Refused)
	}
	for _, p := range s.Ports {
		must.Need(t, len(p.Backends) == 0, "%d backends of a refused Service", len(p.Backends))
	}
	must.True(t, len(troubles) == 1 && len(b.Troubles()) == 1, "troubles %q, %q; want one", troubles, b.Troubles())
	if s := reconcile("new", 10, 10); len(s.VIPs) != 1 || len(firstBackends(s)) != 10 || len(b.Troubles()) != 0 {
		t.Errorf("with 100 pairs: VIPs %v, troubles %q", s.VIPs, b.Troubles())
	}

	s = reconcile("new", 10, 50)
	used := firstBackends(s)
	must.True(t, len(s.VIPs) == 1 && len(used) == 10 && len(b.Troubles()) == 1,
		"grown: VIPs %v, endpoints %v, troubles %q; want 10 endpoints", s.VIPs, used, b.Troubles())
	must.Row(t, "other endpoints keep their flows", 40, len(s.Ports[0].Kept))
	endpoints := []*endpointSlice{manyEndpoints("new", 10, 50)}
	service := manyPorts("new", "203.0.113.1", 10)
	top := topology{node: "n2", nodes: f.top.nodes}
	other := translate(service, settings{}, s.VIPs, endpoints, top, false, false, 100)
	must.Row(t, "another node uses", used, firstBackends(other.service))
	i := slices.IndexFunc(endpoints[0].endpoints, func(e endpoint) bool { return e.at.Addr() == used[3] })
	endpoints[0].endpoints[i].ready, endpoints[0].endpoints[i].serving = false, false
	after := firstBackends(translate(service, settings{}, s.VIPs, endpoints, f.top, false, false, 100).service)
	same := slices.DeleteFunc(slices.Clone(after), func(a netip.Addr) bool { return !slices.Contains(used, a) })
	must.True(t, len(after) == 10 && len(same) == 9 && !slices.Contains(after, used[3]),
		"without %v: %v; want one instead of it", used[3], after)
}

// Services with many ports have at most as many frontends as the kernel's table, including Services in force. A Service
// that does not fit is served when another one has fewer. Small Services always fit.
func TestManyPorts(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.MaxEndpoints = 10_000 })
	f.complete = true
	vips := 0
	ports := func(name string, n int) int {
		namespace, short, _ := strings.Cut(name, "/")
		vips++
		service := manyPorts(short, fmt.Sprintf("203.0.113.%d", vips), n)
		service.Namespace = namespace
		f.have(t, service)
		f.reconcile(name, fakeSink{f.recorded})
		s := f.put[name]
		return len(s.VIPs) * len(s.Ports)
	}
	for i := range 6 {
		got, want := ports(fmt.Sprintf("%d/a", i), 15_000), 15_000*(min(i+1, 4)-min(i, 4))
		must.True(t, got == want, "Service %d has %d ports, want %d", i, got, want)
	}
	must.Row(t, "ports of a refused Service are kept", portsFew, len(f.put["5/a"].Ports))
	must.Row(t, "a small Service has ports", portsFew, ports("0/small", portsFew))
	f.complete = false // "more" is in force
	must.Row(t, "a Service in force has ports", portsFew, ports("more/a", 15_000))
	f.complete = true
	f.queued()
	ports("0/a", 1)
	waiting := f.queued()
	slices.Sort(waiting)
	must.Row(t, "handled again", "[4/a 5/a more/a]", fmt.Sprint(waiting))
	must.Row(t, "ports with room", 15_000, ports("5/a", 15_000))
	ports("1/a", 1)
	must.Row(t, "beside 15,000 of its namespace", 1_000, ports("2/b", 1_000))
	must.Row(t, "beside 16,000 of its namespace", 0, ports("2/c", 1_000))
}

// Namespaces take turns: many changes in one do not delay changes in another.
func TestNamespacesTakeTurns(t *testing.T) {
	f := newFixture(t, func(*Options) {})
	for i := range 1000 {
		f.queue.Add(fmt.Sprint("tenant/", i))
	}
	f.queue.Add(anyNode)
	f.queue.Add("default/web")
	f.queue.Add("default/mail")
	got := f.queued()
	want := []string{"tenant/0", anyNode, "default/web", "tenant/1", "default/mail", "tenant/2"}
	must.True(t, len(got) == 1003 && slices.Equal(got[:len(want)], want),
		"%d, first %q; want %q", len(got), got[:len(want)], want)
}

// If a Service has very many pairs, not all are expanded at each change, because that would delay all other changes.
func TestPairsAreNotAllMade(t *testing.T) {
	const ports, most = 5000, 10000
	f := newFixture(t, func(o *Options) { o.MaxEndpoints, o.Forward = most, lb.MethodTunnel })
	f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
	sink := fakeSink{f.recorded}
	reconcile := func(endpoints int) (s *lb.Service, allocated uint64) {
		f.have(t, manyPorts("web", "203.0.113.1", ports))
		for i := range 3 { // the slices overlap, as while the controller moves endpoints
			slice := manyEndpoints("web", ports, endpoints)
			slice.Name = fmt.Sprint("web-", i)
			f.have(t, slice)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f.reconcile("default/web", sink)
		runtime.ReadMemStats(&after)
		return f.put["default/web"], after.TotalAlloc - before.TotalAlloc
	}
	_, few := reconcile(2)
	s, many := reconcile(300)
	used := firstBackends(s)
	must.True(t, len(s.VIPs) == 1 && len(used) == 2, "VIPs %v, endpoints %v; want two", s.VIPs, used)
	must.True(t, many <= 3*few,
		"%d MB were allocated for 300 endpoints, %d MB for 2, of which as many are used", many>>20, few>>20)
}

// firstBackends returns the endpoints of the first port, or nil if another port has others.
func firstBackends(s *lb.Service) (all []netip.Addr) {
	for i, p := range s.Ports {
		var of []netip.Addr
		for _, b := range p.Backends {
			if !b.Deleted {
				of = append(of, b.Addr)
			}
		}
		if i == 0 {
			all = of
		} else if !slices.Equal(all, of) {
			return nil
		}
	}
	return all
}

// After a restart, a Service with a frontend in the kernel is in force. If the kernel has none, every Service is.
func TestTooManyEndpointsAtStart(t *testing.T) {
	vip := netip.MustParseAddr("203.0.113.1")
	for _, tt := range []struct {
		name  string
		held  []lb.Frontend
		serve bool
	}{
		{"its frontend is held", []lb.Frontend{{VIP: vip, Port: 1000, Protocol: lb.TCP}}, true},
		{"another one is held", []lb.Frontend{{VIP: vip.Next(), Port: 1000, Protocol: lb.TCP}}, false},
		{"the first start of the node", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.MaxEndpoints, o.Held = 100, tt.held })
			f.have(t, node("n1", "192.0.2.1"), manyPorts("web", "203.0.113.1", 10), manyEndpoints("web", 10, 50))
			f.reconcile("default/web", fakeSink{f.recorded})
			s := f.put["default/web"]
			must.True(t, len(s.VIPs) == 1 == tt.serve, "VIPs %v, refused %v", s.VIPs, s.Refused)
		})
	}
}
