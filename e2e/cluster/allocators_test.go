package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const allocatorTOML = `
[kubernetes]
kubeconfig = %q
[[pool]]
name = "public"
addresses = ["203.0.113.0/24", "2001:db8:1::/64"]
`

// otherKubeconfigPath is the kubeconfig of an allocator for another class.
const otherKubeconfigPath = kube.KubeconfigPath + "-other"

// TestAllocators covers the allocators outside the nodes' agents, with a real API server and the manifest's objects.
func TestAllocators(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 1, "nat")
	c.apply(t, "", "--l2", "--pool", "203.0.113.0/24", "--pool", "2001:db8:1::/64", "--pool", "198.18.1.0/28",
		"--pool", "2001:db8:52::/124", "--pool", "198.18.0.0/28", "--pool", "2001:db8:51::/124")
	c.allocators = []*lab.Process{c.startAllocator(t, "allocator", fmt.Sprintf(allocatorTOML, kube.KubeconfigPath))}
	for _, scenario := range []struct {
		name string
		run  func(t *testing.T, c *cluster)
	}{
		{"metadata of Services", forgedMetadata},
		{"two classes", twoClasses},
		{"a Service that shares an address changes", sharerChanges},
		{"a pool excludes a Service", poolExcludes},
	} {
		t.Run(scenario.name, func(t *testing.T) { scenario.run(t, c) })
	}
}

// apiOf returns a client with the rights of a ServiceAccount in the manifest.
func (c *cluster) apiOf(t *testing.T, account string) kubernetes.Interface {
	t.Helper()
	o := must.Get(clientcmd.RESTConfigFromKubeConfig([]byte(c.kubeconfigOf(t, account))))(t)
	o.Dial = c.control.Dial
	api := must.Get(kubernetes.NewForConfig(o))(t)
	return api
}

// forgedMetadata checks that the allocator's token can change only a Service's status and our finalizer.
func forgedMetadata(t *testing.T, c *cluster) {
	c.createService(t, "forged", func(s *core.Service) {
		s.Labels, s.Annotations = map[string]string{"app": "web"}, map[string]string{"example.com/a": "b"}
		s.Finalizers = []string{"example.com/hold"}
	})
	c.waitAddresses(t, "forged")
	out, err := c.Servers[0].Run(t.Context(), binary, "status", "--socket", "/run/steelyard-lab/allocator.sock")
	must.True(t, err == nil && strings.HasPrefix(out, "OK\n") && strings.Contains(out, "are assigned by allocator\n") &&
		strings.Contains(out, "ago: default/forged: assigned [203.0.113."), "%v\n%s", err, out)
	const ours = "service.kubernetes.io/load-balancer-cleanup"
	patch := func(api kubernetes.Interface, kind types.PatchType, text string, dry ...string) error {
		_, err := api.CoreV1().Services("default").Patch(t.Context(), "forged", kind, []byte(text),
			meta.PatchOptions{DryRun: dry}, "status")
		return err
	}
	const label = `{"metadata":{"labels":{"service.kubernetes.io/service-proxy-name":"x"}}}`
	merge, token := types.MergePatchType, c.apiOf(t, "steelyard-allocator")
	labtest.Until(t, "the policy is active", func() error {
		err := patch(token, merge, label, meta.DryRunAll)
		return labtest.ErrorIf(!apierrors.IsForbidden(err), "error %v; want forbidden", err)
	})
	before := must.Get(c.api.CoreV1().Services("default").Get(t.Context(), "forged", meta.GetOptions{}))(t)
	for name, tt := range map[string]struct {
		kind types.PatchType
		text string
		what string // what the error contains
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
		"an address outside the pools": {
			merge, `{"status":{"loadBalancer":{"ingress":[{"ip":"1.1.1.1"}]}}}`, "pools",
		},
		"a name": {merge, `{"status":{"loadBalancer":{"ingress":[{"hostname":"a.b"}]}}}`, "pools"},
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
	must.True(t, err == nil && after.ResourceVersion == before.ResourceVersion,
		"%v; the Service is %+v; want %+v", err, after.ObjectMeta, before.ObjectMeta)
	for name, text := range map[string]string{
		"our finalizer": `{"metadata":{"finalizers":["example.com/hold"]}}`,
		"the status":    `{"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.200"}]}}}`,
	} {
		err := patch(token, merge, text, meta.DryRunAll)
		must.True(t, err == nil, "%s: %v", name, err)
	}
	if err := patch(c.api, merge, label); err != nil { // others may do this
		t.Error(err)
	}
	// Assignment and release work despite a finalizer of another controller.
	api := c.api.CoreV1().Services("default")
	must.Do(t, api.Delete(t.Context(), "forged", meta.DeleteOptions{}))
	labtest.Until(t, "the addresses are released", func() error {
		s, err := api.Get(t.Context(), "forged", meta.GetOptions{})
		return errors.Join(err, labtest.ErrorIf(len(s.Status.LoadBalancer.Ingress) > 0 || len(s.Finalizers) != 1,
			"%v, %+v", s.Finalizers, s.Status))
	})
	if _, err := api.Patch(t.Context(), "forged", merge, []byte(`{"metadata":{"finalizers":null}}`),
		meta.PatchOptions{}); err != nil {
		t.Error(err)
	}
}

// twoClasses checks that of two allocators with different classes and accounts, each writes only Services of its own
// class, even while the other one is down.
func twoClasses(t *testing.T, c *cluster) {
	const account = "other-allocator"
	of := func(class string) func(*core.Service) {
		return func(s *core.Service) { s.Spec.LoadBalancerClass = &class }
	}
	config := fmt.Sprintf(otherClassTOML, otherKubeconfigPath, otherClass)
	c.addAccount(t, account, "steelyard-allocator")
	must.Do(t, c.Servers[0].WriteFile(otherKubeconfigPath, c.kubeconfigOf(t, account), 0o600))
	c.createService(t, "before", of(otherClass))
	c.createService(t, "third", of("example.com/third"))
	c.createService(t, "default", func(*core.Service) {})
	first := c.waitAddresses(t, "default")
	other := c.startAllocator(t, account, config)
	before := c.waitAddresses(t, "before")
	c.createService(t, "moves", of(otherClass))
	c.waitAddresses(t, "moves")
	for _, name := range []string{"default", "before"} {
		c.updateService(t, name, func(s *core.Service) { s.Spec.Ports[0].Port = 81 })
	}

	must.Do(t, other.Stop())
	c.updateService(t, "before", func(s *core.Service) { s.Spec.Ports[0].Port = 82 })
	c.updateService(t, "moves", func(s *core.Service) {
		s.Spec.Type, s.Spec.LoadBalancerClass = core.ServiceTypeClusterIP, nil
	})
	c.createService(t, "last", func(*core.Service) {}) // its address shows that previous changes were seen
	c.waitAddresses(t, "last")
	c.checkStatus(t, "moves", "steelyard:"+otherClass, 0, 1) // the API server has cleared the status
	c.startAllocator(t, account, config)
	c.waitHolder(t, "steelyard-example.com-other-a5f1e0", account)
	labtest.Until(t, "the addresses are taken back", func() error {
		s, err := c.api.CoreV1().Services("default").Get(t.Context(), "moves", meta.GetOptions{})
		return errors.Join(err, labtest.ErrorIf(len(s.Status.LoadBalancer.Ingress)+len(s.Finalizers) > 0,
			"%v, %+v", s.Finalizers, s.Status))
	})
	c.updateService(t, "moves", func(s *core.Service) { s.Spec.Type = core.ServiceTypeLoadBalancer })
	c.waitAddresses(t, "moves")

	c.checkStatus(t, "default", "steelyard", 2, 1)
	c.checkStatus(t, "last", "steelyard", 2, 1)
	c.checkStatus(t, "moves", "steelyard", 2, 1)
	c.checkStatus(t, "before", "steelyard:"+otherClass, 2, 1)
	c.checkStatus(t, "third", "", 0, 0)
	must.Row(t, "default has", first, c.waitAddresses(t, "default"))
	must.Row(t, "before has", before, c.waitAddresses(t, "before"))
	for _, name := range []string{"before", "default", "last", "moves"} {
		c.deleteService(t, name)
	}
	for account, want := range map[string][]string{
		account: {"before", "moves"}, "steelyard-allocator": {"default", "forged", "last", "moves"},
	} {
		got, err := c.control.Objects(account, "patch services/status")
		must.True(t, err == nil && slices.Equal(got, want), "%s patched %q, %v; want %q", account, got, err, want)
	}
}

// checkStatus fails the test unless a Service's status has this writer and these numbers of addresses and finalizers.
func (c *cluster) checkStatus(t *testing.T, name, writer string, addresses, finalizers int) {
	t.Helper()
	s := must.Get(c.api.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{}))(t)
	var writers []string
	for _, m := range s.ManagedFields {
		if m.Subresource == "status" {
			writers = append(writers, m.Manager)
		}
	}
	n := len(s.Status.LoadBalancer.Ingress)
	must.True(t, strings.Join(writers, " ") == writer && n == addresses && len(s.Finalizers) == finalizers,
		"%s: written by %q, %d addresses, finalizers %q", name, writers, n, s.Finalizers)
}

// sharerChanges covers an older Service that shares another one's address by key, and then requests its port while no
// allocator runs. The request is rejected, and the other Service is not written.
func sharerChanges(t *testing.T, c *cluster) {
	port := func(port int32) func(*core.Service) {
		return func(s *core.Service) { s.Spec.Ports = s.Spec.Ports[:1]; s.Spec.Ports[0].Port = port }
	}
	api := c.api.CoreV1().Services("default")
	c.createService(t, "guest", port(81))
	c.waitAddresses(t, "guest")
	time.Sleep(time.Second) // creation times are in whole seconds
	c.createService(t, "host", func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/share": "x"} })
	vips := c.waitAddresses(t, "host")
	has := func(name, reason string) {
		t.Helper()
		labtest.Until(t, fmt.Sprintf("%s has the address, %s", name, reason), func() error {
			s, err := api.Get(t.Context(), name, meta.GetOptions{})
			if err == nil && (len(s.Status.LoadBalancer.Ingress) != 2 ||
				s.Status.LoadBalancer.Ingress[0].IP != vips[0].String() ||
				reason != "" && !slices.ContainsFunc(s.Status.Conditions, func(c meta.Condition) bool {
					return c.Reason == reason && c.Status == meta.ConditionFalse
				})) {
				err = fmt.Errorf("%+v", s.Status)
			}
			return err
		})
	}
	c.updateService(t, "guest", func(s *core.Service) {
		s.Annotations = map[string]string{
			"steelyard.dev/share": "x", "steelyard.dev/addresses": fmt.Sprintf("%s,%s", vips[0], vips[1]),
		}
	})
	has("guest", "")
	before := must.Get(api.Get(t.Context(), "host", meta.GetOptions{}))(t)
	must.Do(t, c.allocators[0].Stop())
	c.updateService(t, "guest", func(s *core.Service) { port(80)(s); delete(s.Annotations, "steelyard.dev/addresses") })
	c.allocators[0] = c.startAllocator(t, "allocator", fmt.Sprintf(allocatorTOML, kube.KubeconfigPath))
	has("guest", "PortInUse")
	after, err := api.Get(t.Context(), "host", meta.GetOptions{})
	must.True(t, err == nil && after.ResourceVersion == before.ResourceVersion,
		"%v; the host is %+v; want %+v", err, after.Status, before.Status)
	c.deleteService(t, "guest")
	c.deleteService(t, "host")
}

// poolExcludes checks that a Service keeps its addresses when a reload makes the pool exclude it, and that an Event
// says so. If its status is cleared, it receives other addresses.
func poolExcludes(t *testing.T, c *cluster) {
	c.createService(t, "excluded", func(*core.Service) {})
	vips := c.waitAddresses(t, "excluded")
	config := fmt.Sprintf(allocatorTOML, kube.KubeconfigPath) + `namespaces = ["other"]
[[pool]]
name = "next"
addresses = ["198.18.1.0/28", "2001:db8:52::/124"]
`
	err := c.Servers[0].WriteFile("/run/steelyard-lab/allocator.toml", config, 0o600)
	if err == nil {
		err = c.allocators[0].Signal(syscall.SIGHUP)
	}
	must.Do(t, err)
	c.waitSaid(t, "excluded", "PoolExcludesService", vips[0].String())
	must.Row(t, "addresses", vips, c.waitAddresses(t, "excluded"))
	must.Get(c.api.CoreV1().Services("default").Patch(t.Context(), "excluded", types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":[]}}}`), meta.PatchOptions{}, "status"))(t)
	now := c.waitAddresses(t, "excluded")
	must.True(t, now[0].String() == "198.18.1.0", "addresses %v; want addresses of the next pool", now)
	c.deleteService(t, "excluded")
}
