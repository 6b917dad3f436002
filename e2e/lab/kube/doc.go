// Package kube runs the Kubernetes programs of a lab: a control plane (etcd, kube-apiserver, controllers, scheduler),
// and kube-proxy or a kubelet with containerd on a node.
//
// The programs come from e2e/controlplane ("make controlplane" builds them); containerd and runc must be installed.
// Nodes and pods are hosts of the lab. All programs end with their host. A control plane keeps its state in the host's
// /run, which is in memory.
package kube
