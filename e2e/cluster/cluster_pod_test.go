package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// pod is one server of the cluster.
type pod struct {
	*lab.Host
	name   string
	node   int
	v4, v6 netip.Addr
	web    *traffic.HTTPServer
	ready  bool
	// terminating: the pod terminates and still serves.
	terminating bool
}

func podPrefixes(node int) (v4, v6 netip.Prefix) {
	v4 = netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", node))
	v6 = netip.MustParsePrefix(fmt.Sprintf("fd00:244:%d::/48", node))
	return v4, v6
}

// startPod starts a pod on a node. It becomes an endpoint by setEndpoints.
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

// startServers starts the servers of a pod.
func (p *pod) startServers(t *testing.T) {
	t.Helper()
	at := lab.Node{Host: p.Host, V4: p.v4, V6: p.v6}
	p.web = labtest.HTTP(t, at, 8080)
	labtest.TCPEcho(t, at, 9000)
	labtest.UDPEcho(t, at, 5353)
}
