package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	authentication "k8s.io/api/authentication/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// cluster is a Kubernetes cluster with a real API server. Its nodes are hosts with an agent and kube-proxy; its pods
// are hosts behind these.
type cluster struct {
	*labtest.Site
	control *kube.ControlPlane
	// environment is the zero value if no pod has a network of its own.
	environment kube.Environment
	rest        *rest.Config
	api         kubernetes.Interface
	proxies     map[*lab.Host][]*lab.Process // each node's kube-proxy processes; only the last may run
	// allocators are the allocator processes, which run beside the API server.
	allocators []*lab.Process
	pods       map[string]*pod
	forward    string // kubernetes.forward
	// release has the files of a release, whose program prints the manifest. It is empty for the program under test.
	release string
	// ownWatches are the API server's own watches of allNodes and allLeases.
	ownWatches [2]float64
}

const (
	probeInterval, probeTimeout, probeFall = 200 * time.Millisecond, 150 * time.Millisecond, 2
	probeBound                             = probeFall*probeInterval + probeTimeout
)

const agentImage = "steelyard:test"

// newCluster creates a cluster of three nodes behind a router with ECMP. Nodes and the two allocators have the rights
// of their accounts in the manifest. If proxied, every node has kube-proxy; otherwise none has, and the last node's
// agent is configured as service proxy.
func newCluster(t *testing.T, forward string, proxied bool) *cluster {
	t.Helper()
	c := startCluster(t, 3, forward)
	c.install(t, "")
	kubeconfig := c.kubeconfigOf(t, "steelyard")
	for i, b := range c.Balancers {
		c.join(t, i)
		c.register(t, i)
		proxy := "auto"
		switch {
		case proxied:
			c.startProxy(t, b)
		case i == 2:
			proxy = "replace"
		}
		a := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN)
		a.Mode = "tc"
		if i < 2 { // as in a pod; the last one is a host service
			a.Env = []string{"POD_NAMESPACE=steelyard"}
		}
		a.Extra = fmt.Sprintf(clusterTOML, kube.KubeconfigPath, forward, proxy, probeInterval, probeTimeout, probeFall)
		must.Do(t, b.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600))
		c.Config = append(c.Config, a)
		if i == 0 {
			c.ownWatches = [2]float64{c.watches(t, allNodes...), c.watches(t, allLeases...)}
			c.startAllocators(t)
		}
		c.Agents = append(c.Agents, labtest.Agent(t, b.Host, binary, a))
	}
	return c
}

// startCluster creates a cluster's hosts, control plane and router.
func startCluster(t *testing.T, nodes int, forward string) *cluster {
	t.Helper()
	topology := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: nodes, Servers: 1})
	c := &cluster{Site: &labtest.Site{Topology: topology}, proxies: map[*lab.Host][]*lab.Process{},
		pods: map[string]*pod{}, forward: forward}
	dir := must.Get(filepath.Abs("../../.cache/controlplane"))(t)
	control := c.Servers[0]
	c.control = labtest.ControlPlane(t, control.Host, control.V4, dir)
	c.connect(t)
	c.Daemon = labtest.Router(t, c.Topology.Router, peers.BIRD, c.RouterConfig())
	return c
}

const clusterTOML = `
[kubernetes]
allocate = false
kubeconfig = %q
forward = %q
proxy = %q
external_ips = "any"
[probe]
interval = %q
timeout = %q
fall = %d
[[pool]]
name = "public"
addresses = ["203.0.113.0/24", "2001:db8:1::/64"]
external_ips = true
`

// connect connects this process to the API server as a client.
func (c *cluster) connect(t *testing.T) {
	t.Helper()
	c.rest = must.Get(clientcmd.RESTConfigFromKubeConfig([]byte(c.control.Kubeconfig())))(t)
	c.rest.Dial = c.control.Dial
	c.rest.QPS, c.rest.Burst = 1000, 1000
	c.api = must.Get(kubernetes.NewForConfig(c.rest))(t)
}

// install applies the manifest, first as a server-side dry run. config goes into its ConfigMap.
func (c *cluster) install(t *testing.T, config string) {
	t.Helper()
	c.apply(t, config)
}

// apply is "steelyard manifest | kubectl apply" with additional arguments.
func (c *cluster) apply(t *testing.T, config string, args ...string) {
	t.Helper()
	c.eachObject(t, args, func(api dynamic.ResourceInterface, o *unstructured.Unstructured) {
		if config != "" && o.GetKind() == "ConfigMap" && o.GetName() == "steelyard" {
			o.Object["data"] = map[string]any{"steelyard.toml": config}
		}
		if o.GetKind() == "Deployment" { // the nodes have no pod network
			must.Do(t, unstructured.SetNestedField(o.Object, true, "spec", "template", "spec", "hostNetwork"))
		}
		for _, dry := range [][]string{{meta.DryRunAll}, nil} {
			options := meta.ApplyOptions{FieldManager: "test", DryRun: dry}
			if _, err := api.Apply(t.Context(), o.GetName(), o, options); err != nil {
				t.Fatalf("%s %s, dry run %v: %v", o.GetKind(), o.GetName(), dry, err)
			}
		}
	})
}

// eachObject calls f for each object of "steelyard manifest" with these arguments. A release's names its own image.
func (c *cluster) eachObject(
	t *testing.T, args []string, f func(dynamic.ResourceInterface, *unstructured.Unstructured),
) {
	t.Helper()
	program, args := binary, append([]string{"manifest", "--image", agentImage}, args...)
	if c.release != "" {
		program, args = releaseFile(t, c.release, "linux-"+runtime.GOARCH), slices.Delete(args, 1, 3)
	}
	manifest, err := exec.Command(program, args...).Output()
	must.Do(t, err)
	client := must.Get(dynamic.NewForConfig(c.rest))(t)
	groups := must.Get(restmapper.GetAPIGroupResources(c.api.Discovery()))(t)
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	for doc := range strings.SplitSeq(string(manifest), "\n---\n") {
		var o unstructured.Unstructured
		err := yaml.Unmarshal([]byte(doc), &o.Object)
		must.Need(t, err == nil, "%v in\n%s", err, doc)
		gvk := o.GroupVersionKind()
		m := must.Get(mapper.RESTMapping(gvk.GroupKind(), gvk.Version))(t)
		var api dynamic.ResourceInterface = client.Resource(m.Resource)
		if ns := o.GetNamespace(); ns != "" {
			api = client.Resource(m.Resource).Namespace(ns)
		}
		f(api, &o)
	}
}

// kubeconfigOf returns a kubeconfig with the rights of a ServiceAccount in the manifest.
func (c *cluster) kubeconfigOf(t *testing.T, account string) string {
	t.Helper()
	accounts := c.api.CoreV1().ServiceAccounts("steelyard")
	token, err := accounts.CreateToken(t.Context(), account, &authentication.TokenRequest{}, meta.CreateOptions{})
	must.Do(t, err)
	return c.control.KubeconfigFor(token.Status.Token)
}

// startAllocators starts two allocators beside the API server, with a node's configuration.
func (c *cluster) startAllocators(t *testing.T) {
	t.Helper()
	c.allocators = nil
	for i := range 2 {
		c.allocators = append(c.allocators, c.startAllocator(t, fmt.Sprintf("allocator-%d", i), c.Config[0].TOML()))
	}
}

// startAllocator starts an allocator beside the API server, with its rights in the manifest.
func (c *cluster) startAllocator(t *testing.T, name, config string) *lab.Process {
	t.Helper()
	h, file, socket := c.Servers[0].Host, "/run/steelyard-lab/"+name+".toml", "/run/steelyard-lab/"+name+".sock"
	must.Do(t, errors.Join(h.WriteFile(kube.KubeconfigPath, c.kubeconfigOf(t, "steelyard-allocator"), 0o600),
		h.WriteFile(file, config, 0o600)))
	p := must.Get(h.Start(lab.Command{
		Path: binary, Args: []string{"allocate", "-c", file},
		Env: []string{"POD_NAMESPACE=steelyard", "POD_NAME=" + name, "STEELYARD_SOCKET=" + socket},
	}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, p.Log.Tail(40))
		}
	})
	return p
}

// join prepares a host as a node: it enables forwarding and, where flannel does not, adds routes to the pods of the
// other nodes.
func (c *cluster) join(t *testing.T, i int) {
	t.Helper()
	n := c.Balancers[i]
	must.Do(t, n.Forward())
	for k, other := range c.Balancers {
		if k == i || c.environment.CNI == kube.Flannel {
			continue
		}
		v4, v6 := podPrefixes(k)
		must.Do(t, errors.Join(n.AddRoute(v4, other.V4), n.AddRoute(v6, other.V6)))
	}
}

// register creates a host's Node object, as its kubelet would.
func (c *cluster) register(t *testing.T, i int) {
	t.Helper()
	n := c.Balancers[i]
	api := c.api.CoreV1().Nodes()
	node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: n.Name()}}
	must.Get(api.Create(t.Context(), node, meta.CreateOptions{}))(t)
	node = must.Get(api.Get(t.Context(), n.Name(), meta.GetOptions{}))(t)
	for _, a := range n.At(0) {
		address := core.NodeAddress{Type: core.NodeInternalIP, Address: a.Addr().String()}
		node.Status.Addresses = append(node.Status.Addresses, address)
	}
	must.Get(api.UpdateStatus(t.Context(), node, meta.UpdateOptions{}))(t)
}

// startProxy starts kube-proxy on a node and replaces the one that ran there.
func (c *cluster) startProxy(t *testing.T, n lab.Node) {
	t.Helper()
	c.stopProxy(n)
	p := must.Get(c.control.StartKubeProxy(n.Host, cmp.Or(c.environment.Proxy, kube.NFTables)))(t)
	if c.proxies[n.Host] == nil {
		t.Cleanup(func() { c.showProxy(t, n) })
	}
	c.proxies[n.Host] = append(c.proxies[n.Host], p)
}

// stopProxy kills a node's kube-proxy, if it runs.
func (c *cluster) stopProxy(n lab.Node) {
	if all := c.proxies[n.Host]; len(all) > 0 {
		all[len(all)-1].Kill()
	}
}

// showProxy shows the logs of all kube-proxy processes that have run on a node, if the test has failed.
func (c *cluster) showProxy(t *testing.T, n lab.Node) {
	if !t.Failed() {
		return
	}
	for i, p := range c.proxies[n.Host] {
		t.Logf("log of kube-proxy %d on %s:\n%s", i+1, n.Name(), p.Log.Tail(20))
	}
}

// waitRouted waits until the router's next hops for these addresses are exactly these nodes, and returns how long it
// took.
func (c *cluster) waitRouted(t *testing.T, vips []netip.Addr, nodes ...int) time.Duration {
	t.Helper()
	var via []lab.Node
	for _, i := range nodes {
		via = append(via, c.Balancers[i])
	}
	start := time.Now()
	c.WaitRouted(t, vips, via...)
	return time.Since(start)
}

// checkClientAddress fails the test if a pod has received no request, or one whose source was not the client.
func (c *cluster) checkClientAddress(t *testing.T, pods ...*pod) {
	t.Helper()
	for _, p := range pods {
		clients := p.web.Clients()
		for from := range clients {
			must.True(t, slices.Contains([]netip.Addr{c.Clients[0].V4, c.Clients[0].V6}, from),
				"%s had a request from %s; want the client", p.name, from)
		}
		must.True(t, len(clients) > 0, "%s had no request", p.name)
	}
}

func local(s *core.Service) {
	s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
}
