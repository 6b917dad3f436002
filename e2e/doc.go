// Package e2e tests the program as it is built, end to end: "steelyard run" in network namespaces (e2e/lab), with BIRD
// or FRR as router, real clients, a real Kubernetes control plane, and injected failures.
//
// Two fixtures: a site (site_test.go) is a router, standalone balancers and servers; a cluster (cluster_test.go) is a
// site whose balancers are Kubernetes nodes. A scenario that stops a part of its fixture waits at its end until that
// part works again, because the next scenario uses the same fixture.
package e2e
