// Package cluster tests the program on the nodes of a real Kubernetes control plane, with kube-proxy and kubelets. It
// includes ten of Kubernetes' own tests of Services. "make test-kubernetes" runs it.
//
// The fixture (cluster_test.go) has a router, and balancers that are Kubernetes nodes. A scenario that stops a part of
// it waits at its end until that part works again, because the next scenario uses the same fixture.
package cluster
