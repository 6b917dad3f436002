package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// createService creates a Service of type LoadBalancer with both families and without endpoints.
func (c *cluster) createService(t *testing.T, name string, change func(*core.Service)) *core.Service {
	t.Helper()
	both := core.IPFamilyPolicyRequireDualStack
	s := &core.Service{
		ObjectMeta: meta.ObjectMeta{Name: name, Namespace: "default"},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeLoadBalancer, IPFamilyPolicy: &both,
			Ports: []core.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)},
				{Name: "echo", Port: 9000, TargetPort: intstr.FromInt32(9000)},
				{Name: "dns", Port: 5353, Protocol: core.ProtocolUDP, TargetPort: intstr.FromInt32(5353)},
			},
		},
	}
	change(s)
	return must.Get(c.api.CoreV1().Services("default").Create(t.Context(), s, meta.CreateOptions{}))(t)
}

// waitAddresses waits until a Service has an address per family, and returns them.
func (c *cluster) waitAddresses(t *testing.T, name string) (vips []netip.Addr) {
	t.Helper()
	labtest.Until(t, name+" has addresses", func() error {
		s, err := c.api.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{})
		if err != nil {
			return err
		}
		vips = nil
		for _, i := range s.Status.LoadBalancer.Ingress {
			vips = append(vips, netip.MustParseAddr(i.IP))
		}
		return labtest.ErrorIf(len(vips) != len(s.Spec.IPFamilies), "it has %v", vips)
	})
	return vips
}

// setEndpoints writes a Service's EndpointSlices for these pods, as the EndpointSlice controller would.
func (c *cluster) setEndpoints(t *testing.T, service string, pods ...*pod) {
	t.Helper()
	tcp, udp := core.ProtocolTCP, core.ProtocolUDP
	for _, family := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
		name := service + "-4"
		if family == discovery.AddressTypeIPv6 {
			name = service + "-6"
		}
		labels := map[string]string{discovery.LabelServiceName: service}
		s := &discovery.EndpointSlice{
			ObjectMeta:  meta.ObjectMeta{Name: name, Namespace: "default", Labels: labels},
			AddressType: family,
		}
		for _, p := range []struct {
			name string
			port int32
			of   *core.Protocol
		}{{"http", 8080, &tcp}, {"echo", 9000, &tcp}, {"dns", 5353, &udp}} {
			s.Ports = append(s.Ports, discovery.EndpointPort{Name: &p.name, Port: &p.port, Protocol: p.of})
		}
		for _, p := range pods {
			addr, node := p.v4, c.Balancers[p.node].Name()
			if family == discovery.AddressTypeIPv6 {
				addr = p.v6
			}
			ready, serving, terminating := p.ready && !p.terminating, p.ready || p.terminating, p.terminating
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{
				Addresses: []string{addr.String()}, NodeName: &node,
				Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
			})
		}
		api := c.api.DiscoveryV1().EndpointSlices("default")
		_, err := api.Update(t.Context(), s, meta.UpdateOptions{})
		if err != nil {
			_, err = api.Create(t.Context(), s, meta.CreateOptions{})
		}
		must.Do(t, err)
	}
}

// startService creates a Service with these endpoints, and waits until the router's next hops for its addresses are
// these nodes and requests are answered. The Service is deleted with the test.
func (c *cluster) startService(
	t *testing.T, name string, change func(*core.Service), nodes []int, pods ...*pod,
) []netip.Addr {
	t.Helper()
	c.createService(t, name, change)
	t.Cleanup(func() { c.deleteService(t, name) })
	vips := c.waitAddresses(t, name)
	c.setEndpoints(t, name, pods...)
	c.waitRouted(t, vips, nodes...)
	c.waitAnswered(t, vips...)
	return vips
}

// deleteService deletes a Service and waits until it is gone, which requires that its finalizer is removed.
func (c *cluster) deleteService(t *testing.T, name string) {
	t.Helper()
	ctx, api := context.Background(), c.api.CoreV1().Services("default") // t.Context() has ended in a cleanup
	deleted := api.Delete(ctx, name, meta.DeleteOptions{})
	// 30 s, because a new leader may have to be elected first.
	_, err := lab.Until(ctx, 30*time.Second, name+" is deleted", func() error {
		_, err := api.Get(ctx, name, meta.GetOptions{})
		return labtest.ErrorIf(err == nil, "it exists")
	})
	must.True(t, err == nil, "%v (%v)", err, deleted)
}

// updateService changes a Service, and retries on conflicts.
func (c *cluster) updateService(t *testing.T, name string, change func(*core.Service)) *core.Service {
	t.Helper()
	api := c.api.CoreV1().Services("default")
	var s *core.Service
	labtest.Until(t, name+" is updated", func() (err error) {
		if s, err = api.Get(t.Context(), name, meta.GetOptions{}); err != nil {
			return err
		}
		change(s)
		s, err = api.Update(t.Context(), s, meta.UpdateOptions{})
		return err
	})
	return s
}

// waitAnswered waits until 60 of 60 requests to each of these addresses are answered.
func (c *cluster) waitAnswered(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, vip.String()+" responds", func() error { return c.Load(t, vip, 60).Err() })
	}
}

// waitUnserved waits until a connection to each of these addresses ends with an error that want accepts.
func (c *cluster) waitUnserved(t *testing.T, vips []netip.Addr, want func(error) bool) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, vip.String()+" is not served", func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
			defer cancel()
			conn, err := c.Client().Dial(ctx, "tcp", netip.AddrPortFrom(vip, 80).String())
			if err == nil {
				conn.Close()
			}
			return labtest.ErrorIf(!want(err), "the connection ended with %v", err)
		})
	}
}

func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

func timesOut(err error) bool { return errors.Is(err, context.DeadlineExceeded) || isTimeout(err) }

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func anyError(err error) bool { return err != nil }

// allAnswered sends n requests to a VIP and fails the test unless all are answered.
func (c *cluster) allAnswered(t *testing.T, vip netip.Addr, n int) traffic.Result {
	t.Helper()
	r := c.Load(t, vip, n)
	must.True(t, r.Err() == nil, "%s: %v", vip, r.Err())
	return r
}

// overrideRoutes makes the router send these addresses to one node, whatever routes are announced, until the test ends.
func (c *cluster) overrideRoutes(t *testing.T, vips []netip.Addr, node int) {
	t.Helper()
	c.routeThrough(t, vips, c.Balancers[node])
}

// routeThrough is overrideRoutes with the addresses of a node, which need not be those in c.Balancers.
func (c *cluster) routeThrough(t *testing.T, vips []netip.Addr, n lab.Node) {
	t.Helper()
	for _, vip := range vips {
		// Announced routes are already host routes, so only a table that is looked up first overrides them.
		via := labtest.Hops(vip, []lab.Node{n})[0].String()
		family := "-4"
		if vip.Is6() {
			family = "-6"
		}
		for _, args := range [][]string{
			{family, "route", "replace", labtest.HostRoute(vip).String(), "via", via, "table", "77"},
			{family, "rule", "add", "to", labtest.HostRoute(vip).String(), "lookup", "77", "priority", "77"},
		} {
			must.Get(c.Topology.Router.Run(t.Context(), "ip", args...))(t)
		}
		t.Cleanup(func() {
			args := []string{family, "rule", "del", "to", labtest.HostRoute(vip).String(), "priority", "77"}
			c.Topology.Router.Run(context.Background(), "ip", args...)
		})
	}
}

// patchNode applies a merge patch to a Node, or its subresource.
func (c *cluster) patchNode(t *testing.T, node int, patch string, sub ...string) {
	t.Helper()
	api, name := c.api.CoreV1().Nodes(), c.Balancers[node].Name()
	must.Get(api.Patch(t.Context(), name, types.MergePatchType, []byte(patch), meta.PatchOptions{}, sub...))(t)
}

// waitSaid waits for an Event about a Service with this reason and text.
func (c *cluster) waitSaid(t *testing.T, service, reason, text string) {
	t.Helper()
	labtest.Until(t, "an Event "+reason+" says: "+text, func() error {
		of := meta.ListOptions{FieldSelector: "involvedObject.name=" + service + ",reason=" + reason}
		list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("%d Events: %+v", len(list.Items), list.Items)
	})
}

// pod is a host that simulates a pod.
type pod struct {
	*lab.Host
	name   string
	node   int
	v4, v6 netip.Addr
	web    *traffic.HTTPServer
	ready  bool
	// terminating means that the pod is terminating, but still serves.
	terminating bool
}

func podPrefixes(node int) (v4, v6 netip.Prefix) {
	v4 = netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", node))
	v6 = netip.MustParsePrefix(fmt.Sprintf("fd00:244:%d::/48", node))
	return v4, v6
}

// startPod starts a pod on a node. setEndpoints makes it an endpoint.
func (c *cluster) startPod(t *testing.T, name string, node int) *pod {
	t.Helper()
	k := len(c.pods)
	p := &pod{
		Host: labtest.Host(t, c.Lab, name), name: name, node: node, ready: true,
		v4: netip.AddrFrom4([4]byte{10, 244, byte(node), byte(4*k + 2)}),
		v6: netip.MustParseAddr(fmt.Sprintf("fd00:244:%d:%x::2", node, k)),
	}
	gw4 := netip.AddrFrom4([4]byte{10, 244, byte(node), byte(4*k + 1)})
	gw6 := netip.MustParseAddr(fmt.Sprintf("fd00:244:%d:%x::1", node, k))
	with := func(a, b netip.Addr) []netip.Prefix {
		return []netip.Prefix{netip.PrefixFrom(a, 30), netip.PrefixFrom(b, 64)}
	}
	err := c.Link(
		lab.End{Host: c.Balancers[node].Host, Name: name, Addresses: with(gw4, gw6)},
		lab.End{Host: p.Host, Name: "eth0", Addresses: with(p.v4, p.v6)}, lab.LinkOptions{})
	must.Do(t, errors.Join(err, p.AddRoute(lab.Default, gw4), p.AddRoute(lab.Default6, gw6)))
	p.startServers(t)
	c.pods[name] = p
	return p
}

func (p *pod) startServers(t *testing.T) {
	t.Helper()
	at := lab.Node{Host: p.Host, V4: p.v4, V6: p.v6}
	p.web = labtest.HTTP(t, at, 8080)
	labtest.TCPEcho(t, at, 9000)
	labtest.UDPEcho(t, at, 5353)
}
