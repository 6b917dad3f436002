package kube

import (
	"errors"
	"testing"

	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	testclient "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// policy returns a policy that selects pods by labels, with a rule that admits these ranges.
func policy(name string, selector map[string]string, cidrs ...string) *networking.NetworkPolicy {
	p := &networking.NetworkPolicy{ObjectMeta: meta.ObjectMeta{Namespace: "default", Name: name}}
	p.Spec.PodSelector.MatchLabels = selector
	var rule networking.NetworkPolicyIngressRule
	for _, cidr := range cidrs {
		rule.From = append(rule.From, networking.NetworkPolicyPeer{IPBlock: &networking.IPBlock{CIDR: cidr}})
	}
	p.Spec.Ingress = []networking.NetworkPolicyIngressRule{rule}
	return p
}

// policyTest is the expectation for a Service default/web with pods labelled app=web.
type policyTest struct {
	name     string
	policies []*networking.NetworkPolicy
	ranges   []string // of the Service's clients
	want     string   // what the policies admit; "" for no finding
}

func policyTests() []policyTest {
	web := map[string]string{"app": "web"}
	one := func(name, want string, p *networking.NetworkPolicy) policyTest {
		return policyTest{name, []*networking.NetworkPolicy{p}, nil, want}
	}
	only := func(cidrs string) string { return "only " + cidrs + ", which has addresses of nodes," }
	const nobody = "no client outside the cluster"
	on := func(port intstr.IntOrString) *networking.NetworkPolicy {
		p := policy("p", web)
		p.Spec.Ingress[0].Ports = []networking.NetworkPolicyPort{{Port: &port}}
		return p
	}
	pods, egress, denied := policy("p", web), policy("p", nil, "192.0.2.0/24"), policy("p", nil)
	pods.Spec.Ingress[0].From = []networking.NetworkPolicyPeer{{PodSelector: &meta.LabelSelector{}}}
	egress.Spec.PolicyTypes = []networking.PolicyType{networking.PolicyTypeEgress}
	denied.Spec.Ingress = nil
	return []policyTest{
		one("addresses of nodes", only("192.0.2.11/32"), policy("p", web, "192.0.2.11/32")),
		one("the nodes' network", only("192.0.2.0/24"), policy("p", nil, "192.0.2.0/24")),
		one("a node's pods", only("10.244.1.1/32"), policy("p", nil, "10.244.1.1/32")),
		one("of both families", only("192.0.2.0/24, 2001:db8::/64"), policy("p", nil, "192.0.2.0/24", "2001:db8::/64")),
		one("clients as well", "", policy("p", web, "192.0.2.11/32", "198.51.100.0/24")),
		one("a range of nodes and clients", "", policy("p", web, "192.0.0.0/16")),
		one("everyone", "", policy("p", web)),
		one("nobody", nobody, denied),
		one("pods only", nobody, pods),
		one("only outgoing packets", "", egress),
		one("another port", nobody, on(intstr.FromInt32(9090))),
		one("this port", "", on(intstr.FromInt32(8080))),
		one("perhaps this port", "", on(intstr.FromString("http"))),
		one("other pods", "", policy("p", map[string]string{"app": "db"}, "192.0.2.0/24")),
		one("perhaps other pods", "", policy("p", map[string]string{"tier": "db"}, "192.0.2.0/24")),
		{"perhaps another admits", []*networking.NetworkPolicy{policy("p", web, "192.0.2.0/24"),
			policy("q", map[string]string{"tier": "front"})}, nil, ""},
		{"the Service's clients", []*networking.NetworkPolicy{policy("p", web, "198.51.100.0/25")},
			[]string{"198.51.100.0/24"}, ""},
		{"not the Service's clients", []*networking.NetworkPolicy{policy("p", web, "203.0.113.0/24")},
			[]string{"198.51.100.0/24"},
			"no client of 198.51.100.0/24, which is in the Service's loadBalancerSourceRanges,"},
	}
}

// A finding names the policy, the Service and what the policy admits. Services of other classes have none.
func TestPolicies(t *testing.T) {
	for _, tt := range policyTests() {
		s := &core.Service{ObjectMeta: meta.ObjectMeta{Namespace: "default", Name: "web"}}
		s.Spec = core.ServiceSpec{
			Type: core.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "web"},
			LoadBalancerSourceRanges: tt.ranges,
			Ports:                    []core.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
		}
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "203.0.113.10"}}
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: "n1"}}
		n.Spec.PodCIDRs = []string{"10.244.1.0/24"}
		n.Status.Addresses = []core.NodeAddress{{Type: core.NodeInternalIP, Address: "192.0.2.11"},
			{Type: core.NodeInternalIP, Address: "2001:db8::11"}}
		other := s.DeepCopy()
		other.Name, other.Spec.LoadBalancerClass = "other", new(string)
		*other.Spec.LoadBalancerClass = "example.com/another"
		objects := []runtime.Object{s, other, n}
		for _, p := range tt.policies {
			objects = append(objects, p)
		}
		found, err := Policies(t.Context(), fake.NewClientset(objects...), nil)
		must.Do(t, err)
		var want []string
		if tt.want != "" {
			want = []string{"NetworkPolicy p, which selects the pods of Service default/web, admits " + tt.want +
				" at port 80; with Steelyard, it sees the clients' addresses"}
		}
		must.Row(t, tt.name, want, lbtest.Texts(found))
	}
}

// An agent that may not list policies says so.
func TestPoliciesNotPermitted(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("list", "networkpolicies", func(testclient.Action) (bool, runtime.Object, error) {
		resource := schema.GroupResource{Resource: "networkpolicies"}
		return true, nil, apierrors.NewForbidden(resource, "", errors.New("no"))
	})
	_, err := Policies(t.Context(), client, nil)
	must.True(t, err != nil && err.Error() == "the API server does not permit this agent to list networkpolicies",
		"%v", err)
}
