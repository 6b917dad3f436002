package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A node whose proxy fails withdraws its routes while another node can announce them, and otherwise lowers their
// preference.
func TestLastAnnouncer(t *testing.T) {
	failed := errors.New("HTTP 503")
	own := func(err error) lb.Health { return other("", err) }
	excluded := node("n3", "192.0.2.3")
	excluded.Labels[labelExclude] = ""
	for _, tt := range []struct {
		name    string
		policy  func(*core.Service)
		change  func(*Options)
		reports []lb.Health
		want    string // the reason to withhold
		lower   bool
	}{
		{"all are healthy", same, asIs, []lb.Health{own(nil)}, "", false},
		{"not asked yet", same, asIs, []lb.Health{own(failed)}, "", true},
		{"another is healthy", same, asIs, []lb.Health{own(failed), other("n2", nil)}, "HTTP 503", false},
		{"all fail", same, asIs, []lb.Health{own(failed), other("n2", failed)}, "", true},
		{"an excluded node is healthy", same, asIs, []lb.Health{own(failed), other("n3", nil)}, "", true},
		{"it recovers", same, asIs, []lb.Health{own(failed), other("n2", failed), own(nil)}, "", false},
		{"withdraw", same, func(o *Options) { o.KeepLast = false }, []lb.Health{own(failed)}, "HTTP 503", false},
		{"Local, and the other one has an endpoint", local, asIs, []lb.Health{own(failed), other("n2", nil)},
			"HTTP 503", false},
		{"Local, and the other one has none", local, asIs, []lb.Health{own(failed), other("n4", nil)}, "", true},
	} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz, o.KeepLast = healthz, true; tt.change(o) })
		f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), excluded, node("n4", "192.0.2.4"))
		f.conditions.startProxyCheck(false)
		s := aService(tt.policy)
		on := slimmed([]*discovery.EndpointSlice{slice(80, ep("10.0.0.1", "n1", "r"), ep("10.0.0.2", "n2", "r"))})
		var v *view
		look := func() {
			v = &view{service: &lb.Service{Name: "default/web"}, readyLocal: 1}
			v.service.WithholdReason = f.conditions.withhold(s, v, node("n1"))
			f.lastAnnouncer(s, v, on)
		}
		for _, h := range tt.reports {
			f.Health(h)
			look()
		}
		if got := v.service.WithholdReason; !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") ||
			(v.service.LowerPreference != "") != tt.lower {
			t.Errorf("%s: withheld for %q, lower preference for %q", tt.name, got, v.service.LowerPreference)
		}
	}
}

// other returns a check result for another node's proxy, or for this node's if node is "".
func other(node string, err error) lb.Health {
	key := proxyCheck
	if node != "" {
		key = otherCheck(node)
	}
	if err != nil {
		return lb.Health{Key: lb.CheckKey{Service: key}, State: lb.StateUnhealthy, Reason: err.Error(), Err: err}
	}
	return lb.Health{Key: lb.CheckKey{Service: key}, State: lb.StateHealthy}
}

// Other nodes are asked only while this node's proxy fails: at their addresses, and only the next ones by name.
func TestOthersAreAsked(t *testing.T) {
	f := newFixture(t, func(o *Options) {
		o.Node, o.ProxyHealthz, o.KeepLast = "n5", "http://127.0.0.1:10256/healthz", true
	})
	at := netip.MustParseAddr("192.0.2.10")
	for _, n := range "0123456789" {
		f.have(t, node("n"+string(n), at.String()))
		at = at.Next()
	}
	f.conditions.startProxyCheck(false)
	v := &view{service: &lb.Service{Name: "default/web"}}
	f.checks = nil
	f.lastAnnouncer(aService(func(*core.Service) {}), v, nil)
	must.True(t, len(f.checks) == 0, "checks %+v before the own proxy fails", f.checks)
	f.Health(other("", errors.New("HTTP 503")))
	f.lastAnnouncer(aService(func(*core.Service) {}), v, nil)
	asked := map[string]netip.AddrPort{}
	for _, c := range f.checks {
		asked[c.Key.Service] = c.Target
	}
	must.True(t, len(asked) == 8 && asked["node/proxy/n6"].String() == "192.0.2.16:10256" &&
		!asked["node/proxy/n4"].IsValid(), "asked %v", asked)
	f.checks = nil
	f.Health(other("", nil))
	must.True(t, len(f.checks) == 8 && !f.checks[0].Target.IsValid(), "checks %+v; want 8 to end", f.checks)
}

// An address that a fault has withdrawn stays withdrawn for Hold.
func TestHold(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Hold = 50 * time.Millisecond })
	step := func(reason string, intended bool) string {
		s := &lb.Service{Name: "web", WithholdReason: reason, WithholdIntended: intended}
		f.hold(s)
		f.put["web"] = s
		return s.WithholdReason
	}
	must.Row(t, "at the start", "not answered yet", step("not answered yet", false)+step("", false))
	must.Row(t, "intended", "drained", step("drained", true)+step("", false))
	start := time.Now()
	step("fault", false)
	if got := step("", false); time.Since(start) < f.o.Hold && !strings.HasPrefix(got, "healthy again, and withheld") {
		t.Errorf("after a fault: %q", got)
	}
	time.Sleep(2 * f.o.Hold)
	must.Row(t, "after the hold time", "", step("", false))
}

// A Service without a usable endpoint is not announced, under either policy and whatever the proxy says; that is not a
// fault of the node.
func TestNoEndpoint(t *testing.T) {
	for _, policy := range []func(*core.Service){same, localPort} {
		for flags, want := range map[string]string{"": lb.NoEndpoint, "s": lb.NoEndpoint, "rs": "bad", "st": "bad"} {
			f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
			f.own = node("n1", "192.0.2.1")
			f.have(t, f.own, aService(policy))
			if flags != "" {
				f.have(t, of("web", slice(8080, ep("10.0.0.1", "n1", flags))))
			}
			f.conditions.startProxyCheck(false)
			f.Health(report(proxyCheck, errTest))
			f.reconcile(webName, fakeSink{f.recorded})
			s := f.put[webName]
			if want == "bad" && s.Policy == lb.PolicyLocal {
				continue // TestWithhold covers this
			}
			must.True(t, strings.HasSuffix(s.WithholdReason, want) && s.WithholdIntended == (want == lb.NoEndpoint),
				"%s, endpoint %q: withheld for %q, intended %t; want %q", s.Policy, flags, s.WithholdReason,
				s.WithholdIntended, want)
		}
	}
}

// An address whose family no endpoint here serves is withheld, which is not a fault of the node either.
func TestFamilyWithoutEndpoint(t *testing.T) {
	two := func(s *core.Service) {
		s.Spec.IPFamilies = []core.IPFamily{core.IPv4Protocol, core.IPv6Protocol}
		ingress := &s.Status.LoadBalancer.Ingress
		*ingress = append(*ingress, core.LoadBalancerIngress{IP: "2001:db8:1::10"})
	}
	six := slice(8080, ep("2001:db8::2", "n2", "rs"))
	six.AddressType = discovery.AddressTypeIPv6
	of("web", six).Name = "web-2"
	for _, tt := range []struct {
		policy func(*core.Service)
		slices []*discovery.EndpointSlice
		want   string
	}{
		{same, nil, "no ready endpoints of IPv6"},
		{same, []*discovery.EndpointSlice{six}, ""},
		{local, []*discovery.EndpointSlice{six}, lb.NoLocalEndpoint},
	} {
		f := newFixture(t, func(*Options) {})
		f.own = node("n1", "192.0.2.1")
		f.have(t, f.own, aService(func(s *core.Service) { two(s); tt.policy(s) }))
		f.have(t, of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
		for _, s := range tt.slices {
			f.have(t, s)
		}
		f.Health(report(webName, nil))
		f.reconcile(webName, fakeSink{f.recorded})
		for _, vip := range f.put[webName].VIPs {
			rule, want := f.put[webName].PerVIP[vip], tt.want
			if vip.Is4() {
				want = ""
			}
			must.True(t, strings.HasSuffix(rule.WithholdReason, want) && (rule.WithholdReason != "") == (want != "") &&
				rule.WithholdIntended == (want != ""), "%s: %+v; want %q", vip, rule, want)
		}
	}
}

// After an interruption, the last endpoints are kept if the kubelets of all their nodes were silent as well.
func TestPanicHold(t *testing.T) {
	usable := []discovery.Endpoint{ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs")}
	failed := []discovery.Endpoint{ep("10.0.0.1", "n1", ""), ep("10.0.0.2", "n2", "")}
	const silent, ready = core.ConditionUnknown, core.ConditionTrue
	for _, tt := range []struct {
		name   string
		policy func(*core.Service)
		away   time.Duration
		second core.ConditionStatus // of the second node, or "" if it does not exist; the first one is silent
		back   bool                 // it has had this status only since the interruption began
		now    []discovery.Endpoint
		kept   int
	}{
		{"an interruption", same, time.Minute, silent, false, failed, 2},
		{"Local, and the proxy has none", localPort, time.Minute, silent, false, failed, 1},
		{"a kubelet reports again", same, time.Minute, ready, true, failed, 2},
		{"one was deleted", same, time.Minute, silent, false, failed[:1], 1},
		{"one terminates", same, time.Minute, silent, false,
			[]discovery.Endpoint{failed[0], ep("10.0.0.2", "n2", "t")}, 1},
		{"no interruption", same, 0, silent, false, failed, 0},
		{"a short one", same, 9 * time.Second, silent, false, failed, 0},
		{"a node was always ready", same, time.Minute, ready, false, failed, 0},
		{"a node is gone", same, time.Minute, "", false, failed, 0},
		{"all were deleted", same, time.Minute, silent, false, nil, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			first, second, client := node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), fake.NewClientset()
			first.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, Status: silent}}
			second.Status.Conditions = []core.NodeCondition{{Type: core.NodeReady, Status: tt.second}}
			if tt.back {
				second.Status.Conditions[0].LastTransitionTime = meta.NewTime(time.Now().Add(tt.away))
			}
			must.Do(t, client.Tracker().Add(first))
			if tt.second != "" {
				must.Do(t, client.Tracker().Add(second))
			}
			f := newFixture(t, func(o *Options) { o.PanicHold, o.Client = 30*time.Second, client })
			f.have(t, first, aService(tt.policy), of("web", slice(8080, usable...)))
			look := func(proxy error) (s *lb.Service, used int) {
				for range 3 { // the result of the proxy's check, and of the question about the nodes
					f.queue.Add(webName)
					for _, key := range f.queued() {
						f.handle(key, fakeSink{f.recorded})
					}
					f.Health(report(webName, proxy))
					synctest.Wait()
				}
				for _, b := range f.put[webName].Ports[0].Backends {
					if !b.Deleted {
						used++
					}
				}
				return f.put[webName], used
			}
			look(nil)
			time.Sleep(tt.away)
			f.Interrupted(time.Now().Add(-tt.away))
			f.have(t, of("web", slice(8080, tt.now...)))
			for _, after := range []time.Duration{0, 29 * time.Second} {
				time.Sleep(after)
				s, used := look(errTest)
				lower := s.LowerPreference != ""
				if used != tt.kept || lower != (used > 0) || lower != (s.WithholdReason == "") ||
					lower && (s.Check.Type != lb.CheckTCP || s.Check.Fall != 1 || !lb.Checks(s)[0].Presumed) {
					t.Errorf("%s: %d endpoints in use; want %d; %+v", tt.name, used, tt.kept, s)
				}
			}
			time.Sleep(2 * time.Second)
			if s, used := look(errTest); used > 0 || s.WithholdReason == "" || s.LowerPreference != "" {
				t.Errorf("%s: after panic_hold, %d endpoints in use, withheld for %q", tt.name, used, s.WithholdReason)
			}
			f.have(t, of("web", slice(8080, usable...)))
			if s, used := look(nil); used == 0 || s.LowerPreference != "" || s.Check.Type != lb.CheckNone {
				t.Errorf("%s: after the endpoints returned: %+v", tt.name, s)
			}
		})
	}
}

// New probing settings apply to running checks, which keep the results of unchanged targets.
func TestSetProbing(t *testing.T) {
	const url = "http://127.0.0.1:10256/healthz"
	first := lb.CheckSpec{Interval: time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	fast := lb.CheckSpec{Interval: 100 * time.Millisecond, Timeout: 50 * time.Millisecond, Rise: 1, Fall: 2}
	started := func(f *fixture) (all []string) {
		for _, c := range f.checks {
			text := "ends " + c.Key.Service
			if c.Target.IsValid() {
				text = fmt.Sprintf("%s %s%s every %s", c.Key.Service, c.Target,
					map[bool]string{true: " presumed"}[c.Presumed], c.Spec.Interval)
			}
			all = append(all, text)
		}
		f.checks = nil
		return all
	}
	for _, tt := range []struct {
		name   string
		next   Probing
		want   string
		reason string // why addresses are withheld afterwards
	}{
		{"equal", Probing{Probe: first, ProxyHealthz: url}, "[]", ""},
		{"faster", Probing{Probe: fast, ProxyHealthz: url}, "[node/proxy 127.0.0.1:10256 every 100ms]", ""},
		{"elsewhere", Probing{Probe: first, ProxyHealthz: "http://127.0.0.1:9/healthz"},
			"[ends node/proxy node/proxy 127.0.0.1:9 presumed every 1s]", ""},
		{"nowhere", Probing{Probe: first}, "[ends node/proxy]", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.Probe, o.ProxyHealthz = first, url })
			f.have(t, node("n1", "192.0.2.1"))
			f.conditions.startProxyCheck(false)
			f.Health(lb.Health{Key: lb.CheckKey{Service: proxyCheck}, State: lb.StateHealthy})
			started(f)
			f.SetProbing(tt.next)
			for _, key := range f.queued() {
				f.handle(key, fakeSink{f.recorded})
			}
			got := fmt.Sprint(started(f))
			must.True(t, got == tt.want, "%s; want %s", got, tt.want)
			must.Row(t, "withheld for", tt.reason, f.conditions.proxyReason())
			must.Row(t, "the options have", tt.next, f.o.probing())
		})
	}
}

// The new settings also apply to the checks of other nodes' proxies.
func TestSetProbingOfOthers(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.ProxyHealthz = "http://127.0.0.1:10256/healthz" })
	f.conditions.startProxyCheck(false)
	f.Health(lb.Health{Key: lb.CheckKey{Service: proxyCheck}, State: lb.StateUnhealthy, Err: errors.New("status 503")})
	f.conditions.ask(map[string]netip.Addr{"n2": netip.MustParseAddr("192.0.2.2")})
	f.checks = nil
	f.conditions.setProbing(Probing{})
	var ended []string
	for _, c := range f.checks {
		if !c.Target.IsValid() {
			ended = append(ended, c.Key.Service)
		}
	}
	must.Row(t, "ended", "[node/proxy node/proxy/n2]", fmt.Sprint(ended))
}

// A service that this node announces when its health check node port is new stays announced until the check has failed;
// one that it did not announce waits for the first success.
func TestPolicyChangesToLocal(t *testing.T) {
	const notYet = "health check node port 30000 has not answered yet"
	for _, tt := range []struct {
		name      string
		endpoints string // the node of the endpoint, or ""
		proxy     error
		then      string // the node of the endpoint under the policy Local
		after     string // why it is withheld directly after the change
	}{
		{"announced", "n1", nil, "n1", ""},
		{"an endpoint elsewhere before", "n2", nil, "n1", ""},
		{"no endpoint here", "n1", nil, "n2", lb.NoLocalEndpoint},
		{"withheld for the proxy", "n1", errTest, "n1", notYet},
		{"no endpoint before", "", nil, "n1", notYet},
		{"no endpoint at all", "n1", nil, "", lb.NoEndpoint},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
			at := func(node string) {
				all := []discovery.Endpoint{}
				if node != "" {
					all = append(all, ep("10.0.0.1", node, "rs"))
				}
				f.have(t, of("web", slice(8080, all...)))
			}
			reconcile := func(want string) {
				t.Helper()
				f.reconcile(webName, fakeSink{f.recorded})
				must.Row(t, "withheld for", want, f.put[webName].WithholdReason)
			}
			f.own = node("n1", "192.0.2.1")
			f.have(t, f.own, node("n2", "192.0.2.2"), aService(same))
			f.conditions.startProxyCheck(false)
			f.Health(report(proxyCheck, tt.proxy))
			at(tt.endpoints)
			f.reconcile(webName, fakeSink{f.recorded})
			f.have(t, aService(localPort))
			at(tt.then)
			for range 2 {
				reconcile(tt.after)
			}
			if tt.then != "n1" {
				return
			}
			f.Health(lb.Health{Key: lb.CheckKey{Service: webName}, Err: errRefused}) // not conclusive yet
			reconcile(tt.after)
			f.Health(report(webName, errTest))
			reconcile("health check node port 30000: bad")
			f.Health(report(webName, nil))
			reconcile("")
		})
	}
}
