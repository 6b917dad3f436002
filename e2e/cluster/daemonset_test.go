package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// daemonTOML is the configuration of all nodes, as documented.
const daemonTOML = `
[datapath]
mode = "tc"
[bgp]
asn = %d
peers = [{ address = %q, asn = %d, hold_time = "3s" }, { address = %q, asn = %d, hold_time = "3s" }]
[kubernetes]
allocate = false
[probe]
interval = "200ms"
timeout = "150ms"
[[pool]]
name = "public"
addresses = ["203.0.113.0/24", "2001:db8:1::/64"]
`

// daemonConfig returns daemonTOML with a node's peers.
func daemonConfig(gw lab.Node) string {
	return fmt.Sprintf(daemonTOML, labtest.ASN, gw.Gateway4, labtest.RouterASN, gw.Gateway6, labtest.RouterASN)
}

// TestDaemonSet runs the agent in the pods of a DaemonSet: a static binary in an image, run by real kubelets with the
// manifest's rights, from "kubectl apply" to a rollout under load. With STEELYARD_RELEASES, two directories separated
// by a colon, it uses only the files of these releases. The rollout is then the upgrade from the first to the second.
func TestDaemonSet(t *testing.T) {
	needRuntime(t)
	c := startCluster(t, 2, "tunnel")
	images, next := []kube.Image{agentsImage()}, ""
	if first, second, ok := strings.Cut(os.Getenv("STEELYARD_RELEASES"), ":"); ok {
		c.release, next, images = first, second, nil
		for _, dir := range []string{first, second} {
			images = append(images, kube.Image{Archive: releaseFile(t, dir, "image.tar")})
		}
	}
	must.Do(t, c.control.StartControllers(kube.ManifestControllers))
	for i, n := range c.Balancers {
		c.join(t, i)
		c.startProxy(t, n)
		kubelet := must.Get(c.control.StartKubelet(n, kube.Kubelet{Images: images}))(t)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of the kubelet on %s:\n%s\nlog of the agent:\n%s", n, kubelet.Log.Tail(40), c.daemonLog(n))
			}
		})
	}
	labtest.Until(t, "both nodes are ready", c.nodesReady)

	gw := c.Balancers[0]
	c.install(t, daemonConfig(gw))
	labtest.Until(t, "the DaemonSet is ready", c.daemonsReady(t))

	pods := []*pod{c.startPod(t, "pod-0", 0), c.startPod(t, "pod-1", 1)}
	byCluster := c.startService(t, "cluster", func(*core.Service) {}, []int{0, 1}, pods...)
	byLocal := c.startService(t, "local", local, []int{0, 1}, pods...)
	c.checkClientAddress(t, pods...)

	var conns []*traffic.Conns
	for _, vip := range slices.Concat(byCluster, byLocal) {
		conns = append(conns, labtest.Connect(t, c.Client(), netip.AddrPortFrom(vip, 9000), 75))
	}
	var streams []*traffic.Stream
	for _, vip := range []netip.Addr{byCluster[0], byLocal[1]} {
		streams = append(streams, c.Client().Stream(t.Context(), labtest.URL(vip), 10*time.Millisecond, 2*time.Second))
	}
	c.editConfiguration(t, daemonConfig(gw))
	if next != "" {
		c.upgrade(t, next, daemonConfig(gw))
	} else {
		c.rollout(t)
	}
	for _, x := range streams {
		x.Stop()
		r := x.Between(time.Time{}, time.Time{})
		must.True(t, r.Err() == nil && len(r.Servers) == 2, "during the rollout: %s, %v", r, r.Err())
	}
	for _, some := range conns {
		labtest.Exchange(t, some, "after the rollout")
	}
	c.waitRouted(t, slices.Concat(byCluster, byLocal), 0, 1)

	c.uninstall(t, slices.Concat(byCluster, byLocal))
}

// uninstall checks that the documented steps remove everything of ours from Services. A Service that was deleted while
// no agent could remove its finalizer is gone.
func (c *cluster) uninstall(t *testing.T, vips []netip.Addr) {
	t.Helper()
	c.eachObject(t, nil, func(api dynamic.ResourceInterface, o *unstructured.Unstructured) {
		if err := api.Delete(t.Context(), o.GetName(), meta.DeleteOptions{}); !apierrors.IsNotFound(err) {
			must.Do(t, err)
		}
	})
	c.waitRouted(t, vips)
	labtest.Until(t, "the namespace is gone", func() error {
		_, err := c.api.CoreV1().Namespaces().Get(t.Context(), "steelyard", meta.GetOptions{})
		return labtest.ErrorIf(!apierrors.IsNotFound(err), "%v%s", err, c.podStates(t))
	})
	must.Do(t, c.api.CoreV1().Services("default").Delete(t.Context(), "local", meta.DeleteOptions{}))
	c.apply(t, "", "--cleanup")
	labtest.Until(t, "the nodes are cleaned up", func() error {
		return c.daemonReady(t, "steelyard-cleanup")
	})
	for _, n := range c.Balancers {
		out, err := n.Run(t.Context(), "ls", "/sys/fs/bpf/steelyard")
		must.True(t, err != nil, "%s has pins yet: %s", n, out)
	}
	labtest.Until(t, "the cluster is cleaned up", func() error { // while no agent assigns addresses
		_, err := c.control.Run(t.Context(), binary, "cleanup", "--cluster", "--kubeconfig", kube.KubeconfigPath)
		return err
	})
	services := must.Get(c.api.CoreV1().Services("").List(t.Context(), meta.ListOptions{}))(t)
	for _, s := range services.Items {
		n := s.Status.LoadBalancer.Ingress
		must.True(t, len(n)+len(s.Finalizers) == 0, "%s has addresses %v, finalizers %q", s.Name, n, s.Finalizers)
	}
	leases, err := c.api.CoordinationV1().Leases("steelyard").List(t.Context(), meta.ListOptions{})
	must.True(t, err == nil && len(leases.Items) == 0, "%v; Leases are left: %+v", err, leases.Items)
	_, err = c.api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
	must.True(t, apierrors.IsNotFound(err), "the keys of the tunnels: %v; want that they are gone", err)
	of := func(s core.Service) bool { return s.Name == "local" }
	must.True(t, len(services.Items) >= 2 && !slices.ContainsFunc(services.Items, of),
		"%d Services; want the one of the test that was not deleted, and kubernetes", len(services.Items))
}

func agentsImage() kube.Image {
	return kube.Image{Names: []string{agentImage}, Programs: []string{binary}}
}

// nodesReady returns an error unless all nodes are ready.
func (c *cluster) nodesReady() error {
	list, err := c.api.CoreV1().Nodes().List(context.Background(), meta.ListOptions{})
	if err != nil {
		return err
	}
	ready := 0
	for _, n := range list.Items {
		for _, condition := range n.Status.Conditions {
			switch {
			case condition.Type != core.NodeReady:
			case condition.Status == core.ConditionTrue:
				ready++
			default:
				err = fmt.Errorf("%s: %s", n.Name, condition.Message)
			}
		}
	}
	return labtest.ErrorIf(ready != len(c.Balancers), "%d of %d nodes are ready: %v", ready, len(c.Balancers), err)
}

// daemonsReady returns a function that fails unless the DaemonSet's latest generation is available on every node, and
// the allocator's pods are ready.
func (c *cluster) daemonsReady(t *testing.T) func() error {
	return func() error {
		if err := c.daemonReady(t, "steelyard"); err != nil {
			return err
		}
		allocator, err := c.api.AppsV1().Deployments("steelyard").Get(t.Context(), "steelyard", meta.GetOptions{})
		if err != nil {
			return err
		}
		return labtest.ErrorIf(allocator.Status.AvailableReplicas != *allocator.Spec.Replicas,
			"%+v%s", allocator.Status, c.podStates(t))
	}
}

// daemonReady returns an error unless a DaemonSet's latest generation is available on every node.
func (c *cluster) daemonReady(t *testing.T, name string) error {
	d, err := c.api.AppsV1().DaemonSets("steelyard").Get(t.Context(), name, meta.GetOptions{})
	if err != nil {
		return err
	}
	s, want := d.Status, int32(len(c.Balancers))
	scheduled := s.DesiredNumberScheduled == want && s.UpdatedNumberScheduled == want
	return labtest.ErrorIf(s.ObservedGeneration != d.Generation || !scheduled || s.NumberAvailable != want,
		"%+v%s", s, c.podStates(t))
}

// podStates describes the phases and container states of the agent's pods.
func (c *cluster) podStates(t *testing.T) string {
	list, err := c.api.CoreV1().Pods("steelyard").List(t.Context(), meta.ListOptions{})
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, p := range list.Items {
		fmt.Fprintf(&b, "\n%s on %s: %s", p.Name, p.Spec.NodeName, p.Status.Phase)
		for _, s := range p.Status.ContainerStatuses {
			fmt.Fprintf(&b, " %+v", s.State)
		}
	}
	return b.String()
}

// rollout does the same as "kubectl rollout restart".
func (c *cluster) rollout(t *testing.T) {
	t.Helper()
	api := c.api.AppsV1().DaemonSets("steelyard")
	const annotate = `{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`
	patch := fmt.Sprintf(annotate, time.Now().Format(time.RFC3339))
	var d *apps.DaemonSet
	d, err := api.Patch(t.Context(), "steelyard", types.StrategicMergePatchType, []byte(patch), meta.PatchOptions{})
	must.Do(t, err)
	labtest.Until(t, fmt.Sprintf("generation %d is ready", d.Generation), c.daemonsReady(t))
}

// upgrade applies the manifest of another release, and waits until its pods run.
func (c *cluster) upgrade(t *testing.T, release, config string) {
	t.Helper()
	image := func() string {
		d := must.Get(c.api.AppsV1().DaemonSets("steelyard").Get(t.Context(), "steelyard", meta.GetOptions{}))(t)
		return d.Spec.Template.Spec.Containers[0].Image
	}
	before := image()
	c.release = release
	c.apply(t, config)
	must.True(t, image() != before, "both releases have the image %s", before)
	labtest.Until(t, "the new release is ready", c.daemonsReady(t))
}

// releaseFile returns the file of a release whose name ends like this.
func releaseFile(t *testing.T, dir, end string) string {
	t.Helper()
	files := must.Get(filepath.Glob(filepath.Join(dir, "steelyard-*-"+end)))(t)
	must.Need(t, len(files) == 1, "%d files in %s end with %s", len(files), dir, end)
	return files[0]
}

// daemonLog returns the last log lines of our containers on a node.
func (c *cluster) daemonLog(n lab.Node) string {
	out, err := n.Run(context.Background(), "sh", "-c", "tail -q -n 40 "+kube.PodLogs+"/*/*/*.log")
	if err != nil {
		return err.Error()
	}
	return out
}

// editConfiguration checks that editing the ConfigMap changes pools and probe settings without a restart. An invalid
// configuration changes nothing.
func (c *cluster) editConfiguration(t *testing.T, config string) {
	t.Helper()
	const lines = "[[pool]]\nname = \"other\"\nauto_assign = false\n" +
		"addresses = [\"198.51.100.0/28\", \"2001:db8:51::/124\"]\n"
	before := c.containers(t)
	pods := map[string]bool{} // an agent's has two containers
	for _, id := range before {
		pods[strings.Fields(id)[0]] = true
	}
	c.configure(t, strings.Replace(config, `interval = "200ms"`, `interval = "250ms"`, 1)+lines)
	c.waitEvent(t, "ConfigurationReloaded", "is active", len(pods))
	s := c.createService(t, "other-pool", func(s *core.Service) {
		s.Annotations = map[string]string{"steelyard.dev/pool": "other"}
	})
	vips := c.waitAddresses(t, s.Name)
	want := netip.MustParsePrefix("198.51.100.0/28")
	must.True(t, want.Contains(vips[0]), "addresses %v; want one of %s", vips, want)
	c.deleteService(t, s.Name)
	c.configure(t, strings.Replace(config, "[probe]", "[prob]", 1))
	c.waitEvent(t, "ConfigurationRejected", "prob: no such section", len(pods))
	c.configure(t, config)
	after := c.containers(t)
	must.True(t, slices.Equal(before, after), "containers %v; want those before, %v", after, before)
}

// configure changes the ConfigMap. An annotation makes the kubelets update the pods' files immediately.
func (c *cluster) configure(t *testing.T, config string) {
	t.Helper()
	maps, pods := c.api.CoreV1().ConfigMaps("steelyard"), c.api.CoreV1().Pods("steelyard")
	m, err := maps.Get(t.Context(), "steelyard", meta.GetOptions{})
	if err == nil {
		m.Data["steelyard.toml"] = config
		_, err = maps.Update(t.Context(), m, meta.UpdateOptions{})
	}
	list, errList := pods.List(t.Context(), meta.ListOptions{})
	for _, p := range list.Items {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"edited":%q}}}`, time.Now())
		_, errPatch := pods.Patch(t.Context(), p.Name, types.MergePatchType, []byte(patch), meta.PatchOptions{})
		err = errors.Join(err, errPatch)
	}
	must.Do(t, errors.Join(err, errList))
}

// containers returns the IDs of all our running containers.
func (c *cluster) containers(t *testing.T) (ids []string) {
	t.Helper()
	list := must.Get(c.api.CoreV1().Pods("steelyard").List(t.Context(), meta.ListOptions{}))(t)
	for _, p := range list.Items {
		for _, s := range p.Status.ContainerStatuses {
			ids = append(ids, fmt.Sprintf("%s %s", p.Name, s.ContainerID))
		}
	}
	slices.Sort(ids)
	return ids
}

// waitEvent waits until there are such Events about n pods.
func (c *cluster) waitEvent(t *testing.T, reason, text string, n int) {
	t.Helper()
	labtest.Within(t, 150*time.Second, fmt.Sprintf("%d pods have the Event %s", n, reason), func() error {
		of := meta.ListOptions{FieldSelector: "involvedObject.kind=Pod,reason=" + reason}
		list, err := c.api.CoreV1().Events("steelyard").List(t.Context(), of)
		if err != nil {
			return err
		}
		on := map[string]bool{}
		var all []string
		for _, e := range list.Items {
			on[e.InvolvedObject.Name] = on[e.InvolvedObject.Name] || strings.Contains(e.Message, text)
			all = append(all, e.InvolvedObject.Name+": "+e.Message)
		}
		for _, has := range on {
			if !has {
				return fmt.Errorf("events %q", all)
			}
		}
		return labtest.ErrorIf(len(on) < n, "events %q", all)
	})
}
