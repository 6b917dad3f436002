package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

const allocatorTOML = `
[kubernetes]
kubeconfig = %q
[[pool]]
name = "public"
addresses = ["203.0.113.0/24", "2001:db8:1::/64"]
`

// TestAllocators covers what assigns addresses beside a real API server, with the objects of the manifest.
func TestAllocators(t *testing.T) {
	c := startCluster(t, 1, "nat")
	c.install(t, "")
	c.startAllocator(t, "allocator", fmt.Sprintf(allocatorTOML, kube.KubeconfigPath))
	for _, scenario := range []struct {
		name string
		run  func(t *testing.T, c *cluster)
	}{
		{"metadata of Services", forgedMetadata},
	} {
		t.Run(scenario.name, func(t *testing.T) { scenario.run(t, c) })
	}
}

// apiOf returns a client with the rights of a ServiceAccount of the manifest.
func (c *cluster) apiOf(t *testing.T, account string) kubernetes.Interface {
	t.Helper()
	o, err := clientcmd.RESTConfigFromKubeConfig([]byte(c.kubeconfigOf(t, account)))
	if err != nil {
		t.Fatal(err)
	}
	o.Dial = c.control.Dial
	api, err := kubernetes.NewForConfig(o)
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// forgedMetadata: the token of what assigns addresses changes nothing of a Service but its status and our finalizer.
func forgedMetadata(t *testing.T, c *cluster) {
	c.createService(t, "forged", func(s *core.Service) {
		s.Labels, s.Annotations = map[string]string{"app": "web"}, map[string]string{"example.com/a": "b"}
		s.Finalizers = []string{"example.com/hold"}
	})
	c.waitAddresses(t, "forged")
	const ours = "service.kubernetes.io/load-balancer-cleanup"
	patch := func(api kubernetes.Interface, kind types.PatchType, text string, dry ...string) error {
		_, err := api.CoreV1().Services("default").Patch(t.Context(), "forged", kind, []byte(text),
			meta.PatchOptions{DryRun: dry}, "status")
		return err
	}
	const label = `{"metadata":{"labels":{"service.kubernetes.io/service-proxy-name":"x"}}}`
	merge, token := types.MergePatchType, c.apiOf(t, "steelyard-allocator")
	labtest.Until(t, 20*time.Second, "the policy is in force", func() error {
		if err := patch(token, merge, label, meta.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Errorf("error %v; want forbidden", err)
		}
		return nil
	})
	before, err := c.api.CoreV1().Services("default").Get(t.Context(), "forged", meta.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		kind types.PatchType
		text string
		what string // in the error
	}{
		"label":           {merge, label, "labels"},
		"label removed":   {merge, `{"metadata":{"labels":null}}`, "labels"},
		"annotation":      {merge, `{"metadata":{"annotations":{"steelyard.dev/pool":"x"}}}`, "annotations"},
		"its annotations": {merge, `{"metadata":{"annotations":{"example.com/a":"c"}}}`, "annotations"},
		"owner": {merge, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"x","uid":"y"}]}}`,
			"owners"},
		"finalizer": {merge, `{"metadata":{"finalizers":["example.com/hold","a/b","` + ours + `"]}}`,
			"finalizers"},
		"finalizer removed": {merge, `{"metadata":{"finalizers":["` + ours + `"]}}`, "finalizers"},
		"no finalizers":     {types.JSONPatchType, `[{"op":"remove","path":"/metadata/finalizers"}]`, "finalizers"},
		"with a status": {types.StrategicMergePatchType,
			`{"metadata":{"labels":{"a":"b"}},"status":{"loadBalancer":{}}}`, "labels"},
	} {
		err := patch(token, tt.kind, tt.text)
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tt.what) ||
			!strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'steelyard-allocator'") {
			t.Errorf("%s: error %v; want forbidden by the policy", name, err)
		}
	}
	after, err := c.api.CoreV1().Services("default").Get(t.Context(), "forged", meta.GetOptions{})
	if err != nil || after.ResourceVersion != before.ResourceVersion {
		t.Errorf("%v; the Service is %+v; want %+v", err, after.ObjectMeta, before.ObjectMeta)
	}
	for name, text := range map[string]string{
		"our finalizer": `{"metadata":{"finalizers":["example.com/hold"]}}`,
		"the status":    `{"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.200"}]}}}`,
	} {
		if err := patch(token, merge, text, meta.DryRunAll); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := patch(c.api, merge, label); err != nil { // others are not concerned
		t.Error(err)
	}
	// Assignment and release work beside the finalizer of somebody else.
	api := c.api.CoreV1().Services("default")
	if err := api.Delete(t.Context(), "forged", meta.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, 10*time.Second, "the addresses are released", func() error {
		s, err := api.Get(t.Context(), "forged", meta.GetOptions{})
		if err == nil && (len(s.Status.LoadBalancer.Ingress) > 0 || len(s.Finalizers) != 1) {
			err = fmt.Errorf("%v, %+v", s.Finalizers, s.Status)
		}
		return err
	})
	if _, err := api.Patch(t.Context(), "forged", merge, []byte(`{"metadata":{"finalizers":null}}`),
		meta.PatchOptions{}); err != nil {
		t.Error(err)
	}
}
