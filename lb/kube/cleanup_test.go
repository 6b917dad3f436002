package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Cleanup removes what is ours and leaves the rest, and does nothing while somebody assigns addresses.
func TestCleanup(t *testing.T) {
	finalized := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { s.Finalizers = []string{finalizer}; more(s) }
	}
	others := func(s *core.Service) {
		s.Finalizers = []string{finalizer}
		foreign("192.0.2.1")(s)
		s.ManagedFields = s.ManagedFields[:1] // the finalizer is from nobody
	}
	restored := func(s *core.Service) {
		others(s)
		s.ManagedFields[0].Manager = fieldManager
	}
	client := fake.NewClientset()
	for _, s := range []*core.Service{
		wanting("ours", finalized(given("203.0.113.1"))), wanting("others", others), wanting("none", same),
		wanting("adopted", finalized(foreign("203.0.113.2"))), wanting("restored", restored),
	} {
		must.Do(t, client.Tracker().Add(s))
	}
	lease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: leaseName}}
	lease.Spec.HolderIdentity, lease.Spec.RenewTime = ptr("n1"), &meta.MicroTime{Time: time.Now()}
	foreignLease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Namespace: "steelyard", Name: "other"}}
	for _, l := range []*coordination.Lease{lease, foreignLease} {
		must.Do(t, client.Tracker().Add(l))
	}
	var done []string
	namespace := "typo" // whose Leases nobody renews, as there are none
	run := func() error {
		return Cleanup(t.Context(), client, namespace, func(what string) { done = append(done, what) })
	}
	for _, namespace = range []string{"typo", "steelyard"} {
		err := run()
		if err == nil || !strings.Contains(err.Error(), "n1 assigns addresses") || len(done) > 0 {
			t.Errorf("while an agent leads, namespace %s: %v, %v", namespace, err, done)
		}
	}
	lease.Spec.RenewTime.Time = time.Now().Add(-time.Hour)
	leases := client.CoordinationV1().Leases("steelyard")
	must.Get(leases.Update(t.Context(), lease, meta.UpdateOptions{}))(t)
	must.Do(t, run())
	want := []string{"Service default/adopted", "Service default/ours", "Service default/restored",
		"Lease steelyard/steelyard"}
	if !slices.Equal(done, want) {
		t.Errorf("cleaned up %v; want %v", done, want)
	}
	for name, want := range map[string]string{
		"ours": "[] []", "adopted": "[203.0.113.2] []", "others": "[192.0.2.1] [" + finalizer + "]", "none": "[] []",
		"restored": "[] []",
	} {
		s := must.Get(client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
		if got := fmt.Sprint(statusAddresses(s), s.Finalizers); got != want {
			t.Errorf("%s has %s; want %s", name, got, want)
		}
	}
}
