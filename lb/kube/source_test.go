package kube

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A service is sent when it changes, and deleted once when this node no longer serves it.
func TestReconcile(t *testing.T) {
	for name, stop := range map[string]func(*fixture, *core.Service){
		"deleted":         func(f *fixture, s *core.Service) { f.services.Delete(s) },
		"no address":      func(f *fixture, s *core.Service) { s.Status = core.ServiceStatus{} },
		"another proxy":   func(f *fixture, s *core.Service) { s.Labels = map[string]string{labelProxyName: "x"} },
		"another class":   func(f *fixture, s *core.Service) { s.Spec.LoadBalancerClass = new("x/y") },
		"no longer of us": func(f *fixture, s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP },
	} {
		f := newFixture(t, asIs)
		service := aService(same)
		f.have(t, service, node("n1"), of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
		reconcile := func(want string) {
			t.Helper()
			f.reconcile(webName, fakeSink{f.recorded})
			must.Row(t, name, want, taken(&f.sink))
		}
		reconcile("[put default/web [203.0.113.10]]")
		reconcile("[]")
		f.have(t, of("web", slice(8080)))
		reconcile("[put default/web [203.0.113.10]]")
		f.probePort(webName, 30000, nil)
		stop(f, service)
		taken(&f.ports)
		reconcile("[delete default/web]")
		must.True(t, len(f.put)+len(f.endpoints)+len(f.conditions.checks) == 0 &&
			taken(&f.ports) == "[stop default/web]", "%s: something is left of the service", name)
		reconcile("[]")
	}
}

// A change that leaves a service's ports alone also keeps them in memory, because old plans refer to them.
func TestUnchangedPortsAreShared(t *testing.T) {
	f := newFixture(t, asIs)
	s := aService(same)
	f.have(t, node("n1", "192.0.2.1"), s, of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
	f.reconcile(nameOf(s), fakeSink{f.recorded})
	before := f.put[nameOf(s)]
	s.Spec.SessionAffinity = core.ServiceAffinityClientIP
	f.reconcile(nameOf(s), fakeSink{f.recorded})
	now := f.put[nameOf(s)]
	must.True(t, before.Affinity != now.Affinity && &before.Ports[0] == &now.Ports[0],
		"%p %+v, then %p %+v", before.Ports, before, now.Ports, now)
}

// A Service has the algorithm of its annotation. A wrong value keeps the previous one.
func TestAlgorithmOfService(t *testing.T) {
	f := newFixture(t, asIs)
	s := aService(same)
	f.have(t, node("n1", "192.0.2.1"), s, of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
	for _, tt := range []struct {
		value string
		want  lb.Algorithm
	}{
		{"", lb.AlgorithmMaglev}, {"fastest", lb.AlgorithmMaglev}, {"source-hash", lb.AlgorithmSourceHash},
		{"fastest", lb.AlgorithmSourceHash}, {"round-robin", lb.AlgorithmRoundRobin}, {"", lb.AlgorithmMaglev},
	} {
		s.Annotations = map[string]string{algorithm[0]: tt.value}
		f.reconcile(nameOf(s), fakeSink{f.recorded})
		must.Row(t, tt.value, tt.want, f.put[nameOf(s)].Algorithm)
	}
}

// With announce-from, a node without an endpoint asks routers to prefer others, but only with the policy Cluster.
func TestAnnounceFrom(t *testing.T) {
	for _, tt := range []struct {
		value, node string
		change      func(*core.Service)
		want        string
	}{
		{"endpoints", "n1", same, ""}, {"endpoints", "n2", same, lb.NoEndpointHere}, {"", "n2", same, ""},
		{"endpoints", "n2", local, ""}, {"pods", "n2", same, ""},
	} {
		f := newFixture(t, func(o *Options) { o.Forward = lb.MethodTunnel })
		s := aService(tt.change)
		s.Annotations = map[string]string{from[0]: tt.value}
		f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), s,
			of("web", slice(8080, ep("10.0.0.1", tt.node, "rs"))))
		f.reconcile(nameOf(s), fakeSink{f.recorded})
		must.Row(t, fmt.Sprint(tt), tt.want, f.put[nameOf(s)].LowerPreference)
	}
}

// The agent answers at a health check node port when the policy is Local and the node has no other proxy.
func TestNodePort(t *testing.T) {
	localPort := func(s *core.Service) { local(s); s.Spec.HealthCheckNodePort = 30000 }
	const served, stopped = "[serve default/web 30000 2]", "[stop default/web]"
	for name, tt := range map[string]struct {
		change  func(*core.Service)
		isProxy bool
		health  error // of the service proxy
		want    string
	}{
		"is the proxy":       {localPort, true, nil, served},
		"no proxy":           {localPort, false, errRefused, served},
		"a proxy":            {localPort, false, nil, stopped},
		"an unhealthy proxy": {localPort, false, errTest, stopped},
		"Cluster":            {func(s *core.Service) { s.Spec.HealthCheckNodePort = 30000 }, true, nil, stopped},
		"no port":            {local, true, nil, stopped},
	} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz, o.IsProxy = healthz, tt.isProxy })
		f.conditions.startProxyCheck(false)
		f.Health(report(proxyCheck, tt.health))
		f.nodePort(aService(tt.change), 2)
		must.Row(t, name, tt.want, taken(&f.ports))
		must.Row(t, name+": Events", nil, drained(f.emitted))
	}
	f := newFixture(t, func(o *Options) { o.NodePorts, o.IsProxy = nil, true })
	f.nodePort(aService(localPort), 0)
	f.closePort(webName)
}

// A health check node port in use is reported with an Event and tried again.
func TestNodePortInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *Options) { o.IsProxy = true })
		f.portErr = errTest
		service := aService(func(s *core.Service) { local(s); s.Spec.HealthCheckNodePort = 30000 })
		f.nodePort(service, 0)
		want := "Warning FailedToStartServiceHealthcheck " +
			`node n1 failed to start healthcheck "default/web" on port 30000: test error`
		must.Row(t, "event", want, <-f.emitted.Events)
		pass(portRetry - time.Millisecond)
		early := f.queued()
		pass(time.Second)
		must.Row(t, "queued too early", nil, early)
		must.Row(t, "queued later", []string{webName}, f.queued())
	})
}

// handlers is an informer that keeps its handlers.
type handlers struct {
	cache.SharedIndexInformer
	cache.ResourceEventHandlerFuncs
}

func (h *handlers) AddEventHandler(x cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	h.ResourceEventHandlerFuncs = x.(cache.ResourceEventHandlerFuncs)
	return nil, nil
}
func (h *handlers) HasSynced() bool { return true }

// A changed Service is queued, together with the Services that share an address with it, before or after.
func TestWatch(t *testing.T) {
	named := func(name string, ips ...string) *core.Service {
		return aService(func(s *core.Service) {
			s.Name, s.Status, s.Spec.ExternalIPs = name, core.ServiceStatus{}, ips
		})
	}
	f := newFixture(t, func(o *Options) { o.Unschedulable = true })
	one, two := named("one", "203.0.113.1"), named("two", "203.0.113.2")
	f.have(t, one, two, named("none"))
	services := &handlers{}
	f.watch(services, func(x any) string { return nameOf(x.(*core.Service)) })
	change := func(from, to *core.Node) {
		f.keepNode(from)
		f.queued()
		f.keepNode(to)
	}
	heartbeat := node("n2", "192.0.2.2")
	atFirst, atSecond := named("new", "203.0.113.1"), named("new", "203.0.113.2")
	moved := node("n2", "192.0.2.3")
	heartbeat.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady}}
	ready := func(name string) *core.Node {
		n := node(name)
		n.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, LastHeartbeatTime: meta.Now()}}
		return n
	}
	cordoned := func(name string) *core.Node {
		n := node(name)
		n.Spec.Unschedulable = true
		return n
	}
	zoneless := node("n1")
	zoneless.Labels = nil
	seen := named("one", "203.0.113.2")
	seen.ResourceVersion = "1"
	for _, tt := range []struct {
		name string
		do   func()
		want []string
	}{
		{"add", func() { services.OnAdd(named("new"), false) }, []string{"default/new"}},
		{"add, shared", func() { services.OnAdd(atSecond, false) }, []string{"default/new", "default/two"}},
		{"update", func() {
			services.OnUpdate(atFirst, atSecond)
		}, []string{"default/new", "default/two", "default/one"}},
		{"delete", func() { services.OnDelete(one) }, []string{"default/one"}},
		{"delete, missed", func() {
			services.OnDelete(cache.DeletedFinalStateUnknown{Obj: two})
		}, []string{"default/two"}},
		{"seen again", func() { services.OnUpdate(seen, seen) }, nil},
		{"heartbeat of another node", func() { change(node("n2", "192.0.2.2"), heartbeat) }, nil},
		{"address of another node", func() { change(heartbeat, moved) }, []string{anyNode}},
		{"another node is cordoned", func() { change(node("n2"), cordoned("n2")) }, nil},
		{"heartbeat of this node", func() { change(node("n1"), ready("n1")) }, nil},
		{"this node is cordoned", func() { change(node("n1"), cordoned("n1")) }, []string{anyNode}},
		{"this node has another zone", func() { change(node("n1"), zoneless) }, []string{anyNode}},
		{"another node", func() { f.keepNode(node("n9")) }, []string{anyNode}},
	} {
		tt.do()
		must.Row(t, tt.name+": queued", tt.want, f.queued())
	}
	must.True(t, !f.shares(named("none")) && !f.shares(one) && f.shares(named("new", "203.0.113.1")), "shares is wrong")
}

// The pool of each address names its announcers. Only an address in no pool is withheld.
func TestPooled(t *testing.T) {
	pool := func(name, addr string, announce lb.AnnouncerKind) Pool {
		return poolFrom(name, addr, addr, func(p *Pool) { p.Announce = []lb.AnnouncerKind{announce} })
	}
	two := []Pool{pool("a", "203.0.113.1", lb.AnnounceBGP), pool("b", "203.0.113.2", lb.AnnounceL2)}
	for _, tt := range []struct {
		pools []Pool
		vips  []string
		want  string
	}{
		{nil, []string{"203.0.113.9"}, "[] map[]"},
		{two, []string{"203.0.113.1"}, "[bgp] map[]"},
		{two, []string{"203.0.113.2", "203.0.113.2"}, "[l2] map[]"},
		{two, []string{"203.0.113.1", "203.0.113.2"}, "[] map[203.0.113.1:{[bgp]  false} 203.0.113.2:{[l2]  false}]"},
		{two, []string{"203.0.113.1", "203.0.113.9"},
			"[] map[203.0.113.1:{[bgp]  false} 203.0.113.9:{[] 203.0.113.9 is in no pool false}]"},
	} {
		f := newFixture(t, func(o *Options) { o.Pools = tt.pools })
		s := &lb.Service{}
		for _, v := range tt.vips {
			s.VIPs = append(s.VIPs, netip.MustParseAddr(v))
		}
		f.pooled(s)
		got := fmt.Sprint(s.Announce, " ", s.PerVIP)
		must.True(t, got == tt.want && s.WithholdReason == "", "%v: %s; want %s", tt.vips, got, tt.want)
	}
}

// Run follows a cluster, here client-go's fake API server.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := of("web", slice(8080, ep("10.0.0.1", "n1", "rs")))
		client := fake.NewClientset(aService(same), endpoints, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
		f := newFixture(t, func(o *Options) { o.Client, o.Forward = client, lb.MethodTunnel })
		stop := f.running(t)
		api := client.CoreV1()
		step := func(name, want, tunnels string) {
			t.Helper()
			pass(time.Second)
			must.Row(t, name, want, taken(&f.sink))
			must.Row(t, name+": tunnel sources", tunnels, taken(&f.tunnels))
		}
		const put = "[put default/web [203.0.113.10]]"
		both := "[192.0.2.1 192.0.2.2]"
		pass(time.Second)
		must.Row(t, "start", "[put default/web [203.0.113.10] complete kubernetes]", taken(&f.sink))
		if got := f.tunnels; !slices.Contains(got, both) && !slices.Contains(got, "[192.0.2.2 192.0.2.1]") {
			t.Errorf("start: tunnel sources %s", got)
		}
		f.tunnels = nil
		text := f.log.String()
		must.True(t, strings.Contains(text, "services=1 served=1"), "log %s", text)
		changed := of("web", slice(8080, ep("10.0.0.2", "n1", "rs")))
		client.DiscoveryV1().EndpointSlices("default").Update(t.Context(), changed, meta.UpdateOptions{})
		step("endpoint changed", put, "[]")
		api.Nodes().Delete(t.Context(), "n2", meta.DeleteOptions{})
		step("other node deleted", "[]", "[[192.0.2.1]]")
		unready := node("n1", "192.0.2.1")
		unready.Labels[labelExclude] = ""
		api.Nodes().Update(t.Context(), unready, meta.UpdateOptions{})
		step("node excluded", put, "[]")
		api.Services("default").Delete(t.Context(), "web", meta.DeleteOptions{})
		step("deleted", "[delete default/web]", "[]")
		stop()
	})
}

// Without a node table the source watches all Nodes, even with nat, because it reports when all are excluded. It never
// watches objects that another proxy serves.
func TestWhatIsWatched(t *testing.T) {
	const labels = " !service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"
	want := []string{"endpointslices" + labels, "nodes ", "nodes metadata.name=n1", "services" + labels}
	for _, forward := range []lb.Method{lb.MethodTunnel, lb.MethodNAT} {
		synctest.Test(t, func(t *testing.T) {
			client := fake.NewClientset()
			f := newFixture(t, func(o *Options) { o.Client, o.Forward = client, forward })
			stop := f.running(t)
			pass(time.Second)
			stop()
			got := map[string]bool{}
			for _, a := range client.Actions() {
				if w, ok := a.(k8stest.WatchAction); ok {
					r := w.GetWatchRestrictions()
					got[a.GetResource().Resource+" "+r.Labels.String()+r.Fields.String()] = true
				}
			}
			must.Equal(t, want, slices.Sorted(maps.Keys(got)))
		})
	}
}
