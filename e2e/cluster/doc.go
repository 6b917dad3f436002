// Package cluster tests the program on nodes of a real Kubernetes control plane, with kube-proxy and kubelets. It
// includes ten of Kubernetes' own tests of Services. "make test-kubernetes" runs the package.
//
// The fixture (cluster_test.go) has a router, and load balancers that are Kubernetes nodes. A scenario that stops part
// of the fixture waits at its end until that part works again, because the next scenario uses the same fixture.
package cluster
