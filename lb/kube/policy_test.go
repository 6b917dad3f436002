package kube

import (
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

func TestPolicyIsExternalTrafficPolicy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   lb.Policy
	}{
		{"unset", func(s *core.Service) { s.Spec.ExternalTrafficPolicy = "" }, lb.PolicyCluster},
		{"Cluster", same, lb.PolicyCluster},
		{"Local", local, lb.PolicyLocal},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := viewOn(aService(tt.change), nil, topology{node: "n1"}, false).service.Policy; got != tt.want {
				t.Errorf("policy %q; want %q", got, tt.want)
			}
		})
	}
}
