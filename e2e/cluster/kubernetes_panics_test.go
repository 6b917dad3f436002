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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// brokenService is the Service that a node's agent cannot handle, beside 200 others.
const brokenService = "web-007"

// panicCluster has 201 Services. All packets enter through the last node, whose agent panics where a test says so.
type panicCluster struct {
	*cluster
	agent *lab.Agent
	vips  map[string]netip.Addr
}

// TestPanicOfOneObject checks that a panic about one object in the cluster affects only that object, which is handled
// again after its next change. It runs with kube-proxy, and with the agent as service proxy.
func TestPanicOfOneObject(t *testing.T) {
	t.Parallel()
	t.Run("beside kube-proxy", func(t *testing.T) { panicOfOneObject(t, true) })
	t.Run("replace", func(t *testing.T) { panicOfOneObject(t, false) })
}

func panicOfOneObject(t *testing.T, proxied bool) {
	c := &panicCluster{cluster: newCluster(t, "tunnel", proxied), vips: map[string]netip.Addr{}}
	a, b := c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1)
	c.startFaultyAgent(t, 2)
	for i := range 201 {
		name := fmt.Sprintf("web-%03d", i)
		c.createService(t, name, func(s *core.Service) {
			policy := core.IPFamilyPolicySingleStack
			s.Spec.IPFamilyPolicy, s.Spec.Ports = &policy, s.Spec.Ports[:1]
		})
		c.setEndpoints(t, name, a)
	}
	for i := range 201 {
		name := fmt.Sprintf("web-%03d", i)
		c.vips[name] = c.waitAddresses(t, name)[0]
		c.overrideRoutes(t, []netip.Addr{c.vips[name]}, 2)
	}
	c.waitServed(t)
	t.Run("service", c.serviceCannotBeHandled)
	t.Run("endpointslice", func(t *testing.T) { c.sliceCannotBeHandled(t, a, b) })
	// The Node, or the ConfigMap with its entry in the node table, changes because the node is about to be deleted.
	taint := func(node int) func(bool) {
		return func(on bool) {
			c.patchNode(t, node, map[bool]string{true: deletionTaint, false: noTaint}[on])
			c.waitExcluded(t, c.Balancers[node].Name(), on)
		}
	}
	label := func(on bool) {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{"changed":"%t"}}}`, on)
		must.Get(c.api.CoreV1().Secrets("steelyard").Patch(t.Context(), "steelyard-tunnel-keys",
			types.MergePatchType, patch, meta.PatchOptions{}))(t)
	}
	t.Run("node", func(t *testing.T) { c.othersCannotBeHandled(t, "node", c.Balancers[2].Name(), taint(2)) })
	t.Run("configmap", func(t *testing.T) { c.othersCannotBeHandled(t, "configmap", "steelyard-nodes", taint(1)) })
	t.Run("secret", func(t *testing.T) {
		c.othersCannotBeHandled(t, "secret", "steelyard/steelyard-tunnel-keys", label)
	})
	t.Run("object", c.objectCannotBeRead) // last, because the status names it for ten minutes
}

// waitExcluded waits until the node table says whether a node is excluded.
func (c *panicCluster) waitExcluded(t *testing.T, node string, excluded bool) {
	t.Helper()
	labtest.Until(t, "the node table has the change of "+node, func() error {
		all, err := c.api.CoreV1().ConfigMaps("steelyard").List(t.Context(), meta.ListOptions{})
		if err != nil {
			return err
		}
		for _, m := range all.Items {
			if entry, ok := m.Data[node]; ok && strings.Contains(entry, "excluded") == excluded {
				return nil
			}
		}
		return errors.New("it has not")
	})
}

// startFaultyAgent replaces a node's agent with one that panics where FaultsPath says so.
func (c *panicCluster) startFaultyAgent(t *testing.T, node int) {
	t.Helper()
	must.Do(t, c.Agents[node].Terminate(t.Context(), lab.Ready))
	config := c.Config[node]
	config.Env = append(slices.Clip(config.Env), labtest.FaultsEnv)
	c.agent = labtest.Agent(t, c.Balancers[node].Host, labtest.FaultyBinary(t), config)
	c.Agents[node] = c.agent
}

// waitServed waits until each Service responds on port 80.
func (c *panicCluster) waitServed(t *testing.T) {
	t.Helper()
	for name, vip := range c.vips {
		labtest.Until(t, name+" responds", func() error {
			_, err := c.request(t, vip, 80)
			return err
		})
	}
}

// request returns the responding pod's name.
func (c *panicCluster) request(t *testing.T, vip netip.Addr, port uint16) (string, error) {
	got, err := c.Client().Get(t.Context(), fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port)))
	return got.Server, err
}

// panics makes a part panic about an object, changes the object, and waits until the status names it. All Services must
// still be served.
func (c *panicCluster) panics(t *testing.T, part, object string, change func()) {
	t.Helper()
	was := labtest.Panics(t, c.agent, part)
	c.fault(t, part+" "+object)
	change()
	labtest.Until(t, "a panic of "+part, func() error {
		if n := labtest.Panics(t, c.agent, part); n == was {
			return fmt.Errorf("steelyard_panics_total is %s", n)
		}
		out, err := c.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(!strings.Contains(out, part+" "+object), "status: %v\n%s", err, out)
	})
	for name, vip := range c.vips {
		_, err := c.request(t, vip, 80)
		must.True(t, err == nil, "%s, after the panic: %v", name, err)
	}
}

// healed waits until the status no longer names an object of this part.
func (c *panicCluster) healed(t *testing.T, part string) {
	t.Helper()
	labtest.Until(t, "the status is without "+part, func() error {
		out, err := c.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(strings.Contains(out, part+" ") && strings.Contains(out, "panic:"),
			"status: %v\n%s", err, out)
	})
}

func (c *panicCluster) fault(t *testing.T, line string) {
	t.Helper()
	must.Do(t, c.agent.WriteFile(labtest.FaultsPath, line+"\n", 0o600))
}

// setPort adds the echo servers' port to the Service, beside 80.
func (c *panicCluster) setPort(t *testing.T, port int32) {
	t.Helper()
	c.updateService(t, brokenService, func(s *core.Service) {
		s.Spec.Ports = append(s.Spec.Ports[:1],
			core.ServicePort{Name: "echo", Port: port, TargetPort: intstr.FromInt32(9000)})
	})
}

func (c *panicCluster) serviceCannotBeHandled(t *testing.T) {
	c.panics(t, "service", "default/"+brokenService, func() { c.setPort(t, 81) })
	must.True(t, c.connects(t, 81) != nil, "port 81 is served, although it could not be handled")
	c.waitFrozen(t)
	c.fault(t, "")
	c.setPort(t, 82)
	labtest.Until(t, "the changed Service is handled", func() error { return c.connects(t, 82) })
	c.healed(t, "service")
}

func (c *panicCluster) connects(t *testing.T, port uint16) error {
	conn, err := c.Client().Dial(t.Context(), "tcp", netip.AddrPortFrom(c.vips[brokenService], port).String())
	if err == nil {
		err = conn.Close()
	}
	return err
}

// waitFrozen waits for the Event that notifies the Service's owner.
func (c *panicCluster) waitFrozen(t *testing.T) {
	t.Helper()
	labtest.Until(t, "the Event Frozen", func() error {
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
	labtest.Until(t, "the changed EndpointSlice is handled", func() error {
		server, err := c.request(t, c.vips[brokenService], 80)
		return errors.Join(err, labtest.ErrorIf(server != b.name, "%s responds, want %s", server, b.name))
	})
	c.healed(t, "endpointslice")
}

// objectCannotBeRead makes a Service panic when it arrives from the API server.
func (c *panicCluster) objectCannotBeRead(t *testing.T) {
	c.panics(t, "object", "default/"+brokenService, func() { c.setPort(t, 83) })
	c.fault(t, "")
	c.setPort(t, 84)
	labtest.Until(t, "the changed Service is handled", func() error { return c.connects(t, 84) })
}

// othersCannotBeHandled makes an object other than a Service impossible to handle when it changes. It is handled again
// when the change is undone.
func (c *panicCluster) othersCannotBeHandled(t *testing.T, part, object string, change func(on bool)) {
	c.panics(t, part, object, func() { change(true) })
	c.fault(t, "")
	change(false)
	c.healed(t, part)
	c.waitServed(t)
}
