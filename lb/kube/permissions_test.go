package kube

import (
	"context"
	"errors"
	"testing"

	authorization "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	testclient "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The agent asks for what it needs, in all namespaces, and finds what is refused.
func TestPermissions(t *testing.T) {
	for _, tt := range []struct {
		assigns bool
		refused string // resource
		asked   int
		want    []string
	}{
		{false, "", 8, nil},
		{true, "", 9, nil},
		{false, "endpointslices", 8, []string{
			"the API server does not permit this agent to list all endpointslices",
			"the API server does not permit this agent to watch all endpointslices"}},
		{true, "services/status", 9, []string{
			"the API server does not permit this agent to patch all services/status"}},
	} {
		client, asked := fake.NewClientset(), 0
		client.PrependReactor("create", "selfsubjectaccessreviews", func(a testclient.Action) (
			handled bool, ret runtime.Object, err error,
		) {
			r := a.(testclient.CreateAction).GetObject().(*authorization.SelfSubjectAccessReview).DeepCopy()
			at := r.Spec.ResourceAttributes
			asked++
			must.True(t, at.Namespace == "" && at.Verb != "", "%+v", at)
			what := at.Resource
			if at.Subresource != "" {
				what += "/" + at.Subresource
			}
			r.Status.Allowed = what != tt.refused
			return true, r, nil
		})
		found, err := Permissions(t.Context(), client, tt.assigns)
		must.Do(t, err)
		must.Equal(t, tt.want, lbtest.Texts(found))
		must.Equal(t, tt.asked, asked)
	}
	client := fake.NewClientset()
	away := errors.New("the API server is away")
	client.PrependReactor("*", "*", func(testclient.Action) (bool, runtime.Object, error) { return true, nil, away })
	_, err := Permissions(context.Background(), client, false)
	must.True(t, errors.Is(err, away), "%v", err)
}
