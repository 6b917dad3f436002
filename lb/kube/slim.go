package kube

import (
	"slices"
	"strings"
	"unique"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// slim reduces an object to the fields that are read, before an informer stores it. It is idempotent.
func slim(x any) (any, error) {
	switch o := x.(type) {
	case *core.Service:
		managed, created := slimManaged(o.ManagedFields), o.CreationTimestamp
		o.ObjectMeta = slimMeta(o.ObjectMeta)
		o.ManagedFields, o.CreationTimestamp = managed, created
		o.Spec.Selector = nil
	case *core.Node:
		slimNode(o)
	case *discovery.EndpointSlice:
		return slimSlice(o), nil
	case *core.ConfigMap:
		o.ObjectMeta = slimMeta(o.ObjectMeta)
	}
	return x, nil
}

// slimMeta drops what neither the rules nor requests about an object use. Events refer to an object by UID and version.
func slimMeta(m meta.ObjectMeta) meta.ObjectMeta {
	slim := meta.ObjectMeta{
		Name: m.Name, Namespace: intern(m.Namespace), UID: m.UID, ResourceVersion: m.ResourceVersion,
		DeletionTimestamp: m.DeletionTimestamp, Labels: m.Labels, Finalizers: m.Finalizers,
	}
	for name, value := range m.Annotations {
		known := slices.ContainsFunc(annotations, func(all []string) bool { return slices.Contains(all, name) })
		if !known && !strings.HasPrefix(name, ourPrefix) {
			continue
		}
		if slim.Annotations == nil {
			slim.Annotations = map[string]string{}
		}
		slim.Annotations[name] = value
	}
	return slim
}

func slimNode(n *core.Node) {
	labels := map[string]string{}
	for _, name := range []string{core.LabelTopologyZone, labelExclude} {
		if value, ok := n.Labels[name]; ok {
			labels[name] = value
		}
	}
	n.ObjectMeta = slimMeta(n.ObjectMeta)
	n.Labels = labels
	n.Spec = core.NodeSpec{Unschedulable: n.Spec.Unschedulable, Taints: slices.DeleteFunc(n.Spec.Taints,
		func(t core.Taint) bool { return t.Key != taintAutoscaler })}
	n.Status = core.NodeStatus{
		Addresses: slices.DeleteFunc(n.Status.Addresses,
			func(a core.NodeAddress) bool { return a.Type != core.NodeInternalIP && a.Type != core.NodeExternalIP }),
		Conditions: slices.DeleteFunc(n.Status.Conditions,
			func(c core.NodeCondition) bool { return c.Type != core.NodeReady }),
	}
}

// slimOwn is slim for this node's Node, but keeps all labels.
func slimOwn(x any) (any, error) {
	n, ok := x.(*core.Node)
	if !ok {
		return slim(x)
	}
	labels := n.Labels
	slimNode(n)
	n.Labels = labels
	return n, nil
}

// intern returns a string equal to s that all equal strings share.
func intern(s string) string { return unique.Make(s).Value() }

// sameVersion reports whether an object has not changed, like most after an interrupted watch.
func sameVersion(old, now any) bool {
	v := now.(meta.Object).GetResourceVersion()
	return v != "" && v == old.(meta.Object).GetResourceVersion()
}
