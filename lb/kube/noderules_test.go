package kube

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fakeRules implements NodeRules.
type fakeRules struct {
	t     testing.TB
	mu    sync.Mutex // guards the following
	rules map[string][]lb.NodeRule
	calls []string // the names in each call
	err   error
	takes atomic.Int64 // time.Duration of a call
}

func (r *fakeRules) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

func (r *fakeRules) Apply(changed map[string][]lb.NodeRule, all bool) error {
	time.Sleep(time.Duration(r.takes.Load()))
	r.mu.Lock()
	defer r.mu.Unlock()
	call := strings.Join(slices.Sorted(maps.Keys(changed)), " ")
	if all {
		call = strings.TrimSpace("all " + call)
	}
	r.calls = append(r.calls, strings.ReplaceAll(call, "default/", ""))
	if r.err != nil {
		return r.err
	}
	if all {
		clear(r.rules)
	}
	maps.Copy(r.rules, changed)
	owner := map[proxy.Destination]string{}
	for name, rules := range r.rules {
		if len(rules) == 0 {
			delete(r.rules, name)
		}
		for _, rule := range rules {
			to := proxy.Destination{Addr: rule.Addr, Port: rule.Port, Protocol: rule.Protocol}
			must.True(r.t, owner[to] == "", "%s belongs to %s and %s", to, owner[to], name)
			owner[to] = name
		}
	}
	return nil
}

// of returns the rules of a Service in the namespace default, as texts in the order of destinations.
func (r *fakeRules) of(name string) []string {
	texts := []string{}
	for _, rule := range r.rules["default/"+name] {
		inside := proxy.Rule{Inside: choiceOf(rule.Inside)}
		text := fmt.Sprintf("%s/%s %s", netip.AddrPortFrom(rule.Addr, rule.Port), rule.Protocol, inside)
		if rule.Outside != nil {
			text += "; " + choiceOf(*rule.Outside).String()
		}
		if rule.Affinity != 0 {
			text += fmt.Sprint("; ", rule.Affinity)
		}
		if rule.Allow != nil {
			text += fmt.Sprint("; from ", rule.Allow)
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return texts
}

// proxying returns a fixture that passes rules on.
func proxying(t testing.TB, change func(*Options)) (*watched, *fakeRules) {
	rules := &fakeRules{t: t, rules: map[string][]lb.NodeRule{}}
	return newWatched(t, func(o *Options) {
		o.NodeRules = rules
		change(o)
	}), rules
}

// inCluster returns a Service of type ClusterIP.
func inCluster(name, ip string, change func(*core.Service)) *core.Service {
	return aService(func(s *core.Service) {
		s.Name, s.Status, s.Spec.Type = name, core.ServiceStatus{}, core.ServiceTypeClusterIP
		s.Spec.ClusterIP, s.Spec.ClusterIPs = ip, []string{ip}
		change(s)
	})
}

// The destinations of a Service, and who may connect to them. Other machines connect to VIPs through an lb.Service.
func TestNodeRules(t *testing.T) {
	permits := poolFrom("a", "198.51.100.1", "198.51.100.1", forExternalIPs)
	forbids := poolFrom("b", "198.51.100.2", "198.51.100.2")
	dual := func(s *core.Service) {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00::1")
		s.Spec.Ports[0].NodePort = 30080
	}
	ingress := func(ips ...string) func(*core.Service) {
		return func(s *core.Service) {
			s.Spec.Type = core.ServiceTypeLoadBalancer
			for _, ip := range ips {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, core.LoadBalancerIngress{IP: ip})
			}
		}
	}
	both := func(a, b func(*core.Service)) func(*core.Service) { return func(s *core.Service) { a(s); b(s) } }
	const own = "10.96.0.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080"
	const all = "to 10.0.0.1:8080 10.0.0.2:8080; to 10.0.0.1:8080 10.0.0.2:8080"
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   []string
	}{
		{"ClusterIP", same, []string{own}},
		{"node port", func(s *core.Service) { s.Spec.Ports[0].NodePort = 30080 },
			[]string{"0.0.0.0:30080/tcp " + all, own}},
		{"node port of both families", dual,
			[]string{"0.0.0.0:30080/tcp " + all, own, "[::]:30080/tcp refused; refused", "[fd00::1]:80/tcp refused"}},
		{"VIP", ingress("203.0.113.1"), []string{own, "203.0.113.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080"}},
		{"VIP, Local", both(ingress("203.0.113.1"), local),
			[]string{own, "203.0.113.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080"}},
		{"VIP that is no host's address", ingress("0.0.0.0", "127.0.0.1"), []string{own}},
		{"ipMode Proxy", both(ingress("203.0.113.1"), func(s *core.Service) {
			s.Status.LoadBalancer.Ingress[0].IPMode = new(core.LoadBalancerIPModeProxy)
		}), []string{own}},
		{"source ranges", both(ingress("203.0.113.1"), func(s *core.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{" 10.1.0.0/16 "}
			s.Spec.Ports[0].NodePort, s.Spec.ExternalIPs = 30080, []string{"198.51.100.1"}
		}), []string{"0.0.0.0:30080/tcp " + all, own, "198.51.100.1:80/tcp " + all,
			"203.0.113.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080; from [10.1.0.0/16 ::/0]"}},
		{"affinity", sticky, []string{own + "; 3h0m0s"}},
		{"externalIPs", func(s *core.Service) {
			s.Spec.ExternalIPs = []string{"198.51.100.1", "198.51.100.2", "198.51.100.3"}
		}, []string{own, "198.51.100.1:80/tcp " + all}},
		{"externalIP, Local", both(local, func(s *core.Service) { s.Spec.ExternalIPs = []string{"198.51.100.1"} }),
			[]string{own, "198.51.100.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080; to 10.0.0.1:8080"}},
		{"externalIP that is also a VIP", both(ingress("203.0.113.1"), func(s *core.Service) {
			s.Spec.ExternalIPs = []string{"203.0.113.1", "10.96.0.1"}
		}), []string{own, "203.0.113.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080"}},
		{"same number, other protocol", func(s *core.Service) {
			s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Name: "dns", Port: 80, Protocol: core.ProtocolUDP})
		}, []string{own, "10.96.0.1:80/udp refused"}},
		{"headless", func(s *core.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"}
		}, []string{}},
		{"ExternalName", func(s *core.Service) { s.Spec.Type = core.ServiceTypeExternalName }, []string{}},
	} {
		w, rules := proxying(t, func(o *Options) { o.Pools = []Pool{permits, forbids} })
		s := inCluster("web", "10.96.0.1", tt.change)
		slim(s)
		w.have(t, s, node("n1"), of("web", slice(8080, ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs"))))
		w.passAll()
		must.Row(t, tt.name, tt.want, rules.of("web"))
	}
}

// If the operator wants that, a Service also has its externalIPs that are in no pool, as with kube-proxy.
func TestAnyExternalIP(t *testing.T) {
	t.Parallel()
	w, rules := proxying(t, func(o *Options) {
		o.Pools, o.AnyExternalIP = []Pool{poolFrom("p", "198.51.100.2", "198.51.100.2")}, true
	})
	s := inCluster("web", "10.96.0.1", func(s *core.Service) {
		s.Spec.ExternalIPs = []string{"198.51.100.1", "198.51.100.2", "127.0.0.1"}
	})
	w.have(t, s, node("n1"))
	w.passAll()
	must.Equal(t, []string{"10.96.0.1:80/tcp refused", "198.51.100.1:80/tcp refused; refused"}, rules.of("web"))
}

// A named target port may have another number on each endpoint, and an address may be in two slices.
func TestNodeRulesOfSeveralSlices(t *testing.T) {
	w, rules := proxying(t, asIs)
	old, now := of("web", slice(8080, ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", ""))),
		of("web", slice(9090, ep("10.0.0.3", "n1", "rs")))
	now.Name = "web-2"
	again := of("web", slice(8080, ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs")))
	again.Name = "web-3"
	w.have(t, inCluster("web", "10.96.0.1", same), old, now, again)
	w.passAll()
	must.Equal(t, []string{"10.96.0.1:80/tcp to 10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:9090"}, rules.of("web"))
}

// A change concerns its Service, and those that claim the same destination. One call moves a destination.
func TestNodeRulesChange(t *testing.T) {
	w, rules := proxying(t, func(o *Options) { o.AnyExternalIP = true })
	external := func(age int) func(*core.Service) {
		return func(s *core.Service) {
			s.CreationTimestamp = meta.Unix(int64(1000-age), 0)
			s.Spec.ExternalIPs = []string{"198.51.100.1"}
		}
	}
	labelled := func(name string) *core.Service {
		s := inCluster("c", "10.96.0.3", same)
		s.Labels = map[string]string{name: ""}
		return s
	}
	a, b, c := inCluster("a", "10.96.0.1", external(1)), inCluster("b", "10.96.0.2", external(2)),
		inCluster("c", "10.96.0.3", same)
	thief := inCluster("a", "10.96.0.1", func(s *core.Service) { s.Spec.ExternalIPs = []string{"10.96.0.3"} })
	one := func(name string) *discovery.EndpointSlice { return of(name, slice(8080, ep("10.0.0.1", "n1", "rs"))) }
	zone := node("n1")
	zone.Labels[core.LabelTopologyZone] = "other"
	none := of("b", slice(8080))
	for _, x := range []meta.Object{one("a"), one("b"), one("c")} {
		set(w.Source.slices, w.slices, x, true)
	}
	services := func(x *core.Service, present bool) func() {
		return func() { set(w.Source.services, w.services, x, present) }
	}
	endpoints := func(x *discovery.EndpointSlice, present bool) func() {
		return func() { set(w.Source.slices, w.slices, x, present) }
	}
	w.setNode(node("n1"), true)
	w.queued()
	w.readNodes()
	w.passAll()
	for _, tt := range []struct {
		name    string
		do      func()
		calls   string
		a, b, c int // numbers of rules
	}{
		{"at first", func() {}, "[all]", 0, 0, 0},
		{"a appears", services(a, true), "[a]", 2, 0, 0},
		{"c appears", services(c, true), "[c]", 2, 0, 1},
		{"b, which is older, appears", services(b, true), "[a b]", 1, 2, 1},
		{"b has no endpoint", endpoints(none, true), "[a b]", 2, 1, 1},
		{"the slice of b is deleted", endpoints(none, false), "[a b]", 2, 1, 1},
		{"b has one again", endpoints(one("b"), true), "[a b]", 1, 2, 1},
		{"b is deleted", services(b, false), "[a b a]", 2, 0, 1},
		{"c has another proxy", services(labelled(labelProxyName), true), "[c]", 2, 0, 0},
		{"c is headless", services(labelled(labelHeadless), true), "[c]", 2, 0, 0},
		{"c is as before", services(c, true), "[c]", 2, 0, 1},
		{"a claims the ClusterIP of c", services(thief, true), "[a c]", 1, 0, 1},
		{"c has no endpoint", endpoints(of("c", slice(8080)), true), "[a c]", 1, 0, 1},
		{"another zone", func() { w.setNode(zone, true) }, "[all a c]", 1, 0, 1},
		{"heartbeat", func() { w.setNode(node("n2"), true) }, "[]", 1, 0, 1},
		{"other pools", func() { w.SetPools([]Pool{poolFrom("p", "198.51.100.1", "198.51.100.1")}) },
			"[all a c]", 1, 0, 1},
		{"the pool permits nothing", services(a, true), "[a c]", 1, 0, 1},
	} {
		tt.do()
		w.settle(fakeSink{w.recorded})
		rules.calls = slices.Compact(rules.calls) // Services that share an address are also queued
		must.Row(t, tt.name+": calls", tt.calls, taken(&rules.calls))
		got := []int{len(rules.of("a")), len(rules.of("b")), len(rules.of("c"))}
		must.Row(t, tt.name+": rules", []int{tt.a, tt.b, tt.c}, got)
	}
}

// After each of many random changes, the rules are those of a source that starts then.
func TestNodeRulesIncremental(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	w, rules := proxying(t, asIs)
	w.passAll()
	addr := func() string { return fmt.Sprintf("10.96.0.%d", r.IntN(4)) }
	for step := range 3000 {
		name := fmt.Sprintf("s%d", r.IntN(5))
		if r.IntN(2) == 0 {
			s := inCluster(name, addr(), func(s *core.Service) {
				s.Spec.ExternalIPs, s.Spec.Ports[0].NodePort = []string{addr(), addr()}, r.Int32N(3)
				s.CreationTimestamp = meta.Unix(r.Int64N(3), 0)
			})
			set(w.Source.services, w.services, s, r.IntN(4) > 0)
		} else {
			flags := []string{"", "rs"}[r.IntN(2)]
			set(w.Source.slices, w.slices, of(name, slice(8080, ep("10.0.0.1", "n1", flags))), r.IntN(4) > 0)
		}
		if r.IntN(2) == 0 {
			continue // several changes are handled together, in another order
		}
		w.settle(fakeSink{w.recorded})
		fresh := &fakeRules{t: t, rules: map[string][]lb.NodeRule{}}
		passed := w.passed
		w.o.NodeRules = fresh
		w.passAll()
		w.o.NodeRules, w.passed = rules, passed
		for i := range 5 {
			name := fmt.Sprintf("s%d", i)
			must.Need(t, slices.Equal(fresh.of(name), rules.of(name)), "step %d: %s has %v; want %v", step, name,
				rules.of(name), fresh.of(name))
		}
	}
}

// The first call has all Services of the cluster. What was not applied is passed on again, later each time; other
// changes do not wait for it.
func TestNodeRulesNotApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(inCluster("kubernetes", "10.96.0.1", same), node("n1"),
			of("kubernetes", slice(6443, ep("192.0.2.1", "n1", "rs"))))
		var known sync.Mutex // guards problems
		var problems []string
		w, rules := proxying(t, func(o *Options) {
			o.Client = client
			o.RulesProblem = func(err error) {
				known.Lock()
				defer known.Unlock()
				problems = append(problems, fmt.Sprint(err))
			}
		})
		stop := w.running(t)
		defer stop()
		step := func(name string, d time.Duration, calls, says string) {
			t.Helper()
			pass(d)
			rules.mu.Lock()
			defer rules.mu.Unlock()
			known.Lock()
			defer known.Unlock()
			must.Row(t, name, calls, taken(&rules.calls))
			must.Row(t, name+": problems", says, taken(&problems))
		}
		pass(time.Second)
		rules.mu.Lock()
		must.Equal(t, "all kubernetes", rules.calls[0]) // others follow from the first events
		rules.mu.Unlock()
		step("synced", 0, "[all kubernetes kubernetes]", "[<nil> <nil>]")
		must.Equal(t, []string{"10.96.0.1:80/tcp to 192.0.2.1:6443"}, rules.of("kubernetes"))
		api := client.CoreV1().Services("default")
		rules.fail(errors.New("full"))
		api.Create(t.Context(), inCluster("web", "10.96.0.2", same), meta.CreateOptions{})
		step("fails", time.Millisecond, "[web]", "[full]")
		step("again", 2*rulesDelay, "[web]", "[full]")
		step("later", 2*rulesDelay, "[web]", "[full]")
		api.Create(t.Context(), inCluster("new", "10.96.0.3", same), meta.CreateOptions{})
		step("another change", time.Millisecond, "[new]", "[full]")
		rules.fail(nil)
		step("again, both", rulesDelayMax, "[new web]", "[<nil>]")
		step("nothing to do", time.Hour, "[]", "[]")
		api.Delete(t.Context(), "web", meta.DeleteOptions{})
		step("deleted", time.Second, "[web]", "[<nil>]")
		must.Equal(t, 2, len(rules.rules))
		rules.fail(errors.New("broken"))
		w.SetPools(nil)
		step("all fail", time.Millisecond, "[all kubernetes new]", "[broken]")
		rules.fail(nil)
		step("all again", time.Second, "[all kubernetes new]", "[<nil>]")
	})
}

// BenchmarkNodeRules measures the change of a slice with 10,000 Services.
func BenchmarkNodeRules(b *testing.B) {
	w := newWatched(b, func(o *Options) { o.NodeRules = noRules{} })
	for i := range 10_000 {
		w.have(b, inCluster(fmt.Sprintf("s%d", i), addrN(100, i).String(), sticky))
		w.have(b, slimSlice(sliceOf(i, 1000, "")))
	}
	w.passAll()
	for b.Loop() {
		w.passChanged("default/s77")
	}
	start := time.Now()
	w.passAll()
	b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/all")
}

type noRules struct{}

func (noRules) Apply(map[string][]lb.NodeRule, bool) error { return nil }
