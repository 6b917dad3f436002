package cluster

import (
	"testing"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// rights: who takes over a node can read Services and endpoints, and change none: neither their addresses nor anything
// else in the cluster. Who takes over what assigns addresses cannot change where a Service sends traffic.
func rights(t *testing.T, c *cluster, _ ...*pod) {
	c.createService(t, "rights", func(*core.Service) {})
	t.Cleanup(func() { c.deleteService(t, "rights") })
	c.waitAddresses(t, "rights")
	dry, merge := meta.PatchOptions{DryRun: []string{meta.DryRunAll}}, types.MergePatchType
	patchService := func(api kubernetes.Interface, sub ...string) error {
		_, err := api.CoreV1().Services("default").Patch(t.Context(), "rights", merge, []byte(`{}`), dry, sub...)
		return err
	}
	requests := []struct {
		name            string
		node, allocator bool // is permitted
		send            func(api kubernetes.Interface) error
	}{
		{"list Services", true, true, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Services("").List(t.Context(), meta.ListOptions{})
			return err
		}},
		{"patch the status of a Service", false, true, func(api kubernetes.Interface) error {
			return patchService(api, "status")
		}},
		{"patch a Service", false, false, func(api kubernetes.Interface) error { return patchService(api) }},
		{"patch a Node", false, false, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Nodes().Patch(t.Context(), c.Balancers[0].Name(), merge, []byte(`{}`), dry)
			return err
		}},
		{"read the keys of the tunnels", true, true, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
			return err
		}},
		{"change the keys of the tunnels", false, false, func(api kubernetes.Interface) error { // by update only
			secrets := api.CoreV1().Secrets("steelyard")
			_, err := secrets.Patch(t.Context(), "steelyard-tunnel-keys", merge, []byte(`{}`), dry)
			return err
		}},
		{"create a Secret", false, false, func(api kubernetes.Interface) error { // it could be another account's token
			secret := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: "token"}}
			_, err := api.CoreV1().Secrets("steelyard").Create(t.Context(), secret,
				meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"list Secrets", false, false, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Secrets("").List(t.Context(), meta.ListOptions{})
			return err
		}},
		{"change the configuration of the nodes", false, false, func(api kubernetes.Interface) error {
			m := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Name: "steelyard"}}
			_, err := api.CoreV1().ConfigMaps("steelyard").Update(t.Context(), m,
				meta.UpdateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"create a Lease", false, true, func(api kubernetes.Interface) error {
			_, err := api.CoordinationV1().Leases("steelyard").Create(t.Context(),
				&coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: "test"}},
				meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"patch an EndpointSlice", false, false, func(api kubernetes.Interface) error {
			_, err := api.DiscoveryV1().EndpointSlices("default").Patch(t.Context(), "x", merge, []byte(`{}`), dry)
			return err
		}},
	}
	for _, account := range []string{"steelyard", "steelyard-allocator"} {
		api := c.apiOf(t, account)
		for _, r := range requests {
			permitted := r.node
			if account == "steelyard-allocator" {
				permitted = r.allocator
			}
			switch err := r.send(api); {
			case permitted && err != nil:
				t.Errorf("%s: %s: %v", account, r.name, err)
			case !permitted && !apierrors.IsForbidden(err):
				t.Errorf("%s: %s: error %v; want forbidden", account, r.name, err)
			}
		}
	}
}
