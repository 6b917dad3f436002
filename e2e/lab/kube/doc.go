// Package kube runs the Kubernetes programs of a lab: a control plane (etcd, kube-apiserver, controllers, scheduler),
// and kube-proxy or a kubelet with containerd on a node.
//
// The programs are those of e2e/controlplane, built by "make controlplane"; containerd and runc are the installed ones.
// Nodes and pods are hosts of the lab. All programs end with their host; a control plane keeps its state in the host's
// /run, which is in memory.
package kube
