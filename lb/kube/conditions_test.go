package kube

import (
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestExcludedNode(t *testing.T) {
	for value, want := range map[string]bool{"": true, "true": true, "yes": true, "false": false, "0": false} {
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Labels: map[string]string{labelExclude: value}}}
		if got := (&conditions{}).excluded(n) != ""; got != want {
			t.Errorf("label %q: excluded %t; want %t", value, got, want)
		}
	}
	// What Kubernetes itself leaves in service is excluded only when the configuration says so.
	status := func(ready core.ConditionStatus) []core.NodeCondition {
		pressure := core.NodeCondition{Type: core.NodeMemoryPressure, Status: core.ConditionTrue}
		return []core.NodeCondition{pressure, {Type: core.NodeReady, Status: ready}}
	}
	ready := core.NodeStatus{Conditions: status(core.ConditionTrue)}
	unknown := core.NodeStatus{Conditions: status(core.ConditionUnknown)}
	for _, tt := range []struct {
		o    Options
		node core.Node
		want string
	}{
		{Options{}, core.Node{Spec: core.NodeSpec{Unschedulable: true}}, ""},
		{Options{Unschedulable: true}, core.Node{Spec: core.NodeSpec{Unschedulable: true}}, "the node is cordoned"},
		{Options{Unschedulable: true}, core.Node{}, ""},
		{Options{NotReady: true}, core.Node{Status: ready}, ""},
		{Options{NotReady: true}, core.Node{Status: unknown}, "the node is not ready"},
		{Options{NotReady: true}, core.Node{}, "the node is not ready"},
	} {
		if got := (&conditions{o: tt.o}).excluded(&tt.node); got != tt.want {
			t.Errorf("%+v: excluded for %q; want %q", tt.node, got, tt.want)
		}
	}
}
