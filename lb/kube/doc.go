// Package kube is the service source for Kubernetes clusters.
//
// It watches Services, EndpointSlices and Nodes, and tells the engine what this node does for each Service: which
// endpoints receive the traffic that arrives here, and whether this node may announce the addresses. The rules are
// kube-proxy's (translate.go, endpoints.go; comments name the source files), because users and upstream's tests expect
// them.
//
// # What this node announces
//
// The addresses of a Service are withheld (lb.Service.WithholdReason) for the first of these reasons that applies
// (conditions.go):
//
//   - the node is excluded or about to be removed;
//   - externalTrafficPolicy is Local and no ready endpoint is on this node;
//   - the health check node port of the Service is not healthy, probed as an external load balancer probes it;
//   - the health endpoint of the service proxy is not healthy.
//
// Terminating endpoints do not count as ready but still receive traffic, so no flow breaks while the route is
// withdrawn.
//
// # Forwarding between nodes
//
// With tunnels, a node selects a node (lb.NodeForwarding), and the selected node delivers to one of its own pods.
//
//   - Under Cluster the selection follows from a table that is the same on all nodes.
//   - Under Local a node selects itself. The router has selected the node, and may select another one later, so a node
//     passes packets of unknown flows on to the others (lb.NodeForwarding.AnyNode). The same applies when topology
//     hints make the tables differ.
//   - With session affinity all nodes select the same node for a client, under either policy and without hints.
//   - When Services with different pods share an address, packets arrive at nodes without a pod of the Service. Those
//     nodes forward them to a node that has one, under either policy.
//
// Endpoints without a node, as in handwritten slices, are reached with NAT.
//
// # Addresses
//
// One elected agent assigns addresses (leader.go) by the rules of lb.Allocator; assign.go only translates. All agents
// serve the addresses in the status of a Service, whoever wrote them.
//
// # Tunnel keys
//
// A Secret holds the keys of the tunnels between nodes and the hash seed (tunnelkeys.go). Every agent creates it if
// there is none, follows it, and rotates the keys once a day. This needs no leader, because only one of several writers
// with the same resourceVersion succeeds. A cluster without allocation, which elects no leader, can therefore have
// keys.
//
// Three keys are accepted, and each daily rotation replaces the oldest, so agents need not rotate at the same time. The
// keys of a new Secret are not required for some minutes, until all agents have them.
//
// An outage of the API server changes nothing: the informers keep their caches, and the engine receives no update.
package kube
