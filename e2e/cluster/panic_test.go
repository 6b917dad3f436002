package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// brokenService is the one of 200 Services that the agent of a node cannot handle.
const brokenService = "web-007"

// panicCluster has 200 Services. All packets enter by the last node, whose agent panics where a test says.
type panicCluster struct {
	*cluster
	agent *lab.Agent
	vips  map[string]netip.Addr
}

// TestPanicOfOneObject: a panic about one object of the cluster loses that object only, which is handled again after
// its next change; beside kube-proxy, and where the agent is the service proxy.
func TestPanicOfOneObject(t *testing.T) {
	t.Parallel()
	t.Run("beside kube-proxy", func(t *testing.T) { panicOfOneObject(t, true) })
	t.Run("replace", func(t *testing.T) { panicOfOneObject(t, false) })
}

func panicOfOneObject(t *testing.T, proxied bool) {
	c := &panicCluster{cluster: newCluster(t, "tunnel", proxied), vips: map[string]netip.Addr{}}
	a, b := c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1)
	c.startFaultyAgent(t, 2)
	for i := range 200 {
		name := fmt.Sprintf("web-%03d", i)
		c.createService(t, name, func(s *core.Service) {
			policy := core.IPFamilyPolicySingleStack
			s.Spec.IPFamilyPolicy, s.Spec.Ports = &policy, s.Spec.Ports[:1]
		})
		c.setEndpoints(t, name, a)
	}
	for i := range 200 {
		name := fmt.Sprintf("web-%03d", i)
		c.vips[name] = c.waitAddresses(t, name)[0]
		c.overrideRoutes(t, []netip.Addr{c.vips[name]}, 2)
	}
	c.waitServed(t)
	t.Run("service", c.serviceCannotBeHandled)
	t.Run("endpointslice", func(t *testing.T) { c.sliceCannotBeHandled(t, a, b) })
	t.Run("node", func(t *testing.T) { c.othersCannotBeHandled(t, "node", c.Balancers[2].Name(), 2) })
	t.Run("configmap", func(t *testing.T) { c.othersCannotBeHandled(t, "configmap", "steelyard-nodes", 1) })
}

// startFaultyAgent replaces the agent of a node by one that panics where FaultsPath says.
func (c *panicCluster) startFaultyAgent(t *testing.T, node int) {
	t.Helper()
	must.Do(t, c.Agents[node].Terminate(t.Context(), lab.Ready))
	config := c.Config[node]
	config.Env = append(slices.Clip(config.Env), labtest.FaultsEnv)
	c.agent = labtest.Agent(t, c.Balancers[node].Host, labtest.FaultyBinary(t), config)
	c.Agents[node] = c.agent
}

// waitServed waits until each Service responds at port 80.
func (c *panicCluster) waitServed(t *testing.T) {
	t.Helper()
	for name, vip := range c.vips {
		labtest.Until(t, lab.Ready, name+" responds", func() error {
			_, err := c.request(t, vip, 80)
			return err
		})
	}
}

// request returns the name of the pod that responds.
func (c *panicCluster) request(t *testing.T, vip netip.Addr, port uint16) (string, error) {
	got, err := c.Client().Get(t.Context(), fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port)))
	return got.Server, err
}

// panics makes a part panic about an object, changes the object, and waits until the status names it. Each Service is
// served then as before.
func (c *panicCluster) panics(t *testing.T, part, object string, change func()) {
	t.Helper()
	was := labtest.Panics(t, c.agent, part)
	c.fault(t, part+" "+object)
	change()
	labtest.Until(t, lab.Ready, "a panic of "+part, func() error {
		if n := labtest.Panics(t, c.agent, part); n == was {
			return fmt.Errorf("steelyard_panics_total is %s", n)
		}
		out, err := c.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(!strings.Contains(out, part+" "+object), "status: %v\n%s", err, out)
	})
	for name, vip := range c.vips {
		if _, err := c.request(t, vip, 80); err != nil {
			t.Errorf("%s, after the panic: %v", name, err)
		}
	}
}

// healed waits until the status does not name an object of the part any more.
func (c *panicCluster) healed(t *testing.T, part string) {
	t.Helper()
	labtest.Until(t, lab.Ready, "the status is without "+part, func() error {
		out, err := c.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(strings.Contains(out, part+" ") && strings.Contains(out, "panic:"),
			"status: %v\n%s", err, out)
	})
}

func (c *panicCluster) fault(t *testing.T, line string) {
	t.Helper()
	must.Do(t, c.agent.WriteFile(labtest.FaultsPath, line+"\n", 0o600))
}

// setPort gives the Service the port of the echo servers, beside 80.
func (c *panicCluster) setPort(t *testing.T, port int32) {
	t.Helper()
	c.updateService(t, brokenService, func(s *core.Service) {
		s.Spec.Ports = append(s.Spec.Ports[:1],
			core.ServicePort{Name: "echo", Port: port, TargetPort: intstr.FromInt32(9000)})
	})
}

func (c *panicCluster) serviceCannotBeHandled(t *testing.T) {
	c.panics(t, "service", "default/"+brokenService, func() { c.setPort(t, 81) })
	if c.connects(t, 81) == nil {
		t.Error("port 81 is served, although it could not be handled")
	}
	c.waitFrozen(t)
	c.fault(t, "")
	c.setPort(t, 82)
	labtest.Until(t, lab.Ready, "the changed Service is handled", func() error { return c.connects(t, 82) })
	c.healed(t, "service")
}

func (c *panicCluster) connects(t *testing.T, port uint16) error {
	conn, err := c.Client().Dial(t.Context(), "tcp", netip.AddrPortFrom(c.vips[brokenService], port).String())
	if err == nil {
		err = conn.Close()
	}
	return err
}

// waitFrozen waits for the Event that tells the owner of the Service.
func (c *panicCluster) waitFrozen(t *testing.T) {
	t.Helper()
	labtest.Until(t, lab.Ready, "the Event Frozen", func() error {
		events, err := c.api.CoreV1().Events("default").List(t.Context(), meta.ListOptions{
			FieldSelector: "reason=Frozen,involvedObject.name=" + brokenService,
		})
		return errors.Join(err, labtest.ErrorIf(len(events.Items) == 0, "there is none"))
	})
}

func (c *panicCluster) sliceCannotBeHandled(t *testing.T, a, b *pod) {
	c.panics(t, "endpointslice", "default/"+brokenService+"-4", func() { c.setEndpoints(t, brokenService, a, b) })
	if server, err := c.request(t, c.vips[brokenService], 80); server != a.name {
		t.Errorf("%s responds (%v), want %s as before", server, err, a.name)
	}
	c.fault(t, "")
	c.setEndpoints(t, brokenService, b)
	labtest.Until(t, lab.Ready, "the changed EndpointSlice is handled", func() error {
		server, err := c.request(t, c.vips[brokenService], 80)
		return errors.Join(err, labtest.ErrorIf(server != b.name, "%s responds, want %s", server, b.name))
	})
	c.healed(t, "endpointslice")
}

// othersCannotBeHandled: a Node, or the ConfigMap that has it in the table of nodes, cannot be handled when the node
// will be deleted, and is handled again when it stays.
func (c *panicCluster) othersCannotBeHandled(t *testing.T, part, object string, node int) {
	c.panics(t, part, object, func() { c.patchNode(t, node, deletionTaint) })
	c.fault(t, "")
	c.patchNode(t, node, noTaint)
	c.healed(t, part)
	c.waitServed(t)
}
