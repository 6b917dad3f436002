package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// segmentCluster is a cluster whose nodes announce only with ARP and NDP. Nodes are not configured with the others:
// they find them through the API, and the keys in the Secret that an agent fills with the manifest's rights.
type segmentCluster struct {
	*cluster
	m    *labtest.Members
	pods []*pod
}

func newSegmentCluster(t *testing.T) *segmentCluster {
	c := startCluster(t, 3, "tunnel")
	for _, p := range []string{"203.0.113.254/24", "2001:db8:1::ffff/64"} {
		must.Do(t, c.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)))
	}
	c.install(t, "")
	kubeconfig := c.kubeconfigOf(t, "steelyard")
	// The first address of an IPv6 prefix belongs to its routers (RFC 4291, section 2.6.1).
	pool := strings.NewReplacer("203.0.113.0/24", "203.0.113.16/28", "2001:db8:1::/64", "2001:db8:1::10/124")
	s := &segmentCluster{cluster: c, m: &labtest.Members{Site: c.Site}}
	for i, b := range c.Balancers {
		c.join(t, i)
		c.register(t, i)
		a := lab.AgentConfig{
			Name: b.Name(), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc", L2: []string{"eth0"},
			LogLevel: "debug", Env: []string{"POD_NAMESPACE=steelyard"},
			Extra: fmt.Sprintf(pool.Replace(clusterTOML),
				kube.KubeconfigPath, "tunnel", "replace", probeInterval, probeTimeout, probeFall),
		}
		must.Do(t, b.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600))
		c.Config = append(c.Config, a)
		if i == 0 {
			c.startAllocators(t)
		}
		c.Agents = append(c.Agents, labtest.Agent(t, b.Host, binary, a))
		s.pods = append(s.pods, c.startPod(t, fmt.Sprintf("pod-%d", i), i))
	}
	for _, name := range []string{"first", "second"} {
		c.createService(t, name, func(*core.Service) {})
		t.Cleanup(func() { c.deleteService(t, name) })
		s.m.VIPs = append(s.m.VIPs, c.waitAddresses(t, name)...)
		c.setEndpoints(t, name, s.pods...)
	}
	s.m.Settled(t, c.Agents...)
	c.waitAnswered(t, s.m.VIPs...)
	return s
}

// lose removes a node's pods from the endpoints, like the controllers if the node does not respond.
func (s *segmentCluster) lose(t *testing.T, a *lab.Agent) {
	left := slices.DeleteFunc(slices.Clone(s.pods), func(p *pod) bool { return s.Balancers[p.node].Host == a.Host })
	for _, name := range []string{"first", "second"} {
		s.setEndpoints(t, name, left...)
	}
}

// spreadsLocal checks that with policy Local, the owner forwards to all nodes with endpoints, including itself, in
// proportion to their number. Pods see the client's address. The owner itself may have no endpoint.
func (s *segmentCluster) spreadsLocal(t *testing.T) {
	others := s.m.VIPs
	defer func() { s.m.VIPs = others }()
	pods := slices.Concat(s.pods, []*pod{s.startPod(t, "local-more", 1)})
	s.createService(t, "local", local)
	defer s.deleteService(t, "local")
	addresses := s.waitAddresses(t, "local")
	s.m.VIPs = slices.Concat(others, addresses)
	s.setEndpoints(t, "local", pods...)
	owners := s.m.Settled(t, s.Agents...)
	s.waitAnswered(t, addresses...)
	spread := func(vip netip.Addr, pods []*pod) {
		t.Helper()
		labtest.Until(t, "the endpoints are active", func() error {
			r := s.Load(t, vip, 40)
			return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != len(pods), "%s", r)
		})
		r := s.Load(t, vip, 2000)
		t.Logf("%s of %s: %s", vip, owners[vip], r)
		must.Do(t, r.Err())
		labtest.CheckEven(t, r, len(pods))
	}
	for _, vip := range addresses {
		spread(vip, pods)
	}
	s.checkClientAddress(t, pods...)
	vip := addresses[0]
	left := slices.DeleteFunc(slices.Clone(pods), func(p *pod) bool {
		return s.Balancers[p.node].Host == owners[vip].Host
	})
	s.setEndpoints(t, "local", left...)
	spread(vip, left)
	after := s.m.Settled(t, s.Agents...)[vip]
	must.True(t, after == owners[vip], "%s has moved from %s to %s", vip, owners[vip], after)
	s.checkClientAddress(t, pods...)
}

// TestMembersOfACluster checks that each address has one owner among the cluster's nodes, that another node takes over
// from a failed one, and that a planned shutdown loses no request, even while the API server is down.
func TestMembersOfACluster(t *testing.T) {
	s := newSegmentCluster(t)
	secret, err := s.api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
	must.Need(t, err == nil && len(secret.Data["current"]) > 0,
		"the Secret of the keys: %v, %d entries", err, len(secret.Data))
	must := func(err error) {
		t.Helper()
		must.Do(t, err)
	}
	kubeconfig, err := s.Balancers[0].ReadFile(kube.KubeconfigPath)
	must(err)
	start := func(t *testing.T, a *lab.Agent) { must(errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready))) }
	killed := labtest.TakeOver{Name: "killed", Fail: func(_ *testing.T, a *lab.Agent) { a.Kill() }, Back: start}
	planned := labtest.TakeOver{Name: "planned end", Fail: func(t *testing.T, a *lab.Agent) {
		must(a.Terminate(t.Context(), 20*time.Second))
	}, Back: start, Planned: true}
	off := labtest.TakeOver{Name: "power off", Fail: func(t *testing.T, a *lab.Agent) {
		must(a.PowerOff())
		s.lose(t, a)
	}, Back: func(t *testing.T, a *lab.Agent) {
		must(errors.Join(a.PowerOn(), a.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600)))
		start(t, a)
		s.setEndpoints(t, "first", s.pods...)
		s.setEndpoints(t, "second", s.pods...)
		s.waitAnswered(t, s.m.VIPs...)
	}}
	t.Run("Local", s.spreadsLocal)
	for i, k := range []labtest.TakeOver{killed, off, planned} {
		t.Run(k.Name, func(t *testing.T) { s.m.TakesOver(t, s.m.VIPs[i], k) })
	}
	s.control.StopAPI()
	for i, k := range []labtest.TakeOver{killed, planned} {
		t.Run(k.Name+", API server away", func(t *testing.T) { s.m.TakesOver(t, s.m.VIPs[2+i], k) })
	}
	must(s.control.StartAPI(t.Context()))
}

// TestAddressPerNodeOfACluster checks that a Service with the annotation has an address of each family per node, on
// different nodes, and only one again without the annotation.
func TestAddressPerNodeOfACluster(t *testing.T) {
	t.Parallel()
	s := newSegmentCluster(t)
	before := s.m.VIPs
	annotate := func(value string) {
		t.Helper()
		api := s.api.CoreV1().Services("default")
		labtest.Until(t, "the Service is changed", func() error {
			service, err := api.Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			service.Annotations = map[string]string{"steelyard.dev/address-per-node": value}
			_, err = api.Update(t.Context(), service, meta.UpdateOptions{})
			return err
		})
	}
	wait := func(n int) (vips []netip.Addr) {
		t.Helper()
		labtest.Until(t, fmt.Sprintf("the Service has %d addresses", n), func() error {
			service, err := s.api.CoreV1().Services("default").Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			vips = nil
			for _, i := range service.Status.LoadBalancer.Ingress {
				vips = append(vips, netip.MustParseAddr(i.IP))
			}
			return labtest.ErrorIf(len(vips) != n, "it has %v", vips)
		})
		return vips
	}
	annotate("true")
	s.m.VIPs = wait(2 * len(s.Agents))
	if !slices.Equal(s.m.VIPs[:2], before[:2]) {
		t.Errorf("addresses %v; want the previous ones first: %v", s.m.VIPs, before[:2])
	}
	second := before[2:]
	s.deleteService(t, "second")
	s.m.Apart(t, s.Agents...)
	s.waitAnswered(t, s.m.VIPs...)
	annotate("false")
	if got := wait(2); !slices.Equal(got, before[:2]) {
		t.Errorf("addresses %v; want %v", got, before[:2])
	}
	s.m.VIPs = before[:2]
	s.createService(t, "second", func(*core.Service) {})
	got := s.waitAddresses(t, "second")
	must.True(t, len(got) == len(second), "addresses of the other Service: %v", got)
}

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
		return func(on bool) { c.patchNode(t, node, map[bool]string{true: deletionTaint, false: noTaint}[on]) }
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
