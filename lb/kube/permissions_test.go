package kube

import (
	"context"
	"errors"
	"slices"
	"testing"

	authorization "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	testclient "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The agent asks for what it needs, in all namespaces or in its own, and finds what is refused.
func TestPermissions(t *testing.T) {
	for _, tt := range []struct {
		assigns bool
		refused string // resource
		asked   int
		want    []string
	}{
		{false, "", 13, nil},
		{true, "", 20, nil},
		{false, "endpointslices", 13, []string{
			"the API server does not permit this agent to list all endpointslices",
			"the API server does not permit this agent to watch all endpointslices"}},
		{true, "services/status", 20, []string{
			"the API server does not permit this agent to patch all services/status"}},
		{true, "leases", 20, []string{
			"the API server does not permit this agent to create all leases in the namespace lbs",
			"the API server does not permit this agent to get all leases in the namespace lbs",
			"the API server does not permit this agent to watch all leases in the namespace lbs",
			"the API server does not permit this agent to update all leases in the namespace lbs"}},
		{false, "configmaps", 13, []string{
			"the API server does not permit this agent to list all configmaps in the namespace lbs",
			"the API server does not permit this agent to watch all configmaps in the namespace lbs"}},
		{false, "secrets", 13, []string{
			"the API server does not permit this agent to get secrets/steelyard-tunnel-keys in the namespace lbs",
			"the API server does not permit this agent to list secrets/steelyard-tunnel-keys in the namespace lbs",
			"the API server does not permit this agent to watch secrets/steelyard-tunnel-keys in the namespace lbs"}},
	} {
		client, asked := fake.NewClientset(), 0
		client.PrependReactor("create", "selfsubjectaccessreviews", func(a testclient.Action) (
			handled bool, ret runtime.Object, err error,
		) {
			r := a.(testclient.CreateAction).GetObject().(*authorization.SelfSubjectAccessReview).DeepCopy()
			at := r.Spec.ResourceAttributes
			asked++
			inside := slices.Contains([]string{"leases", "configmaps", "secrets"}, at.Resource)
			must.True(t, (at.Namespace == "lbs") == inside && at.Verb != "", "%+v", at)
			what := at.Resource
			if at.Subresource != "" {
				what += "/" + at.Subresource
			}
			r.Status.Allowed = what != tt.refused
			return true, r, nil
		})
		found, err := Permissions(t.Context(), client, Role{Namespace: "lbs", Assigns: tt.assigns, Keys: true})
		must.Do(t, err)
		must.Equal(t, tt.want, lbtest.Texts(found))
		must.Equal(t, tt.asked, asked)
	}
	client := fake.NewClientset()
	away := errors.New("the API server is away")
	client.PrependReactor("*", "*", func(testclient.Action) (bool, runtime.Object, error) { return true, nil, away })
	_, err := Permissions(context.Background(), client, Role{})
	must.True(t, errors.Is(err, away), "%v", err)
}
