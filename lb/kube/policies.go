package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/steelyard-lb/steelyard/lb"
)

// cached lets the API server answer from its cache, which suffices for a look at the cluster.
var cached = meta.ListOptions{ResourceVersion: "0"}

// Policies returns a finding for each served Service whose clients its pods' NetworkPolicies do not admit. Policies see
// the clients' addresses here. With kube-proxy they see a node's under the traffic policy Cluster, so some clusters
// admit only those.
//
// A finding is certain, apart from whether the network enforces policies. The agent may not read pods, and knows only
// the labels that a Service selects. So a policy that also selects by other labels counts as one that admits clients,
// but not as one that isolates pods.
func Policies(ctx context.Context, client kubernetes.Interface, classes []string) (found []lb.Finding, err error) {
	list, err := client.NetworkingV1().NetworkPolicies(meta.NamespaceAll).List(ctx, cached)
	if apierrors.IsForbidden(err) {
		return nil, errors.New("the API server does not permit this agent to list networkpolicies")
	}
	if err != nil {
		return nil, fmt.Errorf("list NetworkPolicies: %w", err)
	}
	byNamespace := map[string][]networking.NetworkPolicy{}
	for _, p := range list.Items {
		if len(p.Spec.PolicyTypes) == 0 || slices.Contains(p.Spec.PolicyTypes, networking.PolicyTypeIngress) {
			byNamespace[p.Namespace] = append(byNamespace[p.Namespace], p)
		}
	}
	nodes := sync.OnceValues(func() ([]netip.Prefix, error) { return nodeRanges(ctx, client) })
	for namespace, policies := range byNamespace {
		services, err := client.CoreV1().Services(namespace).List(ctx, cached)
		if err != nil {
			return nil, fmt.Errorf("list Services: %w", err)
		}
		for _, s := range services.Items {
			if !handled(&s) || !matchesClass(&s, classes...) || len(s.Spec.Selector) == 0 || len(addressesOf(&s)) == 0 {
				continue
			}
			text, err := refusal(&s, policies, nodes)
			if err != nil {
				return nil, err
			}
			if text != "" {
				found = append(found, lb.FoundNetworkPolicy.About(nameOf(&s), "%s", text))
			}
		}
	}
	slices.SortFunc(found, func(a, b lb.Finding) int { return strings.Compare(a.Object, b.Object) })
	return found, nil
}

// nodeRanges returns the addresses of the cluster's nodes, and the ranges from which they take addresses for pods and
// for themselves.
func nodeRanges(ctx context.Context, client kubernetes.Interface) (all []netip.Prefix, err error) {
	list, err := client.CoreV1().Nodes().List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	for _, n := range list.Items {
		for _, a := range slices.Concat(nodeAddresses(&n), addressesOfType(&n, core.NodeExternalIP)) {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		}
		for _, cidr := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(cidr); err == nil {
				all = append(all, p.Masked())
			}
		}
	}
	return all, nil
}

// refusal says which clients of a Service the policies of its namespace do not admit, or returns "".
func refusal(
	s *core.Service, policies []networking.NetworkPolicy, nodes func() ([]netip.Prefix, error),
) (string, error) {
	var names []string
	var rules []networking.NetworkPolicyIngressRule
	for _, p := range policies {
		isolates, admits := selects(&p, s.Spec.Selector)
		if isolates {
			names = append(names, p.Name)
		}
		if admits {
			rules = append(rules, p.Spec.Ingress...)
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	slices.Sort(names)
	for _, port := range s.Spec.Ports {
		from, all := admitted(rules, port)
		if all {
			continue
		}
		why, err := notAdmitted(s, from, nodes)
		if why != "" || err != nil {
			return fmt.Sprintf("NetworkPolicy %s, which selects the pods of Service %s, admits %s at port %d; with "+
				"Steelyard, it sees the clients' addresses", strings.Join(names, ", "), nameOf(s), why, port.Port), err
		}
	}
	return "", nil
}

// selects reports whether a policy surely selects the pods with these labels, which may have others, and whether it may
// select them.
func selects(p *networking.NetworkPolicy, known map[string]string) (surely, maybe bool) {
	selector, err := meta.LabelSelectorAsSelector(&p.Spec.PodSelector)
	if err != nil { // the API server validates it
		return false, true
	}
	all, _ := selector.Requirements()
	surely = true
	for _, r := range all {
		switch _, ok := known[r.Key()]; {
		case !ok:
			surely = false
		case !r.Matches(labels.Set(known)):
			return false, false
		}
	}
	return surely, true
}

// admitted returns the ranges that rules admit to a port of a Service, or all if they admit everyone.
func admitted(rules []networking.NetworkPolicyIngressRule, to core.ServicePort) (from []netip.Prefix, all bool) {
	for _, r := range rules {
		if !slices.ContainsFunc(r.Ports, func(p networking.NetworkPolicyPort) bool { return mayMatch(p, to) }) &&
			len(r.Ports) > 0 {
			continue
		}
		if len(r.From) == 0 {
			return nil, true
		}
		for _, peer := range r.From {
			if peer.IPBlock == nil { // pods, which are no clients from outside
				continue
			}
			if p, err := netip.ParsePrefix(peer.IPBlock.CIDR); err == nil {
				from = append(from, p.Masked())
			}
		}
	}
	return from, false
}

// mayMatch reports whether a policy's port may be the one that a Service's port leads to. Pods give names to ports.
func mayMatch(p networking.NetworkPolicyPort, to core.ServicePort) bool {
	protocol, target := core.ProtocolTCP, to.TargetPort.IntVal
	if p.Protocol != nil {
		protocol = *p.Protocol
	}
	if to.Protocol != "" && protocol != to.Protocol || to.Protocol == "" && protocol != core.ProtocolTCP {
		return false
	}
	if p.Port == nil || p.Port.StrVal != "" || to.TargetPort.StrVal != "" {
		return true
	}
	if target == 0 {
		target = to.Port
	}
	last := p.Port.IntVal
	if p.EndPort != nil {
		last = *p.EndPort
	}
	return p.Port.IntVal <= target && target <= last
}

// notAdmitted says which clients of a Service are not in these ranges, or returns "". If the Service has no ranges of
// clients, ranges other than those of nodes are probably the intended ones.
func notAdmitted(s *core.Service, from []netip.Prefix, nodes func() ([]netip.Prefix, error)) (string, error) {
	if len(from) == 0 {
		return "no client outside the cluster", nil
	}
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		r, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err == nil && !slices.ContainsFunc(from, r.Overlaps) {
			return fmt.Sprintf("no client of %s, which is in the Service's loadBalancerSourceRanges,", r), nil
		}
	}
	if len(s.Spec.LoadBalancerSourceRanges) > 0 {
		return "", nil
	}
	known, err := nodes()
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(from, func(p netip.Prefix) bool { return !isOfNodes(p, known) }) {
		return "", nil
	}
	return fmt.Sprintf("only %s, which has addresses of nodes,", joined(from)), nil
}

// isOfNodes reports whether a range seems to be that of the nodes. A larger one with nodes in it is probably meant for
// clients as well.
func isOfNodes(p netip.Prefix, nodes []netip.Prefix) bool {
	small := 20
	if p.Addr().Is6() {
		small = 64
	}
	return slices.ContainsFunc(nodes, func(n netip.Prefix) bool {
		return n.Overlaps(p) && (n.Bits() <= p.Bits() || p.Bits() >= small)
	})
}

func joined(all []netip.Prefix) string {
	var texts []string
	for _, p := range all {
		texts = append(texts, p.String())
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ", ")
}
