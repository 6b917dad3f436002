// Package e2e tests the program as it is built, end to end: "steelyard run" in network namespaces (e2e/lab), with BIRD
// or FRR as router, real clients, and injected failures. Package cluster has the tests on Kubernetes.
//
// The fixture (site_test.go) is a router, standalone balancers and servers. A scenario that stops a part of it waits at
// its end until that part works again, because the next scenario uses the same fixture.
package e2e
