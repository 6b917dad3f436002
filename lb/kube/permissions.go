package kube

import (
	"context"
	"fmt"

	authorization "k8s.io/api/authorization/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/steelyard-lb/steelyard/lb"
)

// needed is what every agent asks of the API server to serve Services. systemd/daemonset.yaml permits it.
var needed = []authorization.ResourceAttributes{
	{Verb: "list", Resource: "services"}, {Verb: "watch", Resource: "services"},
	{Verb: "list", Resource: "nodes"}, {Verb: "watch", Resource: "nodes"},
	{Verb: "list", Group: "discovery.k8s.io", Resource: "endpointslices"},
	{Verb: "watch", Group: "discovery.k8s.io", Resource: "endpointslices"},
	{Verb: "create", Resource: "events"}, {Verb: "patch", Resource: "events"},
}

// assigning is what an agent asks as well if it may assign addresses.
var assigning = []authorization.ResourceAttributes{{Verb: "patch", Resource: "services", Subresource: "status"}}

// Permissions returns a finding for each missing permission to serve Services. Every user may ask.
func Permissions(ctx context.Context, client kubernetes.Interface, assigns bool) (found []lb.Finding, err error) {
	all := needed
	if assigns {
		all = append(all[:len(all):len(all)], assigning...)
	}
	for _, a := range all {
		review := &authorization.SelfSubjectAccessReview{
			Spec: authorization.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
		}
		review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, meta.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("ask the API server for permissions: %w", err)
		}
		if review.Status.Allowed {
			continue
		}
		what := a.Resource
		if a.Subresource != "" {
			what += "/" + a.Subresource
		}
		found = append(found, lb.FoundNotPermitted.About(a.Verb+" "+what,
			"the API server does not permit this agent to %s all %s", a.Verb, what))
	}
	return found, nil
}
