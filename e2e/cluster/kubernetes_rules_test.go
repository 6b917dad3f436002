package cluster

import (
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// sameRules compares what the agents would do for Services of all kinds with what kube-proxy does.
func sameRules(t *testing.T, c *cluster, pods ...*pod) {
	externalIPs, policyLocal := 0, core.ServiceInternalTrafficPolicyLocal
	kinds := map[string]func(*core.Service){
		"cluster": func(*core.Service) {}, "local": local,
		"inside":   func(s *core.Service) { s.Spec.InternalTrafficPolicy = &policyLocal },
		"affinity": func(s *core.Service) { s.Spec.SessionAffinity = core.ServiceAffinityClientIP },
		"nodeport": func(s *core.Service) { local(s); s.Spec.Type = core.ServiceTypeNodePort },
		"clusterip": func(s *core.Service) {
			externalIPs++
			s.Spec.Type = core.ServiceTypeClusterIP
			last := fmt.Sprint(externalIPs)
			s.Spec.ExternalIPs = []string{"198.51.100." + last, "2001:db8:77::" + last}
		},
	}
	leaves, unready := *pods[0], *pods[1]
	leaves.terminating, unready.ready = true, false
	for suffix, served := range map[string][]*pod{
		"none": nil, "one": pods[:1], "all": pods, "leaving": {&leaves}, "some": {&leaves, &unready, pods[2]},
	} {
		for kind, change := range kinds {
			name := kind + "-" + suffix
			c.createService(t, name, change)
			t.Cleanup(func() { c.deleteService(t, name) })
			c.setEndpoints(t, name, served...)
		}
	}
	for node := range c.Balancers {
		c.differs(t, node, "")
	}
	c.stopProxy(c.Balancers[0])
	defer c.startProxy(t, c.Balancers[0])
	c.setEndpoints(t, "clusterip-none", pods[0])
	s := must.Get(c.api.CoreV1().Services("default").Get(t.Context(), "clusterip-none", meta.GetOptions{}))(t)
	c.differs(t, 0, fmt.Sprintf("~ service default/clusterip-none:http: %s:80/tcp to %s:8080; kube-proxy: refused",
		s.Spec.ClusterIP, pods[0].v4))
}

// differs waits until "proxy diff" on a node prints this line or, with "", no difference.
func (c *cluster) differs(t *testing.T, node int, line string) {
	t.Helper()
	labtest.Until(t, "the difference from kube-proxy is "+line, func() error {
		out, err := c.Agents[node].CLI(t.Context(), "proxy", "diff")
		same := strings.TrimSpace(out) == "no difference"
		if err != nil || line == "" && same || line != "" && strings.Contains(out, line) {
			return err
		}
		return fmt.Errorf("it is\n%s", out)
	})
}
