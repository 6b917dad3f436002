// Package kube is the source of services that is a Kubernetes cluster.
//
// It watches Services of type LoadBalancer, their EndpointSlices and this node, and tells the engine what this node is to do
// for each: which endpoints get traffic that arrives here, and whether the addresses may be announced from here. What a
// Service means follows kube-proxy to the letter (translate.go, endpoints.go; sources are named there): users' expectations
// and upstream's tests were written against it.
//
// # What this node announces
//
// An address is held back (lb.Service.WithholdReason) for the first of these reasons: the node is excluded or going; the policy is Local
// and no ready endpoint is here; the health check node port of the Service, asked as an outside balancer would ask it, says no;
// the service proxy's health endpoint says no (gates.go). Terminating endpoints do not count for any of this and still get
// traffic, so nothing in flight is lost while the route goes.
//
// # Spread and deliver
//
// With tunnels a node only chooses a node (lb.NodeForwarding) and the chosen one delivers to a pod of its own. Under Cluster the
// choice follows from a table that is the same everywhere. Under Local a node chooses itself; but since a router chose before,
// and may choose again, it asks the others for connections that it does not know (lb.NodeForwarding.AnyNode); so it does where hints make
// nodes choose differently. When Services with
// different pods share an address, packets come to nodes without a pod of theirs, and go to one that has some whatever the
// policy says. Endpoints without a node, written by hand, are reached by nat instead.
//
// # Addresses
//
// One elected agent gives addresses (allocator.go); all agents serve what stands in the status of a Service, whoever wrote it.
//
// An outage of the API server changes nothing: informers keep what they know and the engine hears nothing.
package kube
