package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func sourceRanges(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "ranges", local, []int{0}, pods[0])
	only := func(ranges ...string) {
		c.updateService(t, "ranges", func(s *core.Service) { s.Spec.LoadBalancerSourceRanges = ranges })
	}
	only("10.0.0.0/8", "2001:db8:dead::/48")
	c.waitUnserved(t, vips, timesOut)
	only("198.51.100.0/24", "2001:db8:100::/64")
	c.waitAnswered(t, vips...)
	only("255.0.0.0/32") // without an IPv6 range, IPv6 is unrestricted
	c.waitUnserved(t, vips[:1], timesOut)
	c.waitAnswered(t, vips[1])
	only()
	c.waitAnswered(t, vips...)
}

func affinity(t *testing.T, c *cluster, pods ...*pod) {
	for _, policy := range []func(*core.Service){func(*core.Service) {}, local} {
		vips := c.startService(t, "affinity", policy, []int{0, 1, 2}, pods...)
		served := func(vip netip.Addr, want func(servers map[string]int) bool) {
			t.Helper()
			labtest.Until(t, "requests have the servers that affinity demands", func() error {
				r := c.Load(t, vip, 40)
				return labtest.ErrorIf(r.Err() != nil || !want(r.Servers), "%s, %w", r, r.Err())
			})
		}
		change := func(mode core.ServiceAffinity) {
			t.Helper()
			c.updateService(t, "affinity", func(s *core.Service) {
				s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = mode, nil
			})
		}
		for range 2 {
			change(core.ServiceAffinityClientIP)
			for _, vip := range vips {
				served(vip, func(servers map[string]int) bool { return len(servers) == 1 })
			}
			change(core.ServiceAffinityNone)
			for _, vip := range vips {
				served(vip, func(servers map[string]int) bool { return len(servers) == 3 })
			}
		}
		// A client keeps its pod when others are added on any node.
		change(core.ServiceAffinityClientIP)
		for _, first := range pods {
			c.setEndpoints(t, "affinity", first)
			for _, vip := range vips {
				served(vip, func(servers map[string]int) bool { return len(servers) == 1 && servers[first.name] > 0 })
			}
			c.setEndpoints(t, "affinity", pods...)
			c.waitRouted(t, vips, 0, 1, 2)
			for _, vip := range vips {
				if r := c.Load(t, vip, 40); r.Err() != nil || r.Servers[first.name] == 0 || len(r.Servers) != 1 {
					t.Errorf("pods were added: %s, %v; want %s", r, r.Err(), first.name)
				}
			}
		}
		c.deleteService(t, "affinity")
	}
}

// algorithms checks that an annotation selects pods by the client's address, and that a wrong value changes nothing.
func algorithms(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "algorithm", func(*core.Service) {}, []int{0, 1, 2}, pods...)
	for _, tt := range []struct {
		value string
		pods  int
	}{{"source-hash", 1}, {"fastest", 1}, {"round-robin", 3}, {"", 3}} {
		c.updateService(t, "algorithm", func(s *core.Service) {
			s.Annotations = map[string]string{"steelyard.dev/algorithm": tt.value}
		})
		for _, vip := range vips {
			labtest.Until(t, fmt.Sprintf("with %q, %d pods answer", tt.value, tt.pods), func() error {
				r := c.Load(t, vip, 40)
				return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != tt.pods, "%s, %w", r, r.Err())
			})
		}
	}
	c.deleteService(t, "algorithm")
}

// announceFrom checks that routers prefer nodes with endpoints if an annotation says so, and that the other nodes serve
// when these are gone.
func announceFrom(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "from", func(*core.Service) {}, []int{0, 1, 2}, pods[:2]...)
	annotate := func(value string) {
		c.updateService(t, "from", func(s *core.Service) {
			s.Annotations = map[string]string{"steelyard.dev/announce-from": value}
		})
	}
	annotate("endpoints")
	c.waitRouted(t, vips, 0, 1)
	c.waitAnswered(t, vips...)
	out, err := c.Agents[2].CLI(t.Context(), "status")
	must.True(t, err == nil && !strings.Contains(out, "lower preference"), "%v\n%s", err, out)
	for _, a := range c.Agents[:2] {
		must.Do(t, a.Terminate(t.Context(), 20*time.Second))
	}
	c.waitRouted(t, vips, 2)
	for _, a := range c.Agents[:2] {
		must.Do(t, a.Start())
	}
	c.waitRouted(t, vips, 0, 1)
	annotate("")
	c.waitRouted(t, vips, 0, 1, 2)
	c.deleteService(t, "from")
}

// portRanges checks that an annotation extends a UDP port to 1,000 ports, which reach the pods of all nodes, and that a
// wrong value changes nothing.
func portRanges(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "ranges", func(*core.Service) {}, []int{0, 1, 2}, pods...)
	ports := []uint16{5353, 5853, 6352}
	for _, p := range pods {
		for _, port := range ports[1:] {
			labtest.UDPEcho(t, lab.Node{Host: p.Host, V4: p.v4, V6: p.v6}, port)
		}
	}
	for _, value := range []string{"5353-6352/UDP", "5000-6352/UDP"} {
		c.updateService(t, "ranges", func(s *core.Service) {
			s.Annotations = map[string]string{"steelyard.dev/port-ranges": value}
		})
		if value == "5000-6352/UDP" {
			labtest.Until(t, "the Event WrongAnnotation", func() error {
				is := meta.ListOptions{FieldSelector: "involvedObject.name=ranges,reason=WrongAnnotation"}
				events, err := c.api.CoreV1().Events("default").List(t.Context(), is)
				return errors.Join(err, labtest.ErrorIf(err == nil && len(events.Items) == 0, "there is none"))
			})
		}
		for _, vip := range vips {
			for _, port := range ports {
				c.askUDP(t, netip.AddrPortFrom(vip, port), len(pods))
			}
		}
	}
	c.updateService(t, "ranges", func(s *core.Service) { s.Annotations = nil })
	c.askUDP(t, netip.AddrPortFrom(vips[0], 5853), 0)
	c.askUDP(t, netip.AddrPortFrom(vips[0], 5353), len(pods))
	c.deleteService(t, "ranges")
}

// askUDP waits until n pods have answered 40 clients of a UDP port.
func (c *cluster) askUDP(t *testing.T, at netip.AddrPort, n int) {
	t.Helper()
	labtest.Until(t, fmt.Sprintf("%d pods answer at %s", n, at), func() error {
		names := map[string]bool{}
		for range 40 {
			conn, err := c.Client().Dial(t.Context(), "udp", at.String())
			if err != nil {
				return err
			}
			b := make([]byte, 200)
			conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
			conn.Write([]byte("who"))
			if k, err := conn.Read(b); err == nil {
				name, _, _ := strings.Cut(string(b[:k]), " ")
				names[name] = true
			}
			conn.Close()
		}
		return labtest.ErrorIf(len(names) != n, "%d", len(names))
	})
}

func typeChanges(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "types", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	api := c.api.CoreV1().Services("default")
	has := func(finalized bool, addresses int) func() error {
		return func() error {
			s, err := api.Get(t.Context(), "types", meta.GetOptions{})
			if err != nil {
				return err
			}
			ingress := s.Status.LoadBalancer.Ingress
			has := slices.Contains(s.Finalizers, "service.kubernetes.io/load-balancer-cleanup")
			return labtest.ErrorIf(has != finalized || len(ingress) != addresses,
				"finalizers %v, addresses %v", s.Finalizers, ingress)
		}
	}
	labtest.Until(t, "it has the finalizer", has(true, 2))
	s := must.Get(api.Get(t.Context(), "types", meta.GetOptions{}))(t)
	ingress := s.Status.LoadBalancer.Ingress
	must.True(t, ingress[0].IPMode != nil && *ingress[0].IPMode == core.LoadBalancerIPModeVIP,
		"ingress %+v; want ipMode VIP", ingress)
	c.updateService(t, "types", func(s *core.Service) { s.Spec.Ports[0].Port = 81 })
	labtest.Until(t, "the new port is served", func() error {
		at := fmt.Sprintf("http://%s/", netip.AddrPortFrom(vips[0], 81))
		return c.Client().Load(t.Context(), traffic.Load{URL: at, Requests: 20}).Err()
	})
	c.updateService(t, "types", func(s *core.Service) { s.Spec.Ports[0].Port = 80 })
	c.waitAnswered(t, vips...)
	again := c.waitAddresses(t, "types")
	must.True(t, slices.Equal(again, vips), "addresses %v became %v", vips, again)
	c.updateService(t, "types", func(s *core.Service) { s.Spec.Type = core.ServiceTypeClusterIP })
	labtest.Until(t, "the finalizer and the addresses are removed", has(false, 0))
	c.waitRouted(t, vips)
	c.waitUnserved(t, vips, anyError)
	c.updateService(t, "types", func(s *core.Service) { s.Spec.Type = core.ServiceTypeLoadBalancer })
	vips = c.waitAddresses(t, "types")
	c.waitRouted(t, vips, 0, 1, 2)
	c.waitAnswered(t, vips...)
	c.deleteService(t, "types")
	c.waitRouted(t, vips)
}

func noNodePorts(t *testing.T, c *cluster, pods ...*pod) {
	no, yes := false, true
	without := func(s *core.Service) { s.Spec.AllocateLoadBalancerNodePorts = &no }
	vips := c.startService(t, "portless", without, []int{0, 1, 2}, pods[0])
	s := c.updateService(t, "portless", func(s *core.Service) { s.Spec.AllocateLoadBalancerNodePorts = &yes })
	must.True(t, s.Spec.Ports[0].NodePort != 0, "no node port was allocated")
	c.waitAnswered(t, vips...)
	again := c.waitAddresses(t, "portless")
	must.True(t, slices.Equal(again, vips), "addresses %v became %v", vips, again)
}

// shared covers two Services with policy Local that share an address and have their pods on different nodes.
func shared(t *testing.T, c *cluster, pods ...*pod) {
	share := func(port int32) func(*core.Service) {
		return func(s *core.Service) {
			local(s)
			s.Annotations = map[string]string{"metallb.io/allow-shared-ip": "one"}
			s.Spec.Ports = s.Spec.Ports[:1]
			s.Spec.Ports[0].Port = port
		}
	}
	c.createService(t, "shared-a", share(80))
	t.Cleanup(func() { c.deleteService(t, "shared-a") })
	first := c.waitAddresses(t, "shared-a")
	c.createService(t, "shared-b", share(8081))
	t.Cleanup(func() { c.deleteService(t, "shared-b") })
	second := c.waitAddresses(t, "shared-b")
	must.Need(t, slices.Equal(first, second), "addresses %v and %v; want the same", first, second)
	c.setEndpoints(t, "shared-a", pods[0])
	c.setEndpoints(t, "shared-b", pods[1])
	c.waitRouted(t, first, 0, 1) // the union of their nodes
	for _, vip := range first {
		for port, p := range map[uint16]*pod{80: pods[0], 8081: pods[1]} {
			at := fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port))
			r := c.Client().Load(t.Context(), traffic.Load{URL: at, Requests: 60})
			must.True(t, r.Err() == nil && r.Servers[p.name] == 60,
				"%s port %d: %s, %v; want all from %s", vip, port, r, r.Err(), p.name)
			c.checkClientAddress(t, p)
		}
	}
}

func otherProxies(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "labelled", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	for _, label := range []string{"service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"} {
		c.updateService(t, "labelled", func(s *core.Service) { s.Labels = map[string]string{label: "other"} })
		c.waitRouted(t, vips)
		c.updateService(t, "labelled", func(s *core.Service) { s.Labels = nil })
		c.waitRouted(t, vips, 0, 1, 2)
		c.waitAnswered(t, vips...)
	}
}

// oneFamily covers a Service for which kube-proxy opens the health check node port in only one family.
func oneFamily(t *testing.T, c *cluster, pods ...*pod) {
	for _, family := range []core.IPFamily{core.IPv4Protocol, core.IPv6Protocol} {
		name, single := "only-"+strings.ToLower(string(family)), core.IPFamilyPolicySingleStack
		c.startService(t, name, func(s *core.Service) {
			local(s)
			s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = &single, []core.IPFamily{family}
		}, []int{pods[0].node}, pods[0])
	}
}

func refusedAddresses(t *testing.T, c *cluster, pods ...*pod) {
	taken := c.startService(t, "first", func(*core.Service) {}, []int{0, 1, 2}, pods[0])[0].String()
	for name, x := range map[string]struct{ request, want string }{
		"taken":         {taken, "belongs to default/first, and cannot be shared with it because both have port"},
		"not-in-a-pool": {"192.0.2.77", "192.0.2.77 is in no pool"},
	} {
		c.createService(t, name, func(s *core.Service) {
			s.Annotations = map[string]string{"steelyard.dev/addresses": x.request}
		})
		t.Cleanup(func() { c.deleteService(t, name) })
		labtest.Until(t, "an Event has the reason", func() error {
			of := meta.ListOptions{FieldSelector: "involvedObject.name=" + name}
			list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
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
		labtest.Until(t, "the services of a node have the reason", func() error {
			out, err := c.Agents[0].CLI(t.Context(), "services")
			if err == nil && !(strings.Contains(out, "no address: ") && strings.Contains(out, x.want)) {
				err = errors.New(out)
			}
			return err
		})
		c.updateService(t, name, func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/pol": "x"} })
		c.waitAddresses(t, name)
		labtest.Until(t, "the condition is true, and an Event names the annotation", func() error {
			s, err := c.api.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{})
			if err != nil {
				return err
			}
			of := meta.ListOptions{FieldSelector: "reason=UnknownAnnotation,involvedObject.name=" + name}
			list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
			if n := s.Status.Conditions; err == nil && (len(n) != 1 || n[0].Status != meta.ConditionTrue ||
				len(list.Items) != 1) {
				err = fmt.Errorf("%+v, %d Events", n, len(list.Items))
			}
			return err
		})
	}
	requested := c.startService(t, "requested", func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/loadBalancerIPs": "203.0.113.77, 2001:db8:1::77"}
	}, []int{0, 1, 2}, pods[0])
	must.True(t, fmt.Sprint(requested) == "[203.0.113.77 2001:db8:1::77]",
		"requested 203.0.113.77 and 2001:db8:1::77, got %v", requested)
}
