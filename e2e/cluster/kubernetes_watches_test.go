package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// quietNodes checks that the API server sends no node the heartbeats of others, and that no node requests Leases.
func quietNodes(t *testing.T, c *cluster, _ ...*pod) {
	// kube-proxy and the agents watch only their own Node; the leading allocator watches all.
	labtest.Until(t, "one client watches all Nodes", func() error {
		n := c.watches(t, allNodes...) - c.ownWatches[0]
		return labtest.ErrorIf(n != 1, "%v watch all Nodes", n)
	})
	// The other allocator watches the leader's Lease.
	leases := c.watches(t, allLeases...) - c.ownWatches[1]
	must.True(t, leases <= 1, "%v watches of Leases; want one", leases)
	gets := func() float64 { return c.apiMetric(t, "apiserver_request_total", `resource="leases"`, `verb="GET"`) }
	before, start := gets(), time.Now()
	time.Sleep(10 * time.Second)
	rate := (gets() - before) / time.Since(start).Seconds()
	must.True(t, rate <= 1, "%.1f Leases are read a second", rate)
	// A new node appears in the table that all nodes read.
	api := c.api.CoreV1().Nodes()
	n, err := api.Create(t.Context(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: "new"}}, meta.CreateOptions{})
	must.Do(t, err)
	defer func() {
		must.Do(t, api.Delete(t.Context(), "new", meta.DeleteOptions{}))
	}()
	n.Status.Addresses = []core.NodeAddress{{Type: core.NodeInternalIP, Address: "192.0.2.250"}}
	must.Get(api.UpdateStatus(t.Context(), n, meta.UpdateOptions{}))(t)
	labtest.Until(t, "the table has the new node", func() error {
		list, err := c.api.CoreV1().ConfigMaps("steelyard").List(t.Context(), meta.ListOptions{
			LabelSelector: "steelyard.dev/node-table",
		})
		if err != nil {
			return err
		}
		for _, m := range list.Items {
			if m.Data["new"] == "192.0.2.250" {
				return nil
			}
		}
		return fmt.Errorf("none of %d ConfigMaps has the node", len(list.Items))
	})
}

// restartRequests checks that a restarting agent sends the API server no more requests than kube-proxy. It emits no
// Events about addresses that it announces again.
func restartRequests(t *testing.T, c *cluster, pods ...*pod) {
	const services = 15
	var vips []netip.Addr
	for i := range services {
		name := fmt.Sprintf("restart-%d", i)
		c.createService(t, name, func(*core.Service) {})
		t.Cleanup(func() { c.deleteService(t, name) })
		vips = append(vips, c.waitAddresses(t, name)...)
		c.setEndpoints(t, name, pods[0])
	}
	c.waitRouted(t, vips, 0, 1, 2)
	node, agent := c.Balancers[0], c.Agents[0]
	time.Sleep(eventsTime)
	requests := func(program string, restart func() error) (map[string]int, int) {
		t.Helper()
		start, sum := time.Now(), 0
		must.Do(t, restart())
		c.waitRouted(t, vips, 0, 1, 2)
		time.Sleep(eventsTime)
		all := must.Get(c.control.Requests(start, program, node.V4, node.V6))(t)
		for _, n := range all {
			sum += n
		}
		return all, sum
	}
	byAgent, ours := requests("steelyard", func() error {
		return errors.Join(agent.Terminate(t.Context(), 20*time.Second), agent.Start(),
			agent.WaitReady(t.Context(), lab.Ready))
	})
	byProxy, theirs := requests("kube-proxy", func() error {
		c.startProxy(t, node)
		return nil
	})
	t.Logf("agent: %d, %v; kube-proxy: %d, %v", ours, byAgent, theirs, byProxy)
	must.True(t, ours <= theirs && ours > 0 && byAgent["create events"] == 0,
		"the agent asks for %d, %v; kube-proxy for %d, %v", ours, byAgent, theirs, byProxy)
	c.waitRecovered(t, pods...)
}

// eventsTime exceeds the time for which an agent collects route changes before it emits Events.
const eventsTime = 5 * time.Second

// Labels of watches of all Nodes, and of any Leases.
var (
	allNodes  = []string{`resource="nodes"`, `scope="cluster"`}
	allLeases = []string{`resource="leases"`}
)

// watches returns the number of watches with these labels.
func (c *cluster) watches(t *testing.T, labels ...string) float64 {
	t.Helper()
	return c.apiMetric(t, "apiserver_longrunning_requests", append(labels, `verb="WATCH"`)...)
}

// apiMetric returns the sum of an API server metric's series that have these labels.
func (c *cluster) apiMetric(t *testing.T, name string, labels ...string) (sum float64) {
	t.Helper()
	text := must.Get(c.api.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context()))(t)
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		series, value, found := strings.Cut(lines.Text(), "} ")
		if !found || !strings.HasPrefix(series, name+"{") {
			continue
		}
		all := true
		for _, l := range labels {
			all = all && strings.Contains(series, l)
		}
		if v, err := strconv.ParseFloat(value, 64); err == nil && all {
			sum += v
		}
	}
	return sum
}

// routeEvents checks that a Service has Events from nodes that start or stop announcing its addresses, and from no
// others.
func routeEvents(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "events", local, []int{0}, pods[0])
	// There may be more Events than these, for example if a session is lost for a moment, but only from these nodes.
	events := func(nodes int, want []string) {
		t.Helper()
		labtest.Until(t, strings.Join(want, "; "), func() error {
			of := meta.ListOptions{FieldSelector: "involvedObject.kind=Service,involvedObject.name=events"}
			list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
			if err != nil {
				return err
			}
			var got []string
			for _, e := range list.Items {
				if e.Reason != "Announced" && e.Reason != "NotAnnounced" {
					continue
				}
				got = append(got, e.Type+" "+e.Message)
				for _, b := range c.Balancers[nodes:] {
					if e.Source.Host == b.Name() {
						return lab.Permanent(fmt.Errorf("%s has no endpoint: %s", b.Name(), e.Message))
					}
				}
			}
			for _, w := range want {
				if !slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, w) }) {
					return fmt.Errorf("events %q", got)
				}
			}
			return nil
		})
	}
	var want []string
	add := func(node int, text string, kind string) {
		for _, vip := range vips {
			want = append(want, fmt.Sprintf("%s %s %s from node %s", kind, vip, text, c.Balancers[node].Name()))
		}
	}
	add(0, "is announced", core.EventTypeNormal)
	events(1, want)
	c.setEndpoints(t, "events", pods[1])
	c.waitRouted(t, vips, 1)
	add(1, "is announced", core.EventTypeNormal)
	for _, vip := range vips {
		// The reason is the withdrawal's: the family whose slice changes first has no backend.
		want = append(want, fmt.Sprintf(" %s is no longer announced from node %s: ", vip, c.Balancers[0].Name()))
	}
	events(2, want)
}

const (
	otherClass     = "example.com/Other"
	otherClassTOML = `
[kubernetes]
kubeconfig = %q
load_balancer_class = %q
[[pool]]
name = "other"
addresses = ["198.18.0.0/28", "2001:db8:51::/124"]
`
)

// leaders checks that each class elects its own leader, and that a host service, which is in no pod, takes part in the
// same election as the pods.
func leaders(t *testing.T, c *cluster, pods ...*pod) {
	c.waitHolder(t, "steelyard", "allocator-")
	other := c.startAllocator(t, "other-class", fmt.Sprintf(otherClassTOML, kube.KubeconfigPath, otherClass))
	c.createService(t, "of-other-class", func(s *core.Service) {
		of := otherClass
		s.Spec.LoadBalancerClass = &of
	})
	vips := c.waitAddresses(t, "of-other-class") // while the other leader holds its Lease
	pool := netip.MustParsePrefix("198.18.0.0/28")
	must.True(t, pool.Contains(vips[0]), "addresses %v; want one of %s", vips, pool)
	c.createService(t, "of-no-class", func(*core.Service) {})
	c.waitAddresses(t, "of-no-class")

	// The last node is a host service and may assign addresses.
	host, node := c.Agents[2], c.Balancers[2]
	config := c.Config[2].TOML()
	c.addAccount(t, "host-service", "steelyard", "steelyard-allocator")
	c.restartAgent(t, 2, c.kubeconfigOf(t, "host-service"), strings.Replace(config, "allocate = false\n", "", 1))
	labtest.Until(t, "the host service knows the leader of the pods", func() error {
		out, err := host.CLI(t.Context(), "status")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "addresses are assigned by allocator-"),
			"%s", out))
	})
	for _, p := range c.allocators {
		must.Do(t, p.Stop())
	}
	c.waitHolder(t, "steelyard", node.Name())
	c.deleteService(t, "of-no-class") // by the host service
	c.deleteService(t, "of-other-class")

	leases := must.Get(c.api.CoordinationV1().Leases("").List(t.Context(), meta.ListOptions{}))(t)
	var names []string
	for _, l := range leases.Items {
		if strings.HasPrefix(l.Name, "steelyard") {
			names = append(names, l.Namespace+"/"+l.Name)
		}
	}
	want := []string{"steelyard/steelyard", "steelyard/steelyard-addresses",
		"steelyard/steelyard-example.com-other-a5f1e0", "steelyard/steelyard-example.com-other-a5f1e0-addresses"}
	slices.Sort(names)
	must.Row(t, "Leases", want, names)

	must.Do(t, other.Stop())
	c.restartAgent(t, 2, c.kubeconfigOf(t, "steelyard"), config)
	c.startAllocators(t)
	c.waitHolder(t, "steelyard", "allocator-")
	c.waitRecovered(t, pods...)
}

// waitHolder waits until a Lease's holder has this prefix.
func (c *cluster) waitHolder(t *testing.T, name, prefix string) {
	t.Helper()
	labtest.Until(t, prefix+" has the Lease "+name, func() error {
		l, err := c.api.CoordinationV1().Leases("steelyard").Get(t.Context(), name, meta.GetOptions{})
		if err == nil && (l.Spec.HolderIdentity == nil || !strings.HasPrefix(*l.Spec.HolderIdentity, prefix)) {
			err = fmt.Errorf("%+v", l.Spec)
		}
		return err
	})
}

// restartAgent restarts a node's agent with another kubeconfig and configuration.
func (c *cluster) restartAgent(t *testing.T, node int, kubeconfig, config string) {
	t.Helper()
	a := c.Agents[node]
	err := errors.Join(a.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600), a.Terminate(t.Context(), 20*time.Second),
		a.Configure(config), a.Start(), a.WaitReady(t.Context(), lab.Ready))
	must.Do(t, err)
}

// addAccount creates a ServiceAccount with the rights of several accounts in the manifest. A host service needs both
// accounts' rights.
func (c *cluster) addAccount(t *testing.T, name string, of ...string) {
	t.Helper()
	const ns = "steelyard"
	account := &core.ServiceAccount{ObjectMeta: meta.ObjectMeta{Name: name}}
	_, err := c.api.CoreV1().ServiceAccounts(ns).Create(t.Context(), account, meta.CreateOptions{})
	subjects := []rbac.Subject{{Kind: "ServiceAccount", Name: name, Namespace: ns}}
	api := c.api.RbacV1()
	for _, role := range of {
		of := rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: role}
		object := meta.ObjectMeta{Name: name + "-" + role}
		_, errCluster := api.ClusterRoleBindings().Create(t.Context(),
			&rbac.ClusterRoleBinding{ObjectMeta: object, RoleRef: of, Subjects: subjects}, meta.CreateOptions{})
		of.Kind = "Role"
		_, errRole := api.RoleBindings(ns).Create(t.Context(),
			&rbac.RoleBinding{ObjectMeta: object, RoleRef: of, Subjects: subjects}, meta.CreateOptions{})
		err = errors.Join(err, errCluster, errRole)
	}
	must.Do(t, err)
}

// TestKubernetes covers Kubernetes' guarantees for Services, on three nodes with kube-proxy beside the agent. Each
// scenario has its own Service. pods has one pod per node.
func TestKubernetes(t *testing.T) {
	c := newCluster(t, "tunnel", true)
	a, b, d := c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1), c.startPod(t, "pod-d", 2)
	for _, scenario := range []struct {
		name string
		run  func(t *testing.T, c *cluster, pods ...*pod)
	}{
		{"Events about routes", routeEvents},
		{"the rights of nodes, and of what assigns addresses", rights},
		{"what nodes watch", quietNodes},
		{"each class has a leader", leaders},
		{"what a restart asks the API server for", restartRequests},
		{"Local: announced where endpoints are, and pods see the client", localPolicy},
		{"Cluster: announced by every node, equal shares of the pods", clusterPolicy},
		{"the last endpoint is removed", lastEndpoint},
		{"terminating endpoints serve, and the route is withdrawn", terminatingEndpoints},
		{"the service proxy fails", proxyFails},
		{"the service proxies of all nodes fail", allProxiesFail},
		{"a node is excluded", excludedNode},
		{"source ranges", sourceRanges},
		{"replies follow the routing rules of the VIPs", sourceRules},
		{"forged tunnel packets", forgedTunnels},
		{"the tunnel keys are rotated", keysRotate},
		{"session affinity is changed", affinity},
		{"the algorithm of an annotation", algorithms},
		{"announced from nodes with endpoints", announceFrom},
		{"the port ranges of an annotation", portRanges},
		{"finalizer, type changes, deletion", typeChanges},
		{"without node ports", noNodePorts},
		{"Local: one family", oneFamily},
		{"UDP from one port moves to the new pod", udpMoves},
		{"one address, two Services with different pods", shared},
		{"labels of another service proxy", otherProxies},
		{"addresses that are not available", refusedAddresses},
		{"the policy is changed", policyChanged},
		{"one port for TCP and UDP, scaled to zero and back", onePortTwice},
		{"a named port with several numbers", namedPorts},
		{"from pods, and from a pod to itself", fromPods},
		{"recreated under its name", recreated},
		{"the same rules as kube-proxy", sameRules},
		{"taking over from kube-proxy, and giving back", takesOver},
		{"externalIPs", externalIPs},
		{"externalIPs with the address of another Service", stolenAddress},
		{"another controller writes the status", foreignStatus},
		{"pods on the host's network, and on a bridge", otherNetworks},
		{"packets of unknown connections", unknownConnections},
		{"the agent is killed under load", agentKilled},
		{"the API server is down under load", apiServerDown},
		{"a partition heals", partitionHeals},
		{"a node boots while the API server is down", coldBoot},
	} {
		if !t.Run(scenario.name, func(t *testing.T) { scenario.run(t, c, a, b, d) }) {
			c.recover(t, a, b, d)
		}
	}
}

var binary string // the program under test

func TestMain(m *testing.M) { os.Exit(labtest.Main(m, &binary)) }
