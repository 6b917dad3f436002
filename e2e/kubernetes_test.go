package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// What Kubernetes promises of Services, on three nodes with kube-proxy beside the agent. Each story has a Service of its own.
func TestKubernetes(t *testing.T) {
	c := newCluster(t, "tunnel", true)
	a, b, d := c.run(t, "pod-a", 0), c.run(t, "pod-b", 1), c.run(t, "pod-d", 2)
	for _, story := range []struct {
		name string
		play func(t *testing.T, c *cluster, pods ...*pod)
	}{
		{"Local: announced where endpoints are, and pods see the client", localPolicy},
		{"Cluster: announced everywhere, even over pods", clusterPolicy},
		{"the last endpoint goes", lastEndpoint},
		{"terminating endpoints still serve, and the route goes", terminating},
		{"the service proxy fails", proxyFails},
		{"a node is excluded", excludedNode},
		{"source ranges", sourceRanges},
		{"session affinity is switched", affinity},
		{"finalizer, type changes, deletion", lifeOfAService},
		{"without node ports", noNodePorts},
		{"UDP from one port follows the pods", udpFollows},
		{"one address, two Services with other pods", shared},
		{"labels that say that others serve it", otherProxies},
		{"addresses that cannot be given", refusedAddresses},
		{"the policy is switched", policySwitched},
		{"one port for TCP and UDP, scaled to nothing and back", onePortTwice},
		{"a named port with other numbers", namedPorts},
		{"from pods, and from a pod to itself", fromPods},
		{"recreated under its name", recreated},
		{"externalIPs", externalIPs},
		{"pods on the host's network, and on a bridge", otherNetworks},
		{"connections that nobody knows", unknownConnections},
		{"the agent is killed under load", agentKilled},
		{"the API server is away under load", apiAway},
	} {
		t.Run(story.name, func(t *testing.T) { story.play(t, c, a, b, d) })
	}
}

// offer makes a Service with these endpoints, and waits until the router sends its addresses to these nodes.
func (c *cluster) offer(t *testing.T, name string, change func(*core.Service), nodes []int, pods ...*pod) []netip.Addr {
	t.Helper()
	c.service(t, name, change)
	t.Cleanup(func() { c.withdraw(t, name) })
	vips := c.addresses(t, name)
	c.publish(t, name, pods...)
	c.routed(t, 20*time.Second, vips, nodes...)
	c.answers(t, vips...)
	return vips
}

// withdraw deletes a Service and waits until it is gone; a finalizer that nobody takes away would keep it.
func (c *cluster) withdraw(t *testing.T, name string) {
	t.Helper()
	ctx, api := context.Background(), c.api.CoreV1().Services("default") // the test is over
	err := api.Delete(ctx, name, meta.DeleteOptions{})
	for range 600 { // another leader may have to be elected first
		if _, err = api.Get(ctx, name, meta.GetOptions{}); err != nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("%s is still there: %v", name, err)
}

// change updates a Service.
func (c *cluster) change(t *testing.T, name string, change func(*core.Service)) *core.Service {
	t.Helper()
	api := c.api.CoreV1().Services("default")
	var s *core.Service
	labtest.Until(t, 5*time.Second, "the Service is changed", func() (err error) {
		if s, err = api.Get(t.Context(), name, meta.GetOptions{}); err != nil {
			return err
		}
		change(s)
		s, err = api.Update(t.Context(), s, meta.UpdateOptions{})
		return err
	})
	return s
}

// answers waits until requests to all these addresses are answered.
func (c *cluster) answers(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, 10*time.Second, vip.String()+" answers", func() error { return c.load(t, vip, 60).Err() })
	}
}

// silent waits until connections to all these addresses end as they should.
func (c *cluster) silent(t *testing.T, vips []netip.Addr, ends func(error) bool) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, 10*time.Second, vip.String()+" is not served", func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
			defer cancel()
			conn, err := c.client().Dial(ctx, "tcp", netip.AddrPortFrom(vip, 80).String())
			if err == nil {
				conn.Close()
			}
			if !ends(err) {
				return fmt.Errorf("it ended with %v", err)
			}
			return nil
		})
	}
}

func refusedAtOnce(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

func timesOut(err error) bool { return errors.Is(err, context.DeadlineExceeded) || isTimeout(err) }

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func anyError(err error) bool { return err != nil }

// from makes a set of pods count anew.
func counted(c *cluster, t *testing.T, vip netip.Addr, n int) traffic.Result {
	t.Helper()
	r := c.load(t, vip, n)
	if r.Err() != nil {
		t.Errorf("%s: %v", vip, r.Err())
	}
	return r
}

func localPolicy(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "local", local, []int{0, 1}, pods[:2]...)
	for _, vip := range vips {
		if r := counted(c, t, vip, 300); len(r.Servers) != 2 {
			t.Errorf("%s: %s", vip, r)
		}
	}
	c.sawTheClient(t, pods[:2]...)
	c.publish(t, "local", pods[0], pods[2])
	took := c.routed(t, 5*time.Second, vips, 0, 2)
	t.Logf("the routes had moved %s after the endpoints", took)
	c.answers(t, vips...)
	c.sawTheClient(t, pods[0], pods[2])
	conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 20)
	exchange(t, conns, "by Local")
}

func clusterPolicy(t *testing.T, c *cluster, pods ...*pod) {
	second := c.run(t, "pod-a2", 0) // pods, and not nodes, get equal shares
	asked := []*pod{pods[0], second, pods[1]}
	vips := c.offer(t, "cluster", func(*core.Service) {}, []int{0, 1, 2}, pods[0], second, pods[1])
	defer func() {
		if c.forward == "tunnel" {
			c.sawTheClient(t, asked...)
		}
	}()
	for _, vip := range vips {
		even(t, counted(c, t, vip, 900), 3)
		if r := c.client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 60, 0, 2*time.Second); r.Err() != nil || len(r.Servers) != 3 {
			t.Errorf("%s: %s, %v", vip, r, r.Err())
		}
	}
}

func lastEndpoint(t *testing.T, c *cluster, pods ...*pod) {
	byCluster := c.offer(t, "last", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	c.publish(t, "last")
	c.routed(t, 5*time.Second, byCluster)
	// Who still sends here is refused at once, on every node; the router is told by hand.
	c.sendsTo(t, byCluster, 1)
	c.silent(t, byCluster, refusedAtOnce)
	c.publish(t, "last", pods[0])
	c.routed(t, 10*time.Second, byCluster, 0, 1, 2)

	byLocal := c.offer(t, "last-local", local, []int{0}, pods[0])
	c.sendsTo(t, byLocal, 1) // endpoints are elsewhere: the client is to try another node
	c.silent(t, byLocal, timesOut)
	c.publish(t, "last-local")
	c.silent(t, byLocal, refusedAtOnce)
}

// sendsTo makes the router send addresses to one node, whatever is announced.
func (c *cluster) sendsTo(t *testing.T, vips []netip.Addr, node int) {
	t.Helper()
	for _, vip := range vips {
		// More specific than anything announced is not possible; a table of its own comes before what BGP says.
		via := hops(vip, c.Balancers[node:node+1])[0].String()
		family := "-4"
		if vip.Is6() {
			family = "-6"
		}
		for _, args := range [][]string{
			{family, "route", "replace", host(vip).String(), "via", via, "table", "77"},
			{family, "rule", "add", "to", host(vip).String(), "lookup", "77", "priority", "77"},
		} {
			if out, err := c.Topology.Router.Run(t.Context(), "ip", args...); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		}
		t.Cleanup(func() {
			c.Topology.Router.Run(context.Background(), "ip", family, "rule", "del", "to", host(vip).String(), "priority", "77")
		})
	}
}

func terminating(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "leaving", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 40)
	pods[0].leaving = true
	defer func() { pods[0].leaving = false }()
	c.publish(t, "leaving", pods[0], pods[1])
	c.routed(t, 5*time.Second, vips, 1)
	exchange(t, conns, "while a pod leaves") // the router moves them to the other node, which asks for them
	pods[1].leaving = true
	defer func() { pods[1].leaving = false }()
	c.publish(t, "leaving", pods[0], pods[1])
	c.routed(t, 5*time.Second, vips)
	c.sendsTo(t, vips, 0)
	c.answers(t, vips...) // none is ready: those that terminate serve
}

func proxyFails(t *testing.T, c *cluster, pods ...*pod) {
	byLocal := c.offer(t, "proxied-local", local, []int{0, 1}, pods[0], pods[1])
	byCluster := c.offer(t, "proxied", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
	start := time.Now()
	c.proxies[0].Kill()
	c.routed(t, 5*time.Second, byLocal, 1)
	c.routed(t, 5*time.Second, byCluster, 1, 2)
	if took := time.Since(start); took > probeBound+600*time.Millisecond {
		t.Errorf("the routes were gone %s after kube-proxy; want about %s", took, probeBound)
	}
	out, err := c.agents[0].CLI(t.Context(), "routes")
	if err != nil || !strings.Contains(out, "connection refused") {
		t.Errorf("routes does not say why: %v\n%s", err, out)
	}
	p, err := c.control.StartKubeProxy(c.Balancers[0].Host)
	if err != nil {
		t.Fatal(err)
	}
	c.proxies[0] = p
	c.routed(t, 30*time.Second, byLocal, 0, 1)
	c.routed(t, 30*time.Second, byCluster, 0, 1, 2)
}

func excludedNode(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "excluded", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	label := func(text string) {
		c.patchNode(t, 1, `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":`+text+`}}}`)
	}
	label(`""`)
	c.routed(t, 5*time.Second, vips, 0, 2)
	label(`"false"`)
	c.routed(t, 5*time.Second, vips, 0, 1, 2)
	label("null")
	c.routed(t, 5*time.Second, vips, 0, 1, 2)
	c.patchNode(t, 1, goingTaint)
	c.routed(t, 5*time.Second, vips, 0, 2)
	c.patchNode(t, 1, noTaint)
	c.routed(t, 5*time.Second, vips, 0, 1, 2)
}

const (
	goingTaint = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	noTaint    = `{"spec":{"taints":null}}`
)

func (c *cluster) patchNode(t *testing.T, node int, patch string) {
	t.Helper()
	if _, err := c.api.CoreV1().Nodes().Patch(t.Context(), c.Balancers[node].Name(), types.MergePatchType, []byte(patch), meta.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

func sourceRanges(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "ranges", local, []int{0}, pods[0])
	only := func(ranges ...string) {
		c.change(t, "ranges", func(s *core.Service) { s.Spec.LoadBalancerSourceRanges = ranges })
	}
	only("10.0.0.0/8", "2001:db8:dead::/48")
	c.silent(t, vips, timesOut)
	only("198.51.100.0/24", "2001:db8:100::/64")
	c.answers(t, vips...)
	only("255.0.0.0/32") // says nothing of IPv6
	c.silent(t, vips[:1], timesOut)
	c.answers(t, vips[1])
	only()
	c.answers(t, vips...)
}

func affinity(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "sticky", func(*core.Service) {}, []int{0, 1, 2}, pods...)
	sticks := func(how core.ServiceAffinity, servers func(int) bool) {
		t.Helper()
		c.change(t, "sticky", func(s *core.Service) { s.Spec.SessionAffinity = how; s.Spec.SessionAffinityConfig = nil })
		for _, vip := range vips {
			labtest.Until(t, 10*time.Second, "affinity is "+string(how), func() error {
				r := c.load(t, vip, 40)
				if r.Err() != nil || !servers(len(r.Servers)) {
					return fmt.Errorf("%s, %w", r, r.Err())
				}
				return nil
			})
		}
	}
	for range 2 {
		sticks(core.ServiceAffinityClientIP, func(n int) bool { return n == 1 })
		sticks(core.ServiceAffinityNone, func(n int) bool { return n == 3 })
	}
}

func lifeOfAService(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "life", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	api := c.api.CoreV1().Services("default")
	has := func(finalized bool, addresses int) func() error {
		return func() error {
			s, err := api.Get(t.Context(), "life", meta.GetOptions{})
			if err != nil {
				return err
			}
			if slices.Contains(s.Finalizers, "service.kubernetes.io/load-balancer-cleanup") != finalized || len(s.Status.LoadBalancer.Ingress) != addresses {
				return fmt.Errorf("finalizers %v, addresses %v", s.Finalizers, s.Status.LoadBalancer.Ingress)
			}
			return nil
		}
	}
	labtest.Until(t, 5*time.Second, "it has the finalizer", has(true, 2))
	s, err := api.Get(t.Context(), "life", meta.GetOptions{})
	if err != nil || s.Status.LoadBalancer.Ingress[0].IPMode == nil || *s.Status.LoadBalancer.Ingress[0].IPMode != core.LoadBalancerIPModeVIP {
		t.Errorf("ingress %+v, %v; want ipMode VIP", s.Status.LoadBalancer.Ingress, err)
	}
	c.change(t, "life", func(s *core.Service) { s.Spec.Ports[0].Port = 81 })
	labtest.Until(t, 10*time.Second, "another port works", func() error {
		r := c.client().Load(t.Context(), traffic.Load{URL: fmt.Sprintf("http://%s/", netip.AddrPortFrom(vips[0], 81)), Requests: 20})
		return r.Err()
	})
	c.change(t, "life", func(s *core.Service) { s.Spec.Ports[0].Port = 80 })
	c.answers(t, vips...)
	if again := c.addresses(t, "life"); !slices.Equal(again, vips) {
		t.Errorf("addresses %v became %v", vips, again)
	}
	c.change(t, "life", func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP })
	labtest.Until(t, 10*time.Second, "everything is taken back", has(false, 0))
	c.routed(t, 5*time.Second, vips)
	c.silent(t, vips, anyError)
	c.change(t, "life", func(s *core.Service) { s.Spec.Type = core.ServiceTypeLoadBalancer })
	vips = c.addresses(t, "life")
	c.routed(t, 10*time.Second, vips, 0, 1, 2)
	c.answers(t, vips...)
	c.withdraw(t, "life")
	c.routed(t, 5*time.Second, vips)
}

func noNodePorts(t *testing.T, c *cluster, pods ...*pod) {
	no, yes := false, true
	vips := c.offer(t, "portless", func(s *core.Service) { s.Spec.AllocateLoadBalancerNodePorts = &no }, []int{0, 1, 2}, pods[0])
	s := c.change(t, "portless", func(s *core.Service) { s.Spec.AllocateLoadBalancerNodePorts = &yes })
	if s.Spec.Ports[0].NodePort == 0 {
		t.Error("no node port was allocated")
	}
	c.answers(t, vips...)
	if again := c.addresses(t, "portless"); !slices.Equal(again, vips) {
		t.Errorf("addresses %v became %v", vips, again)
	}
}

// A client that goes on sending from the same port must not be kept by a pod that is no more.
func udpFollows(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "udp", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	for _, vip := range vips {
		conn, err := c.client().Dial(t.Context(), "udp", netip.AddrPortFrom(vip, 5353).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		asks := func(want string) func() error {
			return func() error {
				b := make([]byte, 200)
				conn.SetDeadline(time.Now().Add(300 * time.Millisecond))
				if _, err := conn.Write([]byte("who")); err != nil {
					return err
				}
				n, err := conn.Read(b)
				if err == nil && !strings.HasPrefix(string(b[:n]), want+" ") {
					err = fmt.Errorf("answered by %s", b[:n])
				}
				return err
			}
		}
		for _, p := range []*pod{pods[0], pods[1], pods[0]} {
			c.publish(t, "udp", p)
			took := labtest.Until(t, 5*time.Second, p.name+" answers", asks(p.name))
			if took > 2*time.Second {
				t.Errorf("%s answered after %s", p.name, took)
			}
		}
	}
}

// shared: one address, two Services with other pods on other nodes, both Local.
func shared(t *testing.T, c *cluster, pods ...*pod) {
	share := func(port int32) func(*core.Service) {
		return func(s *core.Service) {
			local(s)
			s.Annotations = map[string]string{"metallb.io/allow-shared-ip": "one"}
			s.Spec.Ports = s.Spec.Ports[:1]
			s.Spec.Ports[0].Port = port
		}
	}
	c.service(t, "shared-a", share(80))
	t.Cleanup(func() { c.withdraw(t, "shared-a") })
	first := c.addresses(t, "shared-a")
	c.service(t, "shared-b", share(8081))
	t.Cleanup(func() { c.withdraw(t, "shared-b") })
	if second := c.addresses(t, "shared-b"); !slices.Equal(first, second) {
		t.Fatalf("addresses %v and %v; want the same", first, second)
	}
	c.publish(t, "shared-a", pods[0])
	c.publish(t, "shared-b", pods[1])
	c.routed(t, 20*time.Second, first, 0, 1) // the union of their nodes
	for _, vip := range first {
		for port, p := range map[uint16]*pod{80: pods[0], 8081: pods[1]} {
			r := c.client().Load(t.Context(), traffic.Load{URL: fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port)), Requests: 60})
			if r.Err() != nil || r.Servers[p.name] != 60 {
				t.Errorf("%s port %d: %s, %v; want all from %s", vip, port, r, r.Err(), p.name)
			}
			c.sawTheClient(t, p)
		}
	}
}

func otherProxies(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "labelled", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	for _, label := range []string{"service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"} {
		c.change(t, "labelled", func(s *core.Service) { s.Labels = map[string]string{label: "other"} })
		c.routed(t, 10*time.Second, vips)
		c.change(t, "labelled", func(s *core.Service) { s.Labels = nil })
		c.routed(t, 10*time.Second, vips, 0, 1, 2)
		c.answers(t, vips...)
	}
}

func refusedAddresses(t *testing.T, c *cluster, pods ...*pod) {
	taken := c.offer(t, "first", func(*core.Service) {}, []int{0, 1, 2}, pods[0])[0].String()
	for name, x := range map[string]struct{ ask, want string }{
		"thief":    {taken, "belongs to default/first; to share it, give both the annotation steelyard.dev/share"},
		"outsider": {"192.0.2.77", "192.0.2.77 is in no pool"},
	} {
		c.service(t, name, func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/addresses": x.ask} })
		t.Cleanup(func() { c.withdraw(t, name) })
		labtest.Until(t, 10*time.Second, "an event says why", func() error {
			list, err := c.api.CoreV1().Events("default").List(t.Context(), meta.ListOptions{FieldSelector: "involvedObject.name=" + name})
			if err != nil {
				return err
			}
			for _, e := range list.Items {
				if e.Type == core.EventTypeWarning && strings.Contains(e.Message, x.want) {
					return nil
				}
			}
			return fmt.Errorf("%d events", len(list.Items))
		})
	}
	asked := c.offer(t, "asked", func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/loadBalancerIPs": "203.0.113.77, 2001:db8:1::77"}
	}, []int{0, 1, 2}, pods[0])
	if fmt.Sprint(asked) != "[203.0.113.77 2001:db8:1::77]" {
		t.Errorf("asked for 203.0.113.77 and 2001:db8:1::77, got %v", asked)
	}
}

func agentKilled(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "killed", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 60)
	traffic := c.client().Stream(t.Context(), url(vips[0]), 5*time.Millisecond, 2*time.Second)
	time.Sleep(500 * time.Millisecond)
	for range 3 {
		c.agents[0].Kill()
		time.Sleep(500 * time.Millisecond)
		if err := errors.Join(c.agents[0].Start(), c.agents[0].WaitReady(t.Context(), 10*time.Second)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
	}
	traffic.Stop()
	if r := traffic.Between(time.Time{}, time.Time{}); r.Err() != nil {
		t.Errorf("%v", r.Err())
	}
	exchange(t, conns, "after three kills")
	c.routed(t, 20*time.Second, vips, 0, 1)
}

func apiAway(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.offer(t, "away", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 60)
	traffic := c.client().Stream(t.Context(), url(vips[0]), 20*time.Millisecond, 2*time.Second)
	c.control.StopAPI()
	time.Sleep(time.Minute)
	exchange(t, conns, "while the API server is away")
	if err := c.control.StartAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	traffic.Stop()
	if r := traffic.Between(time.Time{}, time.Time{}); r.Err() != nil {
		t.Errorf("%v", r.Err())
	}
	exchange(t, conns, "after the API server is back")
	c.publish(t, "away", pods[0], pods[2])
	// What happened meanwhile, and after, is caught up with at once; kube-proxy, which has its say in the new node's routes, asks
	// the API server again after up to a minute.
	labtest.Until(t, 10*time.Second, "the node without a pod knows", func() error {
		out, err := c.agents[1].CLI(t.Context(), "routes")
		if err == nil && !strings.Contains(out, "no ready endpoint is on this node") {
			err = errors.New(out)
		}
		return err
	})
	c.routed(t, 2*time.Minute, vips, 0, 2)
}
