package kube

import (
	"context"
	"fmt"

	authorization "k8s.io/api/authorization/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/steelyard-lb/steelyard/lb"
)

// Role says what an agent does, and so which permissions it needs.
type Role struct {
	Namespace string // of the Lease, the node table and the tunnel keys
	Assigns   bool   // it may be elected to assign addresses
	Keys      bool   // it uses the Secret with the tunnel keys
}

// permission is a verb on all objects of a resource, or on those of the agent's namespace.
type permission struct {
	group, resource, subresource string
	name                         string // of the only object, or ""
	inside                       bool   // only in the agent's namespace
	verbs                        []string
}

// needs returns what an agent asks of the API server. systemd/daemonset.yaml permits it.
func (r Role) needs() []permission {
	all := []permission{
		{resource: "services", verbs: []string{"list", "watch"}},
		{resource: "nodes", verbs: []string{"list", "watch"}},
		{group: "discovery.k8s.io", resource: "endpointslices", verbs: []string{"list", "watch"}},
		{resource: "events", verbs: []string{"create", "patch"}},
		{resource: "configmaps", inside: true, verbs: []string{"list", "watch"}},
	}
	keys := permission{resource: "secrets", name: KeySecret, inside: true, verbs: []string{"get", "list", "watch"}}
	if r.Assigns {
		all = append(all,
			permission{resource: "services", subresource: "status", verbs: []string{"patch"}},
			permission{group: "coordination.k8s.io", resource: "leases", inside: true,
				verbs: []string{"create", "get", "watch", "update"}},
			permission{resource: "configmaps", name: shardName(0), inside: true, verbs: []string{"update"}},
		)
		keys.verbs = append(keys.verbs, "update")
	}
	if r.Keys {
		all = append(all, keys)
	}
	return all
}

// Permissions returns a finding for each missing permission of an agent. Every user may ask. NetworkPolicies are not
// among them, because only Policies needs them, and says so.
func Permissions(ctx context.Context, client kubernetes.Interface, r Role) (found []lb.Finding, err error) {
	for _, p := range r.needs() {
		for _, verb := range p.verbs {
			a := &authorization.ResourceAttributes{
				Verb: verb, Group: p.group, Resource: p.resource, Subresource: p.subresource, Name: p.name,
			}
			if p.inside {
				a.Namespace = r.Namespace
			}
			review := &authorization.SelfSubjectAccessReview{
				Spec: authorization.SelfSubjectAccessReviewSpec{ResourceAttributes: a},
			}
			review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, meta.CreateOptions{})
			if err != nil {
				return nil, fmt.Errorf("ask the API server for permissions: %w", err)
			}
			if !review.Status.Allowed {
				found = append(found, p.missing(verb, r.Namespace))
			}
		}
	}
	return found, nil
}

func (p permission) missing(verb, namespace string) lb.Finding {
	what := p.resource
	if p.subresource != "" {
		what += "/" + p.subresource
	}
	which := "all " + what
	if p.name != "" {
		which = what + "/" + p.name
	}
	text := fmt.Sprintf("the API server does not permit this agent to %s %s", verb, which)
	if p.inside {
		text += " in the namespace " + namespace
	}
	return lb.FoundNotPermitted.About(verb+" "+what, "%s", text)
}
