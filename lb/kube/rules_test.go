package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// What happens to connections from inside and from outside, by policy and endpoints (pkg/proxy/topology.go; the rows of
// pkg/proxy/nftables/proxier.go for destinations without endpoints).
func TestProxyRules(t *testing.T) {
	t.Parallel()
	here, there := ep("10.244.1.1", "n1", "rs"), ep("10.244.2.1", "n2", "rs")
	zone := func(e discovery.Endpoint, hints ...string) discovery.Endpoint {
		return ep(e.Addresses[0], *e.NodeName, "rs", hints...)
	}
	both, one, other := "to 10.244.1.1:80 10.244.2.1:80", "to 10.244.1.1:80", "to 10.244.2.1:80"
	inside := func(s *core.Service) { s.Spec.InternalTrafficPolicy = new(core.ServiceInternalTrafficPolicyLocal) }
	for _, tt := range []struct {
		name      string
		change    func(*core.Service)
		endpoints []discovery.Endpoint
		clusterIP string
		external  string // of the address, and of the node port
	}{
		{"Cluster", same, []discovery.Endpoint{here, there}, both, both},
		{"Cluster, none anywhere", same, nil, "refused", "refused"},
		{"Local", local, []discovery.Endpoint{here, there}, both, both + ", from outside " + one},
		{"Local, none here", local, []discovery.Endpoint{there}, other, other + ", from outside dropped"},
		{"Local, none anywhere", local, nil, "refused", "refused"},
		{"inside Local", inside, []discovery.Endpoint{here, there}, one, both},
		{"inside Local, none here", inside, []discovery.Endpoint{there}, "dropped", other},
		{"both Local, none here", func(s *core.Service) { inside(s); local(s) }, []discovery.Endpoint{there}, "dropped",
			other + ", from outside dropped"},
		{"terminating here", local, []discovery.Endpoint{ep("10.244.1.1", "n1", "st"), there}, other,
			other + ", from outside " + one},
		{"all terminating", same,
			[]discovery.Endpoint{ep("10.244.1.1", "n1", "st"), ep("10.244.2.1", "n2", "st")}, both, both},
		{"neither ready nor serving", same, []discovery.Endpoint{ep("10.244.1.1", "n1", "")}, "refused", "refused"},
		{"serves, but neither ready nor terminating", same, []discovery.Endpoint{ep("10.244.1.1", "n1", "s")},
			"refused", "refused"},
		{"all terminating, Local", local,
			[]discovery.Endpoint{ep("10.244.1.1", "n1", "st"), ep("10.244.2.1", "n2", "st")}, both,
			both + ", from outside " + one},
		{"inside Local, terminating here", inside, []discovery.Endpoint{ep("10.244.1.1", "n1", "st"), there}, one,
			other},
		{"inside Local, none anywhere", inside, nil, "refused", "refused"},
		{"one without a hint", same, []discovery.Endpoint{zone(here, "z:z1"), there}, both, both},
		{"hints for terminating ones", same,
			[]discovery.Endpoint{ep("10.244.1.1", "n1", "st", "z:z2"), zone(there, "z:z1")}, other, other},
		{"hints, inside Local", inside, []discovery.Endpoint{zone(here, "z:z2"), zone(there, "z:z1")}, one, other},
		{"hints of zones", same, []discovery.Endpoint{zone(here, "z:z1"), zone(there, "z:z2")}, one, one},
		{"hints of nodes", local, []discovery.Endpoint{zone(here, "n:n2"), zone(there, "n:n1")}, other,
			other + ", from outside " + one},
	} {
		s := aService(tt.change)
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.Ports[0].NodePort = "10.96.0.1", []string{"10.96.0.1"}, 30080
		n1 := node("n1")
		n1.Labels[core.LabelTopologyZone] = "z1"
		f := newFixture(t, asIs)
		f.have(t, s, n1, of("web", slice(80, tt.endpoints...)))
		got := map[string]string{}
		for to, rule := range f.proxyRules() {
			got[to.String()] = rule.String()
		}
		want := map[string]string{
			"10.96.0.1:80/tcp": tt.clusterIP, "203.0.113.10:80/tcp": tt.external,
			"node port 30080/tcp (IPv4)": tt.external,
		}
		must.Row(t, tt.name, fmt.Sprint(want), fmt.Sprint(got))
	}
}

// A difference names the Service, the destination, and what both would do.
func TestCompareWithKubeProxy(t *testing.T) {
	t.Parallel()
	to := func(port uint16) proxy.Destination {
		return proxy.Destination{Addr: netip.MustParseAddr("10.96.0.1"), Port: port, Protocol: 6}
	}
	rule := func(empty proxy.Empty) proxy.Rule {
		return proxy.Rule{Service: "default/web:http", Inside: proxy.Choice{Empty: empty}}
	}
	got := proxy.Compare(
		proxy.Rules{to(1): rule(proxy.Refused), to(2): rule(proxy.Refused), to(3): rule(proxy.Dropped)},
		proxy.Rules{to(1): rule(proxy.Refused), to(2): rule(proxy.Dropped), to(4): rule(proxy.Refused)})
	slices.Reverse(got)
	must.Row(t, "differences", "[- service default/web:http: 10.96.0.1:4/tcp refused "+
		"+ service default/web:http: 10.96.0.1:3/tcp dropped "+
		"~ service default/web:http: 10.96.0.1:2/tcp refused; kube-proxy: dropped]", fmt.Sprint(got))
}

// Rules of TCP ports list the endpoints whose pods are being deleted, whatever else their conditions are.
func TestEnding(t *testing.T) {
	t.Parallel()
	s := aService(func(s *core.Service) { s.Spec.ClusterIPs = []string{"10.96.0.1"} })
	f := newFixture(t, asIs)
	f.have(t, s, node("n1"), of("web", slice(80, ep("10.244.1.1", "n1", "rs"), ep("10.244.1.2", "n1", "s"),
		ep("10.244.1.3", "n1", "st"), ep("10.244.1.4", "n1", "t"))))
	rules := f.rulesOf("default/web")
	must.True(t, len(rules) > 0, "no rules")
	for _, r := range rules {
		must.Row(t, r.to().String(), "[10.244.1.3:80 10.244.1.4:80]", fmt.Sprint(r.Ending))
	}
}
