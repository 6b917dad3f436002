package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A Service that cannot have an address has a condition with the reason, until it has one. One Event says so.
func TestConditionAssigned(t *testing.T) {
	other := meta.Condition{Type: "LoadBalancerPortsError", Status: meta.ConditionFalse, Reason: "X"}
	wrong := wanting("web", func(s *core.Service) {
		s.Annotations = map[string]string{"steelyard.dev/pool": "x"}
		s.Status.Conditions = []meta.Condition{other}
	})
	term, client, events := testTerm(t, wrong)
	api := client.CoreV1().Services("default")
	reconcile := func() *core.Service {
		t.Helper()
		s := must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		must.Do(t, term.services.Update(s))
		must.Do(t, term.reconcile(t.Context(), webName))
		s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		return s
	}
	condition := func(s *core.Service) string {
		must.True(t, len(s.Status.Conditions) == 2 && s.Status.Conditions[0] == other,
			"conditions %+v; want another's as well", s.Status.Conditions)
		c := assignedCondition(s)
		if c == nil {
			return "none"
		}
		return fmt.Sprintf("%s %s %s", c.Status, c.Reason, c.Message)
	}
	const want = `False AllocationFailed there is no pool "x"; pools: public`
	must.Row(t, "condition", want, condition(reconcile()))
	patches(client)
	reconcile()
	must.Row(t, "written again", nil, patches(client))
	must.Row(t, "Events", 1, len(events.Events))
	s := reconcile()
	s.Annotations = nil
	must.Get(api.Update(t.Context(), s, meta.UpdateOptions{}))(t)
	s = reconcile()
	must.Row(t, "condition", "True Assigned ", condition(s))
	must.Row(t, "addresses", 1, len(s.Status.LoadBalancer.Ingress))
	s.Spec.Type = core.ServiceTypeClusterIP
	must.Get(api.Update(t.Context(), s, meta.UpdateOptions{}))(t)
	s = reconcile()
	must.True(t, len(s.Status.Conditions) == 1 && len(s.Status.LoadBalancer.Ingress) == 0,
		"as ClusterIP: %+v", s.Status)
}

// The Services that wait for an address are shown with the reason.
func TestWaiting(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward = lb.MethodTunnel })
	f.have(t,
		aService(func(s *core.Service) { s.Name = "has" }),
		aService(func(s *core.Service) { local(s); s.Name, s.Status = "local", core.ServiceStatus{} }),
		aService(func(s *core.Service) { s.Name, s.Status = "new", core.ServiceStatus{} }),
		aService(func(s *core.Service) {
			s.Name, s.Status = "failed", core.ServiceStatus{Conditions: []meta.Condition{{
				Type: conditionAssigned, Status: meta.ConditionFalse, Message: "no free address",
			}}}
		}),
		aService(func(s *core.Service) {
			s.Name, s.Status, s.Spec.LoadBalancerClass = "other", core.ServiceStatus{}, new("x/y")
		}),
	)
	var got []string
	for _, s := range f.Waiting() {
		got = append(got, fmt.Sprintf("%s %d/%s %s %s", s.Service, s.Port, s.Protocol, s.Forward, s.Reason))
	}
	const none = ", and this node has no [[pool]]"
	want := []string{
		"default/failed 80/tcp tunnel no address: no free address",
		"default/local 80/tcp nat no address: no address is assigned yet" + none,
		"default/new 80/tcp tunnel no address: no address is assigned yet" + none,
	}
	must.Equal(t, want, got)
}

// Two allocators with different pools, which lead in two namespaces, do not overwrite each other's conditions forever.
func TestConditionsOfTwoAllocators(t *testing.T) {
	for name, change := range map[string]func(*core.Service){
		"has an address of one": owning("203.0.113.1"),
		"asks for one of none":  func(s *core.Service) { s.Annotations = map[string]string{wantPool[0]: "x"} },
	} {
		one, client, _ := testTerm(t, wanting("web", change))
		two := newTerm(one.Allocator, []Pool{poolOfOne("203.0.113.9")})
		two.services = one.services
		t.Cleanup(two.queue.ShutDown)
		for range 10 {
			for _, term := range []*term{one, two} {
				s, err := client.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{})
				if err == nil {
					err = term.services.Update(s)
				}
				if err == nil {
					err = term.reconcile(t.Context(), webName)
				}
				must.Do(t, err)
			}
		}
		got := patches(client)
		must.True(t, len(got) != 0 && len(got) <= 2, "%s: %d writes: %q", name, len(got), got)
	}
}

// Our writes are recognised as ours in metadata.managedFields, as the API server's field manager records them, even
// after slim; what another writer has overwritten is not.
func TestManagedFields(t *testing.T) {
	term, client, _ := testTerm(t)
	api := client.CoreV1().Services("default")
	s := must.Get(api.Create(t.Context(), wanting("web", same), meta.CreateOptions{FieldManager: "user"}))(t)
	s = must.Get(term.write(t.Context(), s, true, []string{"203.0.113.1"}, nil))(t)
	for range 2 {
		got := fmt.Sprint(managers(s, addressField), managers(s, finalizerField))
		must.True(t, got == "[steelyard] [steelyard]", "written by %s: %+v", got, s.ManagedFields)
		must.True(t, wroteStatus(s) && hasOurFinalizer(s), "not recognised: %+v", s.ManagedFields)
		must.Get(slim(s))(t)
	}
	s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
	s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "192.0.2.1"}}
	s.Finalizers = slices.DeleteFunc(s.Finalizers, func(string) bool { return true })
	s = must.Get(api.UpdateStatus(t.Context(), s, meta.UpdateOptions{FieldManager: "other"}))(t)
	got := fmt.Sprint(managers(s, addressField), wroteStatus(s), hasOurFinalizer(s))
	must.True(t, got == "[other] false false", "overwritten: %s: %+v", got, s.ManagedFields)
}

// A Service whose address another controller has written gets the other family when it wants both. If that controller
// writes its address alone again, it is not overwritten forever. A status that we would have to change stays.
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
				Pools: []Pool{poolOfOne("203.0.113.1"), poolOfOne("2001:db8::1")}, Log: discard,
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
				must.Row(t, fmt.Sprintf("%s: %s", tt.name, when), want,
					fmt.Sprint(statusAddresses(server.services[webName])))
			}
			families := func(s *core.Service, all ...core.IPFamily) {
				s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(core.IPFamilyPolicyPreferDualStack), all
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

// One Event says why no node announces the addresses of a Service.
func TestNobodyAnnounces(t *testing.T) {
	has := owning("203.0.113.1")
	for _, tt := range []struct {
		name  string
		setUp func(*term)
		want  string
	}{
		{"a node may", func(t *term) { t.setNodes(1, 2) }, ""},
		{"the nodes are not known", func(*term) {}, ""},
		{"one node", func(t *term) { t.setNodes(0, 1) }, excludedNodes(1)},
		{"all nodes", func(t *term) { t.setNodes(0, 3) }, excludedNodes(3)},
		{"no announcer", func(t *term) { t.o.NoAnnouncer = true }, textNoAnnouncer},
		{"no agent", func(t *term) { t.unready.Store(3) }, fmt.Sprintf(textNotReady, 3, "")},
	} {
		term, _, events := testTerm(t, wanting("web", has))
		tt.setUp(term)
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		got := drained(events)
		want := []string{"Warning NotAnnounced " + tt.want}
		if tt.want == "" {
			want = nil
		}
		must.True(t, fmt.Sprint(got) == fmt.Sprint(want), "%s: %q; want %q", tt.name, got, want)
	}
}

// When no pod of the DaemonSet becomes ready, each Service is decided again, and once more when a pod is ready.
func TestNoAgentReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		term, client, _ := testTerm(t, wanting("web", same))
		term.Allocator.term = term
		term.know(wanting("web", same))
		ready := func(n int32) {
			d := &apps.DaemonSet{ObjectMeta: meta.ObjectMeta{Name: agentsName}}
			d.Status.DesiredNumberScheduled, d.Status.NumberReady = 3, n
			client.AppsV1().DaemonSets("").Delete(t.Context(), agentsName, meta.DeleteOptions{})
			must.Get(client.AppsV1().DaemonSets("").Create(t.Context(), d, meta.CreateOptions{}))(t)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go term.followAgents(ctx)
		for _, tt := range []struct {
			ready   int32
			queued  int
			unready int64
		}{{1, 0, 0}, {0, 0, 0}, {0, 1, 3}, {0, 0, 3}, {1, 1, 0}} {
			ready(tt.ready)
			time.Sleep(agentsEvery + time.Second)
			n := len(emptied(term.queue))
			must.True(t, n == tt.queued && term.unready.Load() == tt.unready,
				"%+v: %d queued, %d unready", tt, n, term.unready.Load())
		}
		cancel()
		term.queue.ShutDown()
		synctest.Wait()
	})
}

// Without pools, a Service is left to another controller for a minute, and forever if that controller has assigned it
// an address.
func TestServiceWithoutPools(t *testing.T) {
	for _, tt := range []struct {
		age         time.Duration
		given, says bool
	}{{time.Second, false, false}, {2 * othersTime, false, true}, {2 * othersTime, true, false}} {
		term, client, _ := testTerm(t, wanting("web", func(s *core.Service) {
			s.CreationTimestamp = meta.NewTime(time.Now().Add(-tt.age))
			if tt.given {
				given("203.0.113.1")(s)
				s.ManagedFields = nil
			}
		}))
		term.assigner = newAssigner(nil, nil)
		must.Do(t, term.reconcile(t.Context(), webName))
		got := patches(client)
		if said := strings.Contains(fmt.Sprint(got), textNoPool); said != tt.says || !said && len(got) > 0 {
			t.Errorf("%+v: patched %q", tt, got)
		}
	}
}

// The status of a node names what the cluster lacks, when there is a Service that needs it.
func TestSetupFindings(t *testing.T) {
	free, excluded := node("n1", "192.0.2.1"), node("n2", "192.0.2.2")
	excluded.Labels[labelExclude] = ""
	pools := Options{Forward: lb.MethodTunnel, Pools: []Pool{poolOfOne("203.0.113.1")}}
	ignores, silent := pools, pools
	other := pools
	other.Classes = []string{"x/y", "z"}
	ignores.IgnoreExclude, silent.NoAnnouncer = true, true
	const waits, waitsLong, has = 1, 2, 3
	for _, tt := range []struct {
		name    string
		options Options
		nodes   []*core.Node
		service int
		want    string // the codes
	}{
		{"no pool and no Service", Options{}, nil, 0, ""},
		{"no pool, a new Service", Options{}, nil, waits, ""},
		{"no pool", Options{}, nil, waitsLong, "no-pool"},
		{"another controller has the pools", Options{NoAnnouncer: true}, nil, has, ""},
		{"no announcer", silent, nil, has, "no-announcer"},
		{"a class of nobody", other, nil, waitsLong, "no-agent-for-class"},
		{"a new Service of another class", other, nil, waits, ""},
		{"another class's controller works", other, nil, has, ""},
		{"all excluded", pools, []*core.Node{excluded}, has, "all-nodes-excluded"},
		{"all excluded, no Service", pools, []*core.Node{excluded}, 0, ""},
		{"one excluded", pools, []*core.Node{excluded, free}, has, ""},
		{"the label has no effect", ignores, []*core.Node{excluded}, has, ""},
	} {
		keys := cache.MetaNamespaceKeyFunc
		s := &Source{
			o: tt.options, services: cache.NewIndexer(keys, nil), nodes: cache.NewIndexer(keys, nil),
			probes: newNodeProbes(tt.options, nil),
		}
		s.pools.Store(&tt.options.Pools)
		for _, n := range tt.nodes {
			s.nodes.Add(n)
		}
		s.excluded.Store(int64(s.allExcluded()))
		if tt.service > 0 {
			s.services.Add(wanting("web", func(s *core.Service) {
				s.CreationTimestamp = meta.Now()
				if tt.service == waitsLong {
					s.CreationTimestamp = meta.NewTime(time.Now().Add(-2 * othersTime))
				}
				if tt.service == has {
					given("203.0.113.1")(s)
				}
			}))
		}
		var got []string
		for _, f := range s.Findings() {
			got = append(got, f.Code)
		}
		must.True(t, fmt.Sprint(got) == "["+tt.want+"]", "%s: %q; want %s", tt.name, got, tt.want)
	}
}
