package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The scenarios in this file follow Kubernetes' own end-to-end tests of Services (test/e2e/network).

// policyChanged checks that routes and the health check node port follow changes between Local and Cluster. The node
// with the endpoint announces the addresses throughout.
func policyChanged(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "policy", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	setFall := func(n int) {
		text := strings.Replace(c.Config[0].TOML(), fmt.Sprintf("\nfall = %d\n", probeFall),
			fmt.Sprintf("\nfall = %d\n", n), 1)
		must.Do(t, c.Agents[0].Configure(text))
		must.Get(c.Agents[0].CLI(context.Background(), "reload"))(t)
	}
	setFall(int(2 * time.Second / probeInterval)) // kube-proxy may take one second to open the port
	t.Cleanup(func() { setFall(probeFall) })
	for range 2 {
		before := c.announcedSince(t, 0, vips)
		s := c.updateService(t, "policy", local)
		c.waitRouted(t, vips, 0)
		c.waitAnswered(t, vips...)
		at := func(node int) string {
			port := uint16(s.Spec.HealthCheckNodePort)
			return fmt.Sprintf("http://%s/healthz", netip.AddrPortFrom(c.Balancers[node].V4, port))
		}
		for node, want := range []int{200, 503, 503} {
			what := fmt.Sprintf("the health check node port of node %d responds with %d", node, want)
			labtest.Until(t, what, func() error {
				got, err := c.Client().Get(t.Context(), at(node))
				return errors.Join(err, labtest.ErrorIf(got.Status != want, "its status is %d", got.Status))
			})
		}
		must.Row(t, "announced by the node with the endpoint since", before, c.announcedSince(t, 0, vips))
		c.updateService(t, "policy", func(s *core.Service) {
			s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyCluster
		})
		c.waitRouted(t, vips, 0, 1, 2)
		c.waitAnswered(t, vips...)
		labtest.Until(t, "the health check node port is closed", func() error {
			_, err := c.Client().Get(t.Context(), at(0))
			return labtest.ErrorIf(err == nil, "it responds")
		})
	}
}

// announcedSince returns since when a node has announced these addresses.
func (c *cluster) announcedSince(t *testing.T, node int, vips []netip.Addr) (since []time.Time) {
	t.Helper()
	out, err := c.Agents[node].CLI(t.Context(), "routes", "-o", "json")
	var routes []lb.RouteStatus
	must.Do(t, errors.Join(err, json.Unmarshal([]byte(out), &routes)))
	for _, r := range routes {
		if slices.Contains(vips, r.Address) && r.Announced {
			since = append(since, r.Since)
		}
	}
	return since
}

// onePortTwice covers TCP and UDP on one port, scaled to zero and back. The address stays.
func onePortTwice(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "twice", func(s *core.Service) { s.Spec.Ports[2].Port = 80 }, []int{0, 1, 2}, pods[0])
	request := func(vip netip.Addr) error {
		r := c.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 80), 20, 0, time.Second)
		return errors.Join(r.Err(), c.Load(t, vip, 20).Err())
	}
	for _, vip := range vips {
		err := request(vip)
		must.True(t, err == nil, "%s: %v", vip, err)
	}
	c.setEndpoints(t, "twice")
	c.waitRouted(t, vips)
	c.overrideRoutes(t, vips, 2)
	c.waitUnserved(t, vips, refused)
	for _, vip := range vips {
		conn := must.Get(c.Client().Dial(t.Context(), "udp", netip.AddrPortFrom(vip, 80).String()))(t)
		defer conn.Close()
		labtest.Until(t, vip.String()+" refuses datagrams", func() error {
			conn.SetDeadline(time.Now().Add(300 * time.Millisecond))
			if _, err := conn.Write([]byte("who")); errors.Is(err, syscall.ECONNREFUSED) {
				return nil
			}
			_, err := conn.Read(make([]byte, 100))
			return labtest.ErrorIf(!errors.Is(err, syscall.ECONNREFUSED), "the read ended with %v", err)
		})
	}
	c.setEndpoints(t, "twice", pods[0], pods[1])
	c.waitRouted(t, vips, 0, 1, 2)
	for _, vip := range vips {
		labtest.Until(t, vip.String()+" is served again", func() error { return request(vip) })
	}
}

// namedPorts covers a named target port with a different number on each pod.
func namedPorts(t *testing.T, c *cluster, pods ...*pod) {
	other := pods[1]
	web := labtest.HTTP(t, lab.Node{Host: other.Host, V4: other.v4, V6: other.v6}, 9090)
	vips := c.startService(t, "named", func(*core.Service) {}, []int{0, 1, 2}, other)
	api := c.api.DiscoveryV1().EndpointSlices("default")
	for _, family := range []string{"4", "6"} {
		s := must.Get(api.Get(t.Context(), "named-"+family, meta.GetOptions{}))(t)
		number := int32(9090)
		s.ObjectMeta = meta.ObjectMeta{Name: "named-more-" + family, Labels: s.Labels}
		s.Ports[0].Port = &number
		must.Get(api.Create(t.Context(), s, meta.CreateOptions{}))(t)
	}
	c.setEndpoints(t, "named", pods[0])
	for _, vip := range vips {
		labtest.Until(t, "both pods respond", func() error {
			r := c.Load(t, vip, 60)
			return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != 2, "%s, %v", r, r.Err())
		})
	}
	must.True(t, len(web.Clients()) > 0, "no request to port 9090")
}

// fromPods checks that pods can reach Services' addresses, even if they are the Service's endpoint, and that the
// endpoint sees their own address. Their node's kube-proxy forwards these packets; the agent must not take them.
func fromPods(t *testing.T, c *cluster, pods ...*pod) {
	for name, x := range map[string]struct {
		change func(*core.Service)
		nodes  []int
	}{"from-pods": {func(*core.Service) {}, []int{0, 1, 2}}, "from-pods-local": {local, []int{1}}} {
		vips := c.startService(t, name, x.change, x.nodes, pods[1])
		for _, from := range pods {
			for _, vip := range vips {
				// Each node's kube-proxy programs the Service some time after the agents.
				labtest.Until(t, fmt.Sprintf("%s: %s replies to %s", name, vip, from.name), func() error {
					load := traffic.Load{URL: labtest.URL(vip), Requests: 10}
					r := traffic.From(from.Host).Load(t.Context(), load)
					return labtest.ErrorIf(r.Err() != nil || r.Servers[pods[1].name] != 10, "%s, %v", r, r.Err())
				})
			}
		}
		if name == "from-pods-local" {
			for _, from := range []netip.Addr{pods[0].v4, pods[2].v6} {
				must.True(t, pods[1].web.Clients()[from] != 0,
					"no request from %s itself, but from %v", from, pods[1].web.Clients())
			}
		}
	}
}

// recreated covers a deleted Service that is created again with the same name.
func recreated(t *testing.T, c *cluster, pods ...*pod) {
	for range 2 {
		vips := c.startService(t, "recreated", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
		c.deleteService(t, "recreated")
		c.waitRouted(t, vips)
		c.waitUnserved(t, vips, anyError)
	}
}

// externalIPs checks that addresses in a pool are announced and served for Services of any type, without source ranges.
func externalIPs(t *testing.T, c *cluster, pods ...*pod) {
	four, six := netip.MustParseAddr("203.0.113.200"), netip.MustParseAddr("2001:db8:1::200")
	vips := []netip.Addr{four, six}
	c.createService(t, "external", func(s *core.Service) {
		s.Spec.Type = core.ServiceTypeClusterIP
		s.Spec.ExternalIPs = []string{four.String(), six.String(), "198.51.100.200"}
	})
	t.Cleanup(func() { c.deleteService(t, "external") })
	c.setEndpoints(t, "external", pods[0], pods[1])
	c.waitRouted(t, vips, 0, 1, 2)
	for _, vip := range vips {
		r := c.allAnswered(t, vip, 100)
		must.True(t, len(r.Servers) == 2, "%s: %s", vip, r)
	}
	c.waitRouted(t, []netip.Addr{netip.MustParseAddr("198.51.100.200")}) // in no pool
	c.updateService(t, "external", func(s *core.Service) {
		s.Spec.Type = core.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = []string{"10.99.0.0/16", "fd99::/64"}
	})
	given := c.waitAddresses(t, "external")
	c.waitRouted(t, given, 0, 1, 2)
	c.waitUnserved(t, given, timesOut)
	c.waitAnswered(t, vips...)
	c.updateService(t, "external", func(s *core.Service) { s.Spec.ExternalIPs = nil })
	c.waitRouted(t, vips)
}

// otherNetworks checks that pods on the host network and pods on a bridge serve like routed pods.
func otherNetworks(t *testing.T, c *cluster, pods ...*pod) {
	node, bridge := c.Balancers[0], c.Balancers[1].Host
	onHost := &pod{Host: node.Host, name: node.Name(), node: 0, v4: node.V4, v6: node.V6, ready: true}
	onHost.startServers(t)
	gw4, gw6 := netip.MustParsePrefix("10.244.1.241/28"), netip.MustParsePrefix("fd00:244:1:ff::1/64")
	must.Do(t, errors.Join(bridge.Bridge("cni0"), bridge.AddAddress("cni0", gw4), bridge.AddAddress("cni0", gw6)))
	all := []*pod{onHost}
	for i := range 2 {
		name := fmt.Sprintf("bridged-%d", i)
		p := &pod{Host: labtest.Host(t, c.Lab, name), name: name, node: 1, ready: true}
		p.v4 = netip.AddrFrom4([4]byte{10, 244, 1, byte(242 + i)})
		p.v6 = netip.MustParseAddr(fmt.Sprintf("fd00:244:1:ff::%d", 2+i))
		addresses := []netip.Prefix{netip.PrefixFrom(p.v4, 28), netip.PrefixFrom(p.v6, 64)}
		err := c.Link(
			lab.End{Host: bridge, Name: p.name, Bridge: "cni0"},
			lab.End{Host: p.Host, Name: "eth0", Addresses: addresses}, lab.LinkOptions{})
		must.Do(t, errors.Join(err, p.AddRoute(lab.Default, gw4.Addr()), p.AddRoute(lab.Default6, gw6.Addr())))
		p.startServers(t)
		all = append(all, p)
	}
	for name, x := range map[string]struct {
		change func(*core.Service)
		nodes  []int
	}{"networks": {func(*core.Service) {}, []int{0, 1, 2}}, "networks-local": {local, []int{0, 1}}} {
		vips := c.startService(t, name, x.change, x.nodes, all...)
		for _, vip := range vips {
			r := c.allAnswered(t, vip, 300)
			must.True(t, len(r.Servers) == 3, "%s: %s: %s", name, vip, r)
			r = c.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 60, 0, 2*time.Second)
			must.True(t, r.Err() == nil && len(r.Servers) == 3, "%s: %s: %s, %v", name, vip, r, r.Err())
		}
		c.checkClientAddress(t, all...)
	}
}

// unknownConnections checks that a packet of a connection without a flow on any node is answered with a reset, on every
// node that receives it directly or from another node.
func unknownConnections(t *testing.T, c *cluster, pods ...*pod) {
	policies := map[string]func(*core.Service){"unknown": func(*core.Service) {}, "unknown-local": local}
	for name, change := range policies {
		vips := c.startService(t, name, change, []int{0, 1, 2}, pods...)
		for _, vip := range vips {
			for range 30 {
				err := c.sendUnknown(netip.AddrPortFrom(vip, 9000))
				must.True(t, errors.Is(err, syscall.ECONNRESET), "%s: %s: ended with %v; want a reset", name, vip, err)
			}
		}
	}
}

// sendUnknown sends data on a connection that was never opened (TCP_REPAIR), and returns the resulting error.
func (c *cluster) sendUnknown(to netip.AddrPort) error {
	return c.Client().Do(func() error {
		var sa unix.Sockaddr
		family, from := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: c.Clients[0].V4.As4()})
		if to.Addr().Is6() {
			family, from = unix.AF_INET6, &unix.SockaddrInet6{Addr: c.Clients[0].V6.As16()}
			sa = &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
		} else {
			sa = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		wait := unix.NsecToTimeval(int64(2 * time.Second))
		repair := func(on int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, on) }
		err = errors.Join(unix.Bind(fd, from), repair(1), unix.Connect(fd, sa), repair(0),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait))
		if err != nil {
			return fmt.Errorf("set up the socket by TCP_REPAIR: %w", err)
		}
		if _, err := unix.Write(fd, []byte("hello")); err != nil {
			return err
		}
		_, err = unix.Read(fd, make([]byte, 10))
		return err
	})
}
