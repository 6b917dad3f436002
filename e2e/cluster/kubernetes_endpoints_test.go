package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func localPolicy(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "local", local, []int{0, 1}, pods[:2]...)
	for _, vip := range vips {
		r := c.allAnswered(t, vip, 300)
		must.True(t, len(r.Servers) == 2, "%s: %s", vip, r)
	}
	c.checkClientAddress(t, pods[:2]...)
	c.setEndpoints(t, "local", pods[0], pods[2])
	took := c.waitRouted(t, vips, 0, 2)
	t.Logf("the routes followed the endpoints after %s", took)
	c.waitAnswered(t, vips...)
	c.checkClientAddress(t, pods[0], pods[2])
	conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 20)
	labtest.Exchange(t, conns, "with Local")
}

func clusterPolicy(t *testing.T, c *cluster, pods ...*pod) {
	second := c.startPod(t, "pod-a2", 0) // the shares are equal per pod, not per node
	served := []*pod{pods[0], second, pods[1]}
	vips := c.startService(t, "cluster", func(*core.Service) {}, []int{0, 1, 2}, served...)
	defer func() {
		if c.forward == "tunnel" {
			c.checkClientAddress(t, served...)
		}
	}()
	for _, vip := range vips {
		labtest.CheckEven(t, c.allAnswered(t, vip, 900), 3)
		r := c.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 60, 0, 2*time.Second)
		must.True(t, r.Err() == nil && len(r.Servers) == 3, "%s: %s, %v", vip, r, r.Err())
	}
}

func lastEndpoint(t *testing.T, c *cluster, pods ...*pod) {
	byCluster := c.startService(t, "last", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	c.setEndpoints(t, "last")
	c.waitRouted(t, byCluster)
	// Without endpoints, every node refuses connections. The route is withdrawn, so the test adds one.
	c.overrideRoutes(t, byCluster, 1)
	c.waitUnserved(t, byCluster, refused)
	c.setEndpoints(t, "last", pods[0])
	c.waitRouted(t, byCluster, 0, 1, 2)

	byLocal := c.startService(t, "last-local", local, []int{0}, pods[0])
	c.overrideRoutes(t, byLocal, 1) // this node drops the packets, because it has no local endpoint
	c.waitUnserved(t, byLocal, timesOut)
	c.setEndpoints(t, "last-local")
	c.waitUnserved(t, byLocal, refused)
}

func terminatingEndpoints(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "terminating", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 40)
	pods[0].terminating = true
	defer func() { pods[0].terminating = false }()
	c.setEndpoints(t, "terminating", pods[0], pods[1])
	c.waitRouted(t, vips, 1)
	// The packets go through the other node, which forwards them to the pod's node.
	labtest.Exchange(t, conns, "while a pod terminates")
	pods[1].terminating = true
	defer func() { pods[1].terminating = false }()
	c.setEndpoints(t, "terminating", pods[0], pods[1])
	c.waitRouted(t, vips)
	c.overrideRoutes(t, vips, 0)
	c.waitAnswered(t, vips...) // no endpoint is ready, so terminating ones serve (KEP-1669)
}

// udpMoves checks that datagrams from one client port go to the new pod after the old one was removed.
func udpMoves(t *testing.T, c *cluster, pods ...*pod) {
	for _, tt := range []struct {
		policy    func(*core.Service)
		byCluster bool
		nodes     []int
	}{{func(*core.Service) {}, true, []int{0, 1, 2}}, {local, false, []int{0}}} {
		vips := c.startService(t, "udp", tt.policy, tt.nodes, pods[0])
		for _, vip := range vips {
			udpMovesFor(t, c, vip, tt.byCluster, pods...)
		}
		c.deleteService(t, "udp")
	}
}

// udpMovesFor sends datagrams from one port while pods come and go. When a pod no longer serves, another existing pod
// responds.
func udpMovesFor(t *testing.T, c *cluster, vip netip.Addr, byCluster bool, pods ...*pod) {
	t.Helper()
	conn := must.Get(c.Client().Dial(t.Context(), "udp", netip.AddrPortFrom(vip, 5353).String()))(t)
	defer conn.Close()
	answeredBy := func(want *pod) {
		t.Helper()
		labtest.Until(t, want.name+" responds", func() error {
			b := make([]byte, 200)
			conn.SetDeadline(time.Now().Add(300 * time.Millisecond))
			if _, err := conn.Write([]byte("who")); err != nil {
				return err
			}
			n, err := conn.Read(b)
			return errors.Join(err, labtest.ErrorIf(!strings.HasPrefix(string(b[:n]), want.name+" "),
				"answered by %s", b[:n]))
		})
	}
	one, other := *pods[0], *pods[1]
	with := func(all ...*pod) {
		t.Helper()
		c.setEndpoints(t, "udp", all...)
	}
	for range 2 {
		with(&one)
		answeredBy(&one)
		leaving := one
		leaving.terminating = true
		with(&leaving, &other)
		if byCluster { // with Local, the route moves instead
			answeredBy(&one)
		}
		with(&other)
		answeredBy(&other)
		with(&one, &other)
		if byCluster {
			answeredBy(&other)
		}
		down := other
		down.ready = false
		with(&one, &down)
		answeredBy(&one)
	}
}

// stolenAddress covers a user who may create Services, and can therefore write any address into externalIPs.
func stolenAddress(t *testing.T, c *cluster, pods ...*pod) {
	c.createService(t, "thief-before", func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{"203.0.113.210"}
	})
	t.Cleanup(func() { c.deleteService(t, "thief-before") })
	c.setEndpoints(t, "thief-before", pods[1])
	vips := c.startService(t, "victim", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	c.createService(t, "thief", func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, texts(vips)
	})
	t.Cleanup(func() { c.deleteService(t, "thief") })
	c.setEndpoints(t, "thief", pods[1])
	c.updateService(t, "thief-before", func(s *core.Service) { s.Spec.ExternalIPs = texts(vips) })
	c.updateService(t, "victim", func(s *core.Service) { s.Labels = map[string]string{"changed": "yes"} })
	for _, a := range c.Agents {
		labtest.Until(t, "the thieves are refused", func() error {
			out, err := a.CLI(t.Context(), "services")
			if n := strings.Count(out, "belongs to default/victim"); err == nil && n < 2 {
				err = fmt.Errorf("%d refused:\n%s", n, out)
			}
			return err
		})
	}
	for _, vip := range vips {
		r := c.allAnswered(t, vip, 60)
		must.True(t, r.Servers[pods[0].name] == 60, "%s: %s; want all from the pod of the victim", vip, r)
	}
	again := c.waitAddresses(t, "victim")
	must.True(t, slices.Equal(again, vips), "the victim had %v and has %v", vips, again)
}

func texts(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}

// foreignStatus checks that status from another controller or an administrator is adopted or ignored, but never
// overwritten.
func foreignStatus(t *testing.T, c *cluster, pods ...*pod) {
	c.startService(t, "foreign", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	api := c.api.CoreV1().Services("default")
	write := func(ips ...string) *core.Service {
		var s *core.Service
		labtest.Until(t, "the status is written", func() (err error) {
			if s, err = api.Get(t.Context(), "foreign", meta.GetOptions{}); err != nil {
				return err
			}
			s.Status.LoadBalancer.Ingress = nil
			for _, ip := range ips {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, core.LoadBalancerIngress{IP: ip})
			}
			s, err = api.UpdateStatus(t.Context(), s, meta.UpdateOptions{FieldManager: "other"})
			return err
		})
		return s
	}
	written := write("192.0.2.77", "2001:db8:77::1")
	labtest.Until(t, "an Event says whose the address is", func() error {
		of := meta.ListOptions{FieldSelector: "involvedObject.name=foreign,reason=ForeignAddress"}
		list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
		if err == nil && (len(list.Items) == 0 || !strings.Contains(list.Items[0].Message, "was written by other")) {
			err = fmt.Errorf("%+v", list.Items)
		}
		return err
	})
	now, err := api.Get(t.Context(), "foreign", meta.GetOptions{})
	must.True(t, err == nil && now.ResourceVersion == written.ResourceVersion,
		"%v; the Service was written again: %+v", err, now.Status)
	// Restored from a backup, free addresses in the pool are served.
	restored := []netip.Addr{netip.MustParseAddr("203.0.113.222"), netip.MustParseAddr("2001:db8:1::222")}
	write(texts(restored)...)
	c.waitRouted(t, restored, 0, 1, 2)
	c.waitAnswered(t, restored...)
	// Without an address, the Service is assigned one again.
	write()
	labtest.Until(t, "addresses are assigned again", func() error {
		s, err := api.Get(t.Context(), "foreign", meta.GetOptions{})
		return errors.Join(err, labtest.ErrorIf(len(s.Status.LoadBalancer.Ingress) != 2, "%+v", s.Status))
	})
}
