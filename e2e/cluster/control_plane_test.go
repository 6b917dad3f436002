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
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The control plane's addresses: one by ARP, one by BGP.
var apiByARP, apiByBGP = netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("203.0.113.100")

// controlPlaneTOML is the configuration of each machine of a control plane for one of the addresses, before the first
// start of Kubernetes.
const controlPlaneTOML = `
[[pool]]
name = %[1]q
addresses = [%[2]q]
announce = [%[1]q]
auto_assign = false
[[service]]
name = "control-plane-%[1]s"
address = %[2]q
ports = ["6443"]
backends = [%[3]s]
check = { type = "https", path = "/readyz", interval = "200ms", timeout = "150ms", fall = 2 }
`

// clusterPoolTOML also makes the agents serve the cluster.
const clusterPoolTOML = `
[kubernetes]
kubeconfig = %q
[[pool]]
name = "public"
addresses = ["203.0.113.0/28", "2001:db8:1::/64"]
announce = ["bgp"]
`

// machines are load balancers that are also the control plane's API servers, and nodes with a kubelet. Only etcd is on
// another machine.
type machines struct {
	*cluster
	m        *labtest.Members
	kubelets map[*lab.Host]*lab.Process
}

// TestControlPlaneOnBalancers covers machines that balance the address of the control plane to their own API servers,
// by ARP and by BGP, without another tool. It measures time, so it runs alone.
func TestControlPlaneOnBalancers(t *testing.T) {
	needRuntime(t)
	c := newMachines(t)
	c.reachable(t)
	labtest.Until(t, "the kubelets have registered", c.nodesReady)
	t.Run("a power cut", c.losesPower)
	t.Run("the same file serves the cluster", c.servesCluster)
}

// newMachines starts the API servers, then the agents, then the kubelets, which reach the API server only at a VIP.
func newMachines(t *testing.T) *machines {
	t.Helper()
	topology := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: 3, Servers: 1})
	c := &machines{
		cluster:  &cluster{Site: &labtest.Site{Topology: topology}, pods: map[string]*pod{}},
		kubelets: map[*lab.Host]*lab.Process{},
	}
	c.m = &labtest.Members{Site: c.Site, VIPs: []netip.Addr{apiByARP}}
	dir := must.Get(filepath.Abs("../../.cache/controlplane"))(t)
	c.control = labtest.ControlPlane(t, c.Servers[0].Host, c.Servers[0].V4, dir)
	router := c.RouterConfig()
	for i := range router.Neighbors {
		router.Neighbors[i].BFD, router.Neighbors[i].BFDMultiplier = true, 5
	}
	c.Daemon = labtest.Router(t, c.Topology.Router, peers.BIRD, router)
	for _, b := range c.Balancers {
		must.Get(c.control.Join(t.Context(), b.Host, b.V4))(t)
		a := c.config(b)
		c.Config = append(c.Config, a)
		must.Do(t, b.WriteFile(a.L2SecretFile, "a secret of the members\n", 0o600))
		c.Agents = append(c.Agents, labtest.Agent(t, b.Host, binary, a))
	}
	c.settle(t)
	for _, b := range c.Balancers {
		k := kube.Kubelet{Kubeconfig: c.through(apiByARP), LeaseSeconds: 8}
		c.kubelets[b.Host] = must.Get(c.control.StartKubelet(b, k))(t)
	}
	c.connect(t) // to the API server beside etcd
	return c
}

// config returns the configuration of the agent on a machine.
func (c *machines) config(b lab.Node) lab.AgentConfig {
	a := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN)
	for i := range a.Peers {
		a.Peers[i].Extra = `bfd = { interval = "100ms", multiplier = 5 }`
	}
	a.L2, a.L2SecretFile = []string{"eth0"}, "/run/steelyard-lab/gossip.key"
	var backends []string
	for _, other := range c.Balancers {
		backends = append(backends, fmt.Sprintf("%q", other.V4))
		if other.Host != b.Host {
			a.L2Members = append(a.L2Members, other.V4)
		}
	}
	list := strings.Join(backends, ", ")
	for by, vip := range map[string]netip.Addr{"l2": apiByARP, "bgp": apiByBGP} {
		a.Extra += fmt.Sprintf(controlPlaneTOML, by, vip, list)
	}
	return a
}

// through returns the administrator's kubeconfig with one of the control plane's addresses.
func (c *machines) through(vip netip.Addr) string {
	return strings.ReplaceAll(c.control.Kubeconfig(), c.control.Address.String(), vip.String())
}

// settle waits until all agents announce, and returns the one that answers ARP requests.
func (c *machines) settle(t *testing.T) *lab.Agent {
	t.Helper()
	c.WaitRouted(t, []netip.Addr{apiByBGP}, c.Balancers...)
	return c.m.Settled(t, c.Agents...)[apiByARP]
}

// clients returns the hosts that reach the API server: a client and the machines that have power.
func (c *machines) clients() []*lab.Host {
	all := []*lab.Host{c.Clients[0].Host}
	for _, a := range c.Agents {
		if a.Process().Running() {
			all = append(all, a.Host)
		}
	}
	return all
}

// losesPower cuts the power of a machine that does not answer ARP requests, and of the one that does. The median of
// three cuts counts, because one of them may be slow on a busy machine. Without a slow one, the third is not needed.
func (c *machines) losesPower(t *testing.T) {
	const limit = 2500 * time.Millisecond
	fast := 0
	for n := range 3 {
		owner := c.settle(t)
		cut := owner
		if n == 0 {
			cut = c.m.Others(owner)[0]
		}
		if c.cutPower(t, cut) <= limit {
			fast++
		}
		if fast == 2 {
			return
		}
		c.restorePower(t, cut)
	}
	t.Errorf("in %d of 3 power cuts, the API server was away for more than %s", 3-fast, limit)
}

// cutPower cuts the power of a machine, and returns the longest time for which a client had no answer. The kubelets of
// the other machines renew their Leases.
func (c *machines) cutPower(t *testing.T, a *lab.Agent) (longest time.Duration) {
	t.Helper()
	var clients []*apiClient
	for _, h := range c.clients() {
		if h != a.Host {
			clients = append(clients, watchGaps(t, h, c.through(apiByARP)), watchGaps(t, h, c.through(apiByBGP)))
		}
	}
	time.Sleep(time.Second) // requests before the cut
	cut := time.Now()
	must.Do(t, a.PowerOff())
	time.Sleep(5 * time.Second)
	for _, x := range clients {
		gap, requests := x.stop()
		t.Logf("%s lost power: longest gap on %s %s, %d requests answered", a, x.host.Name(), gap, requests)
		longest = max(longest, gap)
	}
	leases := c.api.CoordinationV1().Leases(core.NamespaceNodeLease)
	for h, kubelet := range c.kubelets {
		if !kubelet.Running() {
			continue
		}
		labtest.Until(t, "the kubelet on "+h.Name()+" renews its Lease", func() error {
			l, err := leases.Get(t.Context(), h.Name(), meta.GetOptions{})
			if err != nil {
				return err
			}
			return labtest.ErrorIf(l.Spec.RenewTime.Time.Before(cut), "it did so at %s", l.Spec.RenewTime)
		})
	}
	return longest
}

// restorePower starts a machine again, except its kubelet.
func (c *machines) restorePower(t *testing.T, a *lab.Agent) {
	t.Helper()
	i := slices.Index(c.Agents, a)
	must.Do(t, errors.Join(a.PowerOn(), a.WriteFile(c.Config[i].L2SecretFile, "a secret of the members\n", 0o600)))
	must.Get(c.control.Join(t.Context(), a.Host, c.Balancers[i].V4))(t)
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
}

// servesCluster adds the cluster's Services to the configuration of the machines that have power.
func (c *machines) servesCluster(t *testing.T) {
	var pods []*pod
	var nodes []int
	for i, a := range c.Agents {
		if !a.Process().Running() {
			continue
		}
		text := c.Config[i].TOML() + fmt.Sprintf(clusterPoolTOML, kube.KubeconfigPath)
		b := c.Balancers[i]
		must.Do(t, errors.Join(b.WriteFile(kube.KubeconfigPath, c.through(apiByARP), 0o600), a.Configure(text),
			a.EndForRestart(t.Context(), 20*time.Second), a.Start()))
		p := &pod{Host: b.Host, name: b.Name(), node: i, v4: b.V4, v6: b.V6, ready: true} // on the host's network
		p.startServers(t)
		pods, nodes = append(pods, p), append(nodes, i)
	}
	home := &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: "steelyard"}}
	must.Get(c.api.CoreV1().Namespaces().Create(t.Context(), home, meta.CreateOptions{}))(t)
	vips := c.startService(t, "web", func(*core.Service) {}, nodes, pods...)
	for _, vip := range vips {
		labtest.CheckEven(t, c.allAnswered(t, vip, 200), len(pods))
	}
	c.reachable(t)
}

// reachable waits until each client has reached the API server at both addresses.
func (c *machines) reachable(t *testing.T) {
	t.Helper()
	for _, h := range c.clients() {
		for _, vip := range []netip.Addr{apiByARP, apiByBGP} {
			api := clientOn(t, h, c.through(vip))
			labtest.Until(t, fmt.Sprintf("the API server answers %s at %s", h.Name(), vip), func() error {
				_, err := api.Discovery().ServerVersion()
				return err
			})
		}
	}
}

// needRuntime skips the test if a kubelet cannot run here, or fails it with STEELYARD_CI set.
func needRuntime(t *testing.T) {
	t.Helper()
	if err := kube.RuntimeAvailable(); err != nil {
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
}

// clientOn returns a client of the API server whose connections begin on h.
func clientOn(t *testing.T, h *lab.Host, kubeconfig string) kubernetes.Interface {
	t.Helper()
	c := must.Get(clientcmd.RESTConfigFromKubeConfig([]byte(kubeconfig)))(t)
	c.Dial, c.QPS = h.Dial, -1
	return must.Get(kubernetes.NewForConfig(c))(t)
}

// apiClient sends requests to the API server from a host, one after the other over a kept connection, like a kubelet.
type apiClient struct {
	host *lab.Host
	stop func() (longest time.Duration, answered int)
}

// watchGaps starts an apiClient. stop returns the longest time between two answers.
func watchGaps(t *testing.T, h *lab.Host, kubeconfig string) *apiClient {
	api := clientOn(t, h, kubeconfig)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	var longest time.Duration
	answered, last := 0, time.Now()
	done.Go(func() {
		for ctx.Err() == nil {
			request, end := context.WithTimeout(ctx, time.Second)
			_, err := api.CoreV1().Namespaces().List(request, meta.ListOptions{})
			end()
			if err == nil {
				answered++
				longest, last = max(longest, time.Since(last)), time.Now()
			}
			time.Sleep(50 * time.Millisecond)
		}
		longest = max(longest, time.Since(last))
	})
	return &apiClient{h, func() (time.Duration, int) {
		cancel()
		done.Wait()
		return longest, answered
	}}
}
