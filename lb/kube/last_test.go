package kube

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// A node whose proxy fails withdraws its routes while another node can announce them, and else lowers their preference.
func TestLastAnnouncer(t *testing.T) {
	failed := errors.New("HTTP 503")
	own := func(err error) lb.Health { return other("", err) }
	excluded := node("n3", "192.0.2.3")
	excluded.Labels[labelExclude] = ""
	for _, tt := range []struct {
		name    string
		local   bool
		change  func(*Options)
		reports []lb.Health
		want    string // the reason to withhold
		lower   bool
	}{
		{"all are healthy", false, asIs, []lb.Health{own(nil)}, "", false},
		{"not asked yet", false, asIs, []lb.Health{own(failed)}, "", true},
		{"another is healthy", false, asIs, []lb.Health{own(failed), other("n2", nil)}, "HTTP 503", false},
		{"all fail", false, asIs, []lb.Health{own(failed), other("n2", failed)}, "", true},
		{"an excluded node is healthy", false, asIs, []lb.Health{own(failed), other("n3", nil)}, "", true},
		{"it recovers", false, asIs, []lb.Health{own(failed), other("n2", failed), own(nil)}, "", false},
		{"withdraw", false, func(o *Options) { o.KeepLast = false }, []lb.Health{own(failed)}, "HTTP 503", false},
		{"Local, and the other one has an endpoint", true, asIs, []lb.Health{own(failed), other("n2", nil)},
			"HTTP 503", false},
		{"Local, and the other one has none", true, asIs, []lb.Health{own(failed), other("n4", nil)}, "", true},
	} {
		f := newFixture(t, func(o *Options) { o.ProxyHealthz, o.KeepLast = healthz, true; tt.change(o) })
		f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), excluded, node("n4", "192.0.2.4"))
		f.conditions.startProxyCheck(false)
		s := aService(func(s *core.Service) {
			if tt.local {
				s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
			}
		})
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

// other is a check result for another node's proxy, or with "" for this node's.
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

// The others are asked only while the own proxy fails: at their addresses, some that follow by name.
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
	if len(f.checks) != 0 {
		t.Errorf("checks %+v before the own proxy fails", f.checks)
	}
	f.Health(other("", errors.New("HTTP 503")))
	f.lastAnnouncer(aService(func(*core.Service) {}), v, nil)
	asked := map[string]netip.AddrPort{}
	for _, c := range f.checks {
		asked[c.Key.Service] = c.Target
	}
	if len(asked) != 8 || asked["node/proxy/n6"].String() != "192.0.2.16:10256" || asked["node/proxy/n4"].IsValid() {
		t.Errorf("asked %v", asked)
	}
	f.checks = nil
	f.Health(other("", nil))
	if len(f.checks) != 8 || f.checks[0].Target.IsValid() {
		t.Errorf("checks %+v; want 8 to end", f.checks)
	}
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
	if got := step("not answered yet", false) + step("", false); got != "not answered yet" {
		t.Errorf("at the start: %q", got)
	}
	if got := step("drained", true) + step("", false); got != "drained" {
		t.Errorf("intended: %q", got)
	}
	start := time.Now()
	step("fault", false)
	if got := step("", false); time.Since(start) < f.o.Hold && !strings.HasPrefix(got, "healthy again, and withheld") {
		t.Errorf("after a fault: %q", got)
	}
	time.Sleep(2 * f.o.Hold)
	if got := step("", false); got != "" {
		t.Errorf("after the hold time: %q", got)
	}
}

// A Service without a usable endpoint is not announced, under either policy and whatever the proxy says; that is not a
// fault of the node.
func TestNoEndpoint(t *testing.T) {
	for _, policy := range []func(*core.Service){same, localPort} {
		for flags, want := range map[string]string{
			"": lb.NoEndpoint, "s": lb.NoEndpoint, "rs": "bad", "st": "bad",
		} {
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
				continue // as TestWithhold has it
			}
			if !strings.HasSuffix(s.WithholdReason, want) || s.WithholdIntended != (want == lb.NoEndpoint) {
				t.Errorf("%s, endpoint %q: withheld for %q, intended %t; want %q", s.Policy, flags, s.WithholdReason,
					s.WithholdIntended, want)
			}
		}
	}
}

// An address whose family nothing here serves is withheld, and that is not a fault of the node either.
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
			if !strings.HasSuffix(rule.WithholdReason, want) || (rule.WithholdReason != "") != (want != "") ||
				rule.WithholdIntended != (want != "") {
				t.Errorf("%s: %+v; want %q", vip, rule, want)
			}
		}
	}
}
