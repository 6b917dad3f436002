package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A node that has answered and no longer does receives no new connections until it answers again. A node that has lost
// more than half of several others avoids none of them.
func TestNodesThatDoNotAnswer(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward, o.NodeProbe = lb.MethodTunnel, 300*time.Millisecond })
	f.have(t, node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), node("n3", "192.0.2.3"), node("n4", "192.0.2.4"),
		aService(same), of("web", slice(8080, ep("10.0.1.1", "n1", "r"), ep("10.0.2.1", "n2", "r"),
			ep("10.0.3.1", "n3", "r"), ep("10.0.4.1", "n4", "r"))))
	f.reconcile("default/web", fakeSink{f.recorded})
	follow := func() { f.handle(probedNodes, fakeSink{f.recorded}) }
	follow()
	var probed []string
	for _, c := range f.checks {
		probed = append(probed, fmt.Sprintf("%s at %s by %s", c.Target.Addr(), c.VIP, c.Method))
		must.True(t, c.Spec.Interval == 300*time.Millisecond && c.Spec.Fall*300 <= 1000, "%+v", c.Spec)
	}
	slices.Sort(probed)
	must.Equal(t, "192.0.2.2 at 203.0.113.10 by tunnel, 192.0.2.3 at 203.0.113.10 by tunnel, "+
		"192.0.2.4 at 203.0.113.10 by tunnel", strings.Join(probed, ", "))

	tell := func(n int, state lb.State) {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}), 0)
		f.Health(lb.Health{Key: lb.CheckKey{Service: nodeProbe, Backend: at}, State: state})
	}
	steps := func(name, want string, finding *lb.FindingKind) {
		t.Helper()
		f.followNodes(fakeSink{f.recorded})
		var used []string
		for _, b := range f.put["default/web"].Ports[0].Backends {
			if !b.Deleted {
				used = append(used, strings.TrimPrefix(b.Node.String(), "192.0.2."))
			}
		}
		all := f.unanswering()
		must.True(t, len(all) == 0 && finding == nil || len(all) == 1 && finding != nil && all[0].Code == finding.Code,
			"%s: %+v", name, all)
		must.Equal(t, name+": "+want, name+": "+strings.Join(used, " "))
	}
	tell(4, lb.StateUnhealthy)
	steps("one that has never answered", "1 2 3 4", nil)
	for n := 2; n <= 4; n++ {
		tell(n, lb.StateHealthy)
	}
	steps("all answer", "1 2 3 4", nil)
	tell(3, lb.StateUnhealthy)
	steps("one does not", "1 2 4", lb.FoundNodeUnreachable)
	follow()
	steps("it is still probed", "1 2 4", lb.FoundNodeUnreachable)
	must.True(t, f.put["default/web"].NodeForwarding.AnyNode, "others may still choose it, so flows may be anywhere")
	tell(4, lb.StateUnhealthy)
	steps("two of three do not", "1 2 3 4", lb.FoundNodesUnreachable)
	tell(4, lb.StateHealthy)
	tell(3, lb.StateHealthy)
	steps("all answer again", "1 2 3 4", nil)
	must.True(t, !f.put["default/web"].NodeForwarding.AnyNode, "still anywhere")

	tell(3, lb.StateUnhealthy)
	steps("one does not again", "1 2 4", lb.FoundNodeUnreachable)
	f.have(t, of("web", slice(8080, ep("10.0.1.1", "n1", "r"), ep("10.0.3.1", "n3", ""))))
	f.reconcile("default/web", fakeSink{f.recorded})
	for f.queue.Len() > 0 {
		key, _ := f.queue.Get()
		f.queue.Done(key)
	}
	follow()
	must.True(t, f.queue.Len() == 1, "its endpoint is no longer ready, but it stays avoided when it returns")
	f.have(t, of("web", slice(8080, ep("10.0.3.1", "n3", "r"))))
	f.reconcile("default/web", fakeSink{f.recorded})
	follow()
	tell(3, lb.StateHealthy)
	tell(3, lb.StateUnhealthy)
	steps("the only one", "3", lb.FoundNodeUnreachable)
}

// A node is probed at the VIP of its first probe as long as it has an endpoint of that VIP.
func TestVIPsOfNodeProbes(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward, o.NodeProbe = lb.MethodTunnel, time.Second })
	type service struct{ vip, node string }
	probedAt := func(want string, enabled bool, services ...service) {
		t.Helper()
		put, to := map[string]*lb.Service{}, map[string]targets{}
		for i, s := range services {
			put[fmt.Sprint(i)] = &lb.Service{VIPs: addrs(s.vip), NodeForwarding: lb.NodeForwarding{Enabled: enabled}}
			to[fmt.Sprint(i)] = targets{netip.MustParseAddr(s.node): {v4: true}}
		}
		f.probes.follow(put, to)
		must.Equal(t, want, fmt.Sprint(f.probes.vips))
	}
	first, second := service{"203.0.113.20", "192.0.2.2"}, service{"203.0.113.10", "192.0.2.2"}
	probedAt("map[192.0.2.2:203.0.113.20]", true, first)
	probedAt("map[192.0.2.2:203.0.113.20]", true, first, second)
	probedAt("map[192.0.2.2:203.0.113.10 192.0.2.3:203.0.113.20]", true, service{"203.0.113.20", "192.0.2.3"}, second)
	probedAt("map[192.0.2.2:203.0.113.10]", true, second, service{"2001:db8::1", "192.0.2.3"})
	must.True(t, f.probes.usesOne(addrs("203.0.113.9", "203.0.113.10")) && !f.probes.usesOne(addrs("203.0.113.20")),
		"a VIP that is not used, or the one that is")
	probedAt("map[]", false, second)
}

// A node with too many others to probe at the interval probes each less often.
func TestNodeProbesAreBounded(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.Forward, o.NodeProbe = lb.MethodTunnel, 300*time.Millisecond })
	s := &lb.Service{VIPs: addrs("203.0.113.10"), NodeForwarding: lb.NodeForwarding{Enabled: true}}
	to := targets{}
	for i := range 600 {
		to[netip.AddrFrom4([4]byte{192, 0, byte(2 + i/250), byte(1 + i%250)})] = families{v4: true}
	}
	f.probes.follow(map[string]*lb.Service{"web": s}, map[string]targets{"web": to})
	must.True(t, len(f.checks) == 600 && f.checks[0].Spec.Interval == 3*time.Second &&
		f.checks[0].Spec.Timeout == time.Second, "%d checks: %+v", len(f.checks), f.checks[0].Spec)
}
