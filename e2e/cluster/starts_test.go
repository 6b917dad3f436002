package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestWrongStarts checks that whatever keeps a new cluster from serving is in an Event about the Service and, where an
// agent runs, makes its status not OK.
func TestWrongStarts(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 1, "nat")
	c.install(t, "")
	c.join(t, 0)
	c.register(t, 0)
	node := c.Balancers[0]
	must.Do(t, node.WriteFile(kube.KubeconfigPath, c.kubeconfigOf(t, "steelyard"), 0o600))
	var agent *lab.Agent
	var allocator *lab.Process
	start := func(announces bool, pool string) {
		t.Helper()
		if agent != nil {
			must.Do(t, errors.Join(agent.Process().Stop(), allocator.Stop()))
		}
		a := lab.BGPAgent(node, labtest.ASN, labtest.RouterASN)
		if !announces {
			a.ASN = 0
		}
		a.Mode = "tc"
		a.Extra = fmt.Sprintf("[kubernetes]\nallocate = false\nforward = \"nat\"\nkubeconfig = %q\n%s",
			kube.KubeconfigPath, pool)
		agent = labtest.Agent(t, node.Host, binary, a)
		allocator = c.startAllocator(t, "allocator", a.TOML())
	}
	const pool = "[[pool]]\nname = \"public\"\naddresses = [\"203.0.113.0/24\", \"2001:db8:1::/64\"]\n"
	status := func(text string) {
		t.Helper()
		labtest.Until(t, "the status says: "+text, func() error {
			out, err := agent.CLI(t.Context(), "status", "--check")
			return labtest.ErrorIf(err == nil || !strings.Contains(out, text), "%v: %s", err, out)
		})
	}
	of := func(class string) func(*core.Service) {
		return func(s *core.Service) { s.Spec.LoadBalancerClass = &class }
	}

	start(true, "")
	c.createService(t, "no-pool", func(*core.Service) {})
	c.createService(t, "no-agent", of("example.com/nobody"))
	c.said(t, "no-pool", "Steelyard's configuration has no [[pool]]")
	c.said(t, "no-agent", `no Steelyard agent serves the class "example.com/nobody"`)
	status("Steelyard's configuration has no [[pool]]")
	status("example.com/nobody")

	start(false, pool)
	c.said(t, "no-pool", "neither [bgp] nor [l2]")
	status("neither [bgp] nor [l2]")

	start(true, pool)
	const label = `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`
	c.patchNode(t, 0, fmt.Sprintf(label, `""`))
	c.createService(t, "excluded", func(*core.Service) {})
	c.said(t, "excluded", "the only node has the label")
	status("the only node has the label")
	c.patchNode(t, 0, fmt.Sprintf(label, "null"))

	// No controller runs to count the pods. An agent without a bpffs does not become ready.
	sets := c.api.AppsV1().DaemonSets("steelyard")
	must.Get(sets.Patch(t.Context(), "steelyard", types.MergePatchType,
		[]byte(`{"status":{"desiredNumberScheduled":1,"currentNumberScheduled":1}}`), meta.PatchOptions{}, "status"))(t)
	c.said(t, "excluded", "none of the DaemonSet's 1 pods is ready")

	// k3s' ServiceLB writes node addresses.
	must.Get(c.api.CoreV1().Services("default").Patch(t.Context(), "excluded", types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.77"}]}}}`),
		meta.PatchOptions{FieldManager: "k3s"}, "status"))(t)
	c.said(t, "excluded", "k3s")
}

// said waits until an Event about a Service has this text.
func (c *cluster) said(t *testing.T, service, text string) {
	t.Helper()
	labtest.Within(t, 3*time.Minute, service+": an Event says: "+text, func() error {
		of := meta.ListOptions{FieldSelector: "involvedObject.name=" + service}
		list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
		if err != nil {
			return err
		}
		var all []string
		for _, e := range list.Items {
			all = append(all, e.Reason+": "+e.Message)
		}
		return labtest.ErrorIf(!strings.Contains(strings.Join(all, "\n"), text), "%q", all)
	})
}
