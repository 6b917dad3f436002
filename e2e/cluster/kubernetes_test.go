package cluster

import (
	"os"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// TestKubernetes covers what Kubernetes guarantees for Services, on three nodes with kube-proxy beside the agent. Each
// scenario has a Service of its own; pods has one pod on each node.
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
		{"forged tunnel packets", forgedTunnels},
		{"the tunnel keys are rotated", keysRotate},
		{"session affinity is changed", affinity},
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
		{"externalIPs", externalIPs},
		{"externalIPs with the address of another Service", stolenAddress},
		{"another controller writes the status", foreignStatus},
		{"pods on the host's network, and on a bridge", otherNetworks},
		{"packets of unknown connections", unknownConnections},
		{"the agent is killed under load", agentKilled},
		{"the API server is down under load", apiServerDown},
		{"a node boots while the API server is down", coldBoot},
	} {
		if !t.Run(scenario.name, func(t *testing.T) { scenario.run(t, c, a, b, d) }) {
			c.recover(t, a, b, d)
		}
	}
}

var binary string // the program under test

func TestMain(m *testing.M) { os.Exit(labtest.Main(m, &binary)) }
