package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Prefixes of all VIPs, and the routing table of packets from them.
const vips4, vips6, vipsTable = "203.0.113.0/24", "2001:db8:1::/64", "100"

// sourceRules checks that replies of local and remote pods leave by the VIPs' network. This is eth1 on each node; the
// default route leads through eth0, where the router drops packets from VIPs.
func sourceRules(t *testing.T, c *cluster, pods ...*pod) {
	nodes, remove := c.addVIPNetwork(t)
	defer remove()
	for name, policy := range map[string]func(*core.Service){"cluster": func(*core.Service) {}, "local": local} {
		c.createService(t, "rules-"+name, policy)
		t.Cleanup(func() { c.deleteService(t, "rules-"+name) })
		vips := c.waitAddresses(t, "rules-"+name)
		c.setEndpoints(t, "rules-"+name, pods...)
		c.waitRouted(t, vips, 0, 1, 2)
		for i, n := range nodes {
			want := []string{pods[i].name}
			if name == "cluster" {
				want = []string{pods[0].name, pods[1].name, pods[2].name}
			}
			t.Run(name+" by "+n.Name(), func(t *testing.T) {
				c.routeThrough(t, vips, n)
				for _, vip := range vips {
					c.answeredBy(t, vip, want)
				}
				if name == "local" { // otherwise, the pod may be on another node
					c.leavesBy(t, i, vips, "eth1")
				}
			})
		}
	}
}

// answeredBy waits until 100 of 100 requests are answered, by exactly these pods.
func (c *cluster) answeredBy(t *testing.T, vip netip.Addr, pods []string) {
	t.Helper()
	labtest.Until(t, fmt.Sprintf("%s is answered by %v", vip, pods), func() error {
		r := c.Client().Load(t.Context(), traffic.Load{URL: labtest.URL(vip), Requests: 100, Timeout: 4 * time.Second})
		for _, p := range pods {
			if r.Servers[p] == 0 {
				return fmt.Errorf("%s: %s, %w", p, r, r.Err())
			}
		}
		return errors.Join(r.Err(), labtest.ErrorIf(len(r.Servers) != len(pods), "%s", r))
	})
}

// leavesBy checks that "explain" names the interface by which replies leave a node.
func (c *cluster) leavesBy(t *testing.T, node int, vips []netip.Addr, name string) {
	t.Helper()
	for i, client := range []netip.Addr{c.Clients[0].V4, c.Clients[0].V6} {
		labtest.Until(t, "explain names the way out", func() error {
			at := netip.AddrPortFrom(vips[i], 80).String()
			out, err := c.Agents[node].CLI(t.Context(), "explain", client.String(), at)
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "sent to the client by "+name), "%s", out))
		})
	}
}

// addVIPNetwork links every node to the router a second time, and returns the nodes with their addresses there. Routing
// rules send packets from VIPs through that link, and the router drops them on others. remove undoes this.
func (c *cluster) addVIPNetwork(t *testing.T) (nodes []lab.Node, remove func()) {
	t.Helper()
	router := c.Topology.Router
	var undo []func()
	for i, n := range c.Balancers {
		at4, at6 := netip.AddrFrom4([4]byte{10, 9, byte(i)}), netip.MustParseAddr(fmt.Sprintf("fd00:9:%d::", i))
		via := lab.Node{Host: n.Host, Gateway4: at4.Next(), Gateway6: at6.Next(),
			V4: at4.Next().Next(), V6: at6.Next().Next()}
		end := func(h *lab.Host, name string, v4, v6 netip.Addr) lab.End {
			of := []netip.Prefix{netip.PrefixFrom(v4, 30), netip.PrefixFrom(v6, 64)}
			return lab.End{Host: h, Name: name, Addresses: of}
		}
		must.Do(t, c.Link(end(n.Host, "eth1", via.V4, via.V6),
			end(router, fmt.Sprint("vips", i), via.Gateway4, via.Gateway6), lab.LinkOptions{}))
		run(t, n.Host, "ip route add default via "+via.Gateway4.String()+" table "+vipsTable)
		run(t, n.Host, "ip -6 route add default via "+via.Gateway6.String()+" table "+vipsTable)
		run(t, n.Host, "ip rule add from "+vips4+" table "+vipsTable)
		run(t, n.Host, "ip -6 rule add from "+vips6+" table "+vipsTable)
		config := c.Config[i]
		config.Interfaces = []string{"eth0", "eth1"}
		c.restartWith(t, i, config)
		undo = append(undo, func() {
			c.restartWith(t, i, c.Config[i])
			run(t, n.Host, "ip link del eth1") // with its routes
			run(t, n.Host, "ip rule del from "+vips4+" table "+vipsTable)
			run(t, n.Host, "ip -6 rule del from "+vips6+" table "+vipsTable)
		})
		nodes = append(nodes, via)
	}
	run(t, router, "nft add table inet strict")
	run(t, router, "nft add chain inet strict in { type filter hook prerouting priority -300 ; }")
	run(t, router, "nft add rule inet strict in ip saddr "+vips4+" iifname != vips* drop")
	run(t, router, "nft add rule inet strict in ip6 saddr "+vips6+" iifname != vips* drop")
	return nodes, func() {
		run(t, router, "nft delete table inet strict")
		for _, f := range undo {
			f()
		}
	}
}

// restartWith restarts an agent with this configuration, without an end of its routes.
func (c *cluster) restartWith(t *testing.T, node int, config lab.AgentConfig) {
	t.Helper()
	a := c.Agents[node]
	must.Do(t, errors.Join(a.EndForRestart(t.Context(), 20*time.Second), a.Configure(config.TOML()), a.Start(),
		a.WaitReady(t.Context(), lab.Ready)))
}

// run runs a command without quoted arguments on a host.
func run(t *testing.T, h *lab.Host, command string) {
	t.Helper()
	args := strings.Fields(command)
	must.Get(h.Run(t.Context(), args[0], args[1:]...))(t)
}
