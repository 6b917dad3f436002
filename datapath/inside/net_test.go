package inside

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const waitLong = time.Minute

// network is a node with two routed pods and two pods behind a bridge, another node with a pod, and a machine outside
// of the cluster. The nodes drop packets that connection tracking calls invalid, and check sources strictly.
type network struct {
	lab                  *lab.Lab
	node, other, outside *lab.Host
	pods                 map[string]*pod
}

type pod struct {
	*lab.Host
	v4, v6 netip.Addr
	http   *traffic.HTTPServer
	udp    *traffic.UDPEcho
}

func (p *pod) at(is4 bool, port uint16) netip.AddrPort {
	if is4 {
		return netip.AddrPortFrom(p.v4, port)
	}
	return netip.AddrPortFrom(p.v6, port)
}

var (
	nodeV4, nodeV6   = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	otherV4, otherV6 = netip.MustParseAddr("192.0.2.20"), netip.MustParseAddr("2001:db8::20")
)

const strict = `
table inet test {
	chain forward { type filter hook forward priority 0; ct state invalid counter drop; }
	chain input { type filter hook input priority 0; ct state invalid counter drop; }
	chain post { type nat hook postrouting priority 100; }
}`

func newNetwork(t *testing.T) *network {
	t.Helper()
	l := labtest.New(t)
	n := &network{lab: l, pods: map[string]*pod{}}
	lan := labtest.Host(t, l, "lan")
	must.Do(t, lan.Bridge("br0"))
	attach := func(name, v4, v6 string) *lab.Host {
		h := labtest.Host(t, l, name)
		must.Do(t, l.Link(
			lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{
				netip.MustParsePrefix(v4 + "/24"), netip.MustParsePrefix(v6 + "/64")}},
			lab.End{Host: lan, Name: name, Bridge: "br0"}, lab.LinkOptions{}))
		must.Do(t, h.Sysctl(map[string]string{
			"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1",
			"net.ipv4.conf.all.rp_filter": "1", "net.ipv4.conf.default.rp_filter": "1",
		}))
		return h
	}
	n.node = attach("node", nodeV4.String(), nodeV6.String())
	n.other = attach("other", otherV4.String(), otherV6.String())
	n.outside = attach("outside", "192.0.2.50", "2001:db8::50")
	for _, h := range []*lab.Host{n.node, n.other} {
		must.Do(t, h.WriteFile("/run/strict.nft", strict, 0o600))
		must.Get(h.Run(t.Context(), "nft", "-f", "/run/strict.nft"))(t)
	}
	must.Do(t, n.node.Bridge("cni0"))
	for _, a := range []string{"10.244.2.1/24", "fd00:244:2::1/64"} {
		must.Do(t, n.node.AddAddress("cni0", netip.MustParsePrefix(a)))
	}
	must.Do(t, n.node.SetUp("cni0"))
	for i, name := range []string{"p1", "p2"} {
		n.routed(t, n.node, name, fmt.Sprintf("10.244.1.%d", 4*i), fmt.Sprintf("fd00:244:1:%d::", i))
	}
	for i, name := range []string{"b1", "b2"} {
		n.bridged(t, name, i+2)
	}
	n.routed(t, n.other, "q1", "10.244.9.0", "fd00:244:9::")
	route := func(h *lab.Host, to string, via netip.Addr) {
		must.Do(t, h.AddRoute(netip.MustParsePrefix(to), via))
	}
	route(n.node, "10.244.9.0/24", otherV4)
	route(n.node, "fd00:244:9::/48", otherV6)
	route(n.other, "10.244.0.0/16", nodeV4)
	route(n.other, "fd00:244::/32", nodeV6)
	return n
}

// routed adds a pod on a link of its own. The first address after prefix is the node's.
func (n *network) routed(t *testing.T, node *lab.Host, name, v4, v6 string) {
	t.Helper()
	p, gateways, err := n.link(labtest.Host(t, n.lab, name), node, netip.MustParseAddr(v4), netip.MustParseAddr(v6))
	must.Do(t, err)
	n.serve(t, name, p, gateways[0], gateways[1])
}

// link makes a host a pod of a node, on a link of its own, and returns the node's addresses.
func (n *network) link(h, node *lab.Host, v4, v6 netip.Addr) (p *pod, gateways [2]netip.Addr, err error) {
	host4, host6 := v4.Next(), v6.Next()
	p = &pod{Host: h, v4: host4.Next(), v6: host6.Next()}
	return p, [2]netip.Addr{host4, host6}, n.lab.Link(
		lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{
			netip.PrefixFrom(p.v4, 30), netip.PrefixFrom(p.v6, 64)}},
		lab.End{Host: node, Name: "veth-" + h.Name(), Addresses: []netip.Prefix{
			netip.PrefixFrom(host4, 30), netip.PrefixFrom(host6, 64)}},
		lab.LinkOptions{})
}

// bridged adds a pod behind the bridge cni0.
func (n *network) bridged(t *testing.T, name string, i int) {
	t.Helper()
	h := labtest.Host(t, n.lab, name)
	p := &pod{Host: h, v4: netip.AddrFrom4([4]byte{10, 244, 2, byte(i)}),
		v6: netip.MustParseAddr(fmt.Sprintf("fd00:244:2::%d", i))}
	must.Do(t, n.lab.Link(
		lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{
			netip.PrefixFrom(p.v4, 24), netip.PrefixFrom(p.v6, 64)}},
		lab.End{Host: n.node, Name: "veth-" + name, Bridge: "cni0"},
		lab.LinkOptions{}))
	n.serve(t, name, p, netip.MustParseAddr("10.244.2.1"), netip.MustParseAddr("fd00:244:2::1"))
}

func (n *network) serve(t *testing.T, name string, p *pod, gateway4, gateway6 netip.Addr) {
	t.Helper()
	must.Do(t, p.AddRoute(lab.Default, gateway4))
	must.Do(t, p.AddRoute(lab.Default6, gateway6))
	http, udp := []netip.AddrPort{}, []netip.AddrPort{}
	for _, is4 := range []bool{true, false} {
		http, udp = append(http, p.at(is4, 8080)), append(udp, p.at(is4, 5353))
	}
	p.http = must.Get(traffic.ServeHTTP(p.Host, name, http...))(t)
	p.udp = must.Get(traffic.ServeUDPEcho(p.Host, name, udp...))(t)
	n.pods[name] = p
}

// rule returns a rule for a Service with these pods as endpoints. Its TCP port is served by port 8080 of the pods, its
// UDP port by 5353.
func (n *network) rule(name string, addr netip.Addr, port uint16, proto lb.Protocol, pods ...string) lb.NodeRule {
	r := lb.NodeRule{Name: "test/" + name, Addr: addr, Port: port, Protocol: proto, ClusterIP: !addr.IsUnspecified()}
	target := uint16(8080)
	if proto == lb.UDP {
		target = 5353
	}
	for _, p := range pods {
		r.Inside.Endpoints = append(r.Inside.Endpoints, n.pods[p].at(addr.Is4(), target))
	}
	return r
}
