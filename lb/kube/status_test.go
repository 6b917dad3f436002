package kube

import (
	"fmt"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// What we write is recognised as ours in metadata.managedFields, as the field manager of the API server records it,
// also after slim; what another one has written over it is not.
func TestManagedFields(t *testing.T) {
	term, client, _ := testTerm(t)
	api := client.CoreV1().Services("default")
	s := must.Get(api.Create(t.Context(), wanting("web", same), meta.CreateOptions{FieldManager: "user"}))(t)
	s = must.Get(term.write(t.Context(), s, true, []string{"203.0.113.1"}, nil))(t)
	for range 2 {
		if got := fmt.Sprint(managers(s, addressField), managers(s, finalizerField)); got != "[steelyard] [steelyard]" {
			t.Errorf("written by %s: %+v", got, s.ManagedFields)
		}
		if !wroteStatus(s) || !hasOurFinalizer(s) {
			t.Errorf("not recognised: %+v", s.ManagedFields)
		}
		must.Get(slim(s))(t)
	}
	s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
	s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: "192.0.2.1"}}
	s.Finalizers = slices.DeleteFunc(s.Finalizers, func(string) bool { return true })
	s = must.Get(api.UpdateStatus(t.Context(), s, meta.UpdateOptions{FieldManager: "other"}))(t)
	if got := fmt.Sprint(managers(s, addressField), wroteStatus(s), hasOurFinalizer(s)); got != "[other] false false" {
		t.Errorf("overwritten: %s: %+v", got, s.ManagedFields)
	}
}
