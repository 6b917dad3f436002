// Package e2e tests the built program end to end: "steelyard run" in network namespaces (e2e/lab), with BIRD or FRR as
// router, real clients, and injected failures. Package cluster has the Kubernetes tests.
//
// The fixture (site_test.go) has a router, standalone load balancers and servers. A scenario that stops part of the
// fixture waits at its end until that part works again, because the next scenario uses the same fixture.
package e2e
