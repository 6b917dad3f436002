package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestEligible(t *testing.T) {
	f := newFixture(t, asIs)
	f.have(t, node("n2"))
	must.True(t, !f.Eligible(), "eligible without a Node object")
	f.have(t, node("n1"))
	must.True(t, f.Eligible(), "not eligible")
	tainted := node("n1")
	tainted.Spec.Taints = []core.Taint{{Key: taintAutoscaler}}
	f.have(t, tainted)
	must.True(t, !f.Eligible(), "eligible although about to be removed")
}

func TestTopology(t *testing.T) {
	other := node("n2", "x", "192.0.2.2", "192.0.2.22")
	external := core.NodeAddress{Type: core.NodeExternalIP, Address: "198.51.100.2"}
	other.Status.Addresses = append([]core.NodeAddress{external}, other.Status.Addresses...)
	for forward, want := range map[lb.Method]string{
		lb.MethodTunnel: "n1 zone-n1 map[n1:192.0.2.1 n2:192.0.2.2]",
		lb.MethodNAT:    "n1 zone-n1 map[]",
	} {
		f := newFixture(t, func(o *Options) { o.Forward = forward })
		f.have(t, node("n1", "192.0.2.1"), other, node("n3"))
		got := f.topology(f.node())
		text := fmt.Sprint(got.node, " ", got.zone, " ", got.nodes)
		must.True(t, text == want && (got.nodes != nil) == (forward == lb.MethodTunnel),
			"%s: %v; want %s", forward, got, want)
	}
	got := newFixture(t, asIs).topology(nil)
	must.True(t, got.node == "n1" && got.zone == "", "without a Node object: %+v", got)
}

func TestTunnelSources(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Options)
		err    error
		want   string
	}{
		{"tunnel", func(o *Options) { o.Forward = lb.MethodTunnel }, nil, "[[192.0.2.1 2001:db8::1]]"},
		{"fails", func(o *Options) { o.Forward = lb.MethodTunnel }, errTest, "[[192.0.2.1 2001:db8::1]]"},
		{"nat", asIs, nil, "[]"},
		{"not wanted", func(o *Options) { o.Forward, o.TunnelSources = lb.MethodTunnel, nil }, nil, "[]"},
	} {
		f := newFixture(t, tt.change)
		f.tunnErr = tt.err
		f.have(t, node("n1", "192.0.2.1", "2001:db8::1"), node("n2"))
		f.setTunnelSources()
		must.Row(t, tt.name, tt.want, taken(&f.tunnels))
		must.Row(t, tt.name+": something is in the log", tt.err != nil, f.log.Len() > 0)
	}
}

// Tunnel sources are set once, again when the addresses change, and again some time after an error.
func TestTunnelSourcesAreSetOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *Options) { o.Forward = lb.MethodTunnel })
		step := func(name, want string) {
			t.Helper()
			must.Row(t, name, want, taken(&f.tunnels))
		}
		f.followNodes(fakeSink{f.recorded})
		step("no node", "[[]]")
		f.have(t, node("n1", "192.0.2.1"))
		f.tunnErr = errTest
		f.followNodes(fakeSink{f.recorded})
		step("error", "[[192.0.2.1]]")
		pass(sourcesRetry + time.Second)
		must.Row(t, "after an error: queued", []string{anyNode}, f.queued())
		f.tunnErr = nil
		f.followNodes(fakeSink{f.recorded})
		step("again", "[[192.0.2.1]]")
		f.followNodes(fakeSink{f.recorded})
		step("unchanged", "[]")
	})
}

// A node that is added or deleted or changes its address affects the services with an endpoint there. This node's zone
// and its exclusion affect all.
func TestFollowNodes(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward = lb.MethodTunnel })
	f.have(t, node("n1", "192.0.2.1"))
	for i, on := range []string{"n1", "n2", "n3"} {
		s := aService(func(s *core.Service) {
			s.Name, s.Status.LoadBalancer.Ingress[0].IP = on, fmt.Sprintf("203.0.113.%d", i+1)
		})
		f.have(t, s, of(on, slice(8080, ep("10.0.0.1", on, "rs"), ep("10.0.0.2", "n1", "rs"))))
		f.reconcile(nameOf(s), fakeSink{f.recorded})
	}
	f.followNodes(fakeSink{f.recorded})
	f.tunnels, f.sink = nil, nil
	cache := f.nodes
	excluded := node("n1", "192.0.2.1")
	excluded.Labels[labelExclude] = ""
	for _, tt := range []struct {
		name          string
		change        func()
		want, sources string
	}{
		{"nothing", func() {}, "", "[]"},
		{"n2 appears", func() { cache.Add(node("n2", "192.0.2.2")) }, "n2", "[[192.0.2.1 192.0.2.2]]"},
		{"n2 moves", func() { cache.Update(node("n2", "192.0.2.9")) }, "n2", "[[192.0.2.1 192.0.2.9]]"},
		{"n2 has a heartbeat", func() { cache.Update(node("n2", "192.0.2.9")) }, "", "[]"},
		{"n9 appears", func() { cache.Add(node("n9", "192.0.2.8")) }, "", "[[192.0.2.1 192.0.2.8 192.0.2.9]]"},
		{"n2 goes", func() { cache.Delete(node("n2")) }, "n2", "[[192.0.2.1 192.0.2.8]]"},
		{"n1 is excluded", func() { cache.Update(excluded) }, "n1 n2 n3", "[]"},
		{"n1 goes", func() { cache.Delete(excluded) }, "n1 n2 n3", "[[192.0.2.8]]"},
	} {
		tt.change()
		f.followNodes(fakeSink{f.recorded})
		var names []string
		for _, text := range f.sink {
			names = append(names, strings.Split(strings.TrimPrefix(text, "put default/"), " ")[0])
		}
		f.sink = nil
		slices.Sort(names)
		must.Row(t, tt.name+": put", tt.want, strings.Join(names, " "))
		must.Row(t, tt.name+": tunnel sources", tt.sources, taken(&f.tunnels))
	}
}

// The labels of this node are passed on when they are known and when they change, whether the other nodes are watched
// or not.
func TestLabelsOfThisNode(t *testing.T) {
	for _, forward := range []lb.Method{lb.MethodTunnel, lb.MethodNAT} {
		synctest.Test(t, func(t *testing.T) {
			client := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
			var got []map[string]string
			f := newFixture(t, func(o *Options) {
				o.Client, o.Forward = client, forward
				o.NodeLabels = func(labels map[string]string) { got = append(got, labels) }
			})
			stop := f.running(t)
			change := func(name, label, value string) {
				n := node(name, "192.0.2.1")
				n.Labels = map[string]string{label: value}
				client.CoreV1().Nodes().Update(t.Context(), n, meta.UpdateOptions{})
				pass(time.Second)
			}
			pass(time.Second)
			for range 2 {
				change("n1", "rack", "a")
			}
			change("n2", "rack", "b")
			change("n1", "rack", "c")
			stop()
			want := "[map[topology.kubernetes.io/zone:zone-n1] map[rack:a] map[rack:c]]"
			must.Row(t, forward, want, fmt.Sprint(got))
		})
	}
}

func localPort(s *core.Service) { local(s); s.Spec.HealthCheckNodePort = 30000 }

// After a boot the agent takes no health check node port for some minutes, because a service proxy that starts later
// could not listen there.
func TestNodePortAfterBoot(t *testing.T) {
	for _, isProxy := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, func(o *Options) {
				o.ProxyHealthz, o.IsProxy, o.Booted = healthz, isProxy, time.Now().Add(-time.Minute)
			})
			f.conditions.startProxyCheck(false)
			f.Health(report(proxyCheck, errRefused))
			f.queued()
			f.nodePort(aService(localPort), 1)
			const served = "[serve default/web 30000 1]"
			got := taken(&f.ports)
			must.True(t, (got == served) == isProxy, "a minute after the boot, is proxy: %t: %s", isProxy, got)
			if isProxy {
				return
			}
			pass(proxyStart - time.Minute)
			must.Row(t, "queued", []string{webName}, f.queued())
			f.nodePort(aService(localPort), 1)
			must.Row(t, fmt.Sprintf("%s after the boot", proxyStart), served, taken(&f.ports))
		})
	}
}

// A service proxy answers for every Service, including Services that another program serves and Services without an
// address.
func TestNodePortsOfOthers(t *testing.T) {
	for name, change := range map[string]func(*core.Service){
		"no address":    func(s *core.Service) { s.Status = core.ServiceStatus{} },
		"another class": func(s *core.Service) { s.Spec.LoadBalancerClass = new("x/y") },
	} {
		for _, isProxy := range []bool{false, true} {
			f := newFixture(t, func(o *Options) { o.IsProxy = isProxy })
			s := aService(func(s *core.Service) { localPort(s); change(s) })
			f.have(t, s, node("n1"), of("web", slice(8080, ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs"))))
			f.reconcile(webName, fakeSink{f.recorded})
			want := "[stop default/web]"
			if isProxy {
				want = "[serve default/web 30000 1 other]"
			}
			must.Row(t, fmt.Sprintf("%s, is proxy: %t", name, isProxy), want, taken(&f.ports))
			must.Row(t, name+": put", nil, f.sink)
			f.services.Delete(s)
			f.reconcile(webName, fakeSink{f.recorded})
			must.Row(t, name+", deleted", "[stop default/web]", taken(&f.ports))
		}
	}
}
