package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestKubernetesConnections checks that connections stay on their pods while endpoints, routes and nodes change.
func TestKubernetesConnections(t *testing.T) {
	c := newCluster(t, "tunnel", true)
	var pods []*pod
	for i := range 3 {
		pods = append(pods, c.startPod(t, fmt.Sprintf("pod-%d", i), i))
	}
	t.Run("the set of endpoints changes under load", func(t *testing.T) { c.endpointsChange(t, pods) })
	t.Run("Local: the router moves connections to other nodes", func(t *testing.T) { c.routerMoves(t, pods) })
	for name, policy := range map[string]struct {
		change func(*core.Service)
		nodes  []int
	}{"Local": {local, []int{0, 1}}, "Cluster": {func(*core.Service) {}, []int{0, 1, 2}}} {
		t.Run("rolling update under load, "+name, func(t *testing.T) {
			service := "roll-" + strings.ToLower(name)
			vips := c.startService(t, service, policy.change, policy.nodes, pods[0], pods[1])
			c.rollingUpdate(t, service, vips[0], pods)
		})
	}
	// These scenarios are last because the nodes stay powered off.
	t.Run("an ingress node loses power", func(t *testing.T) { c.ingressNodeFails(t, pods) })
	t.Run("the node of a pod loses power", func(t *testing.T) { c.podNodeFails(t, pods) })
}

func (c *cluster) endpointsChange(t *testing.T, pods []*pod) {
	more := c.startPod(t, "pod-more", 1)
	vips := c.startService(t, "changes", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
	four := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 150)
	six := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[1], 9000), 150)
	stream := c.Client().Stream(t.Context(), labtest.URL(vips[0]), 5*time.Millisecond, 2*time.Second)
	var udp []*datagrams
	for _, vip := range vips {
		for range 50 {
			udp = append(udp, newDatagrams(t, c.Client(), netip.AddrPortFrom(vip, 5353)))
		}
	}
	c.checkFlowNodes(t, "default/changes")
	now := []*pod{pods[0], pods[1]}
	for i, set := range [][]*pod{
		{pods[0], pods[1], pods[2]}, {pods[0], pods[1], more}, {pods[0], pods[1], pods[2], more}, {pods[0], pods[1]},
	} {
		c.replaceEndpoints(t, "changes", now, set)
		now = set
		// Connections also survive while the nodes have different sets of endpoints.
		for range 5 {
			labtest.Exchange(t, four, fmt.Sprintf("set %d", i))
			labtest.Exchange(t, six, fmt.Sprintf("set %d", i))
		}
		time.Sleep(300 * time.Millisecond)
		labtest.Exchange(t, four, fmt.Sprintf("after set %d", i))
		labtest.Exchange(t, six, fmt.Sprintf("after set %d", i))
		for _, d := range udp {
			d.stays(t, fmt.Sprintf("after set %d", i))
		}
		c.checkFlowNodes(t, "default/changes")
	}
	stream.Stop()
	must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
}

func (c *cluster) routerMoves(t *testing.T, pods []*pod) {
	vips := c.startService(t, "moved", local, []int{0, 1, 2}, pods...)
	var conns []*traffic.Conns
	for _, vip := range vips {
		conns = append(conns, labtest.Connect(t, c.Client(), netip.AddrPortFrom(vip, 9000), 100))
	}
	exchangeAll := func(when string) {
		t.Helper()
		for _, some := range conns {
			labtest.Exchange(t, some, when)
		}
	}
	pods[0].terminating = true
	c.setEndpoints(t, "moved", pods...)
	c.waitRouted(t, vips, 1, 2)
	exchangeAll("while the pod of a node terminates")
	pods[0].terminating = false
	c.setEndpoints(t, "moved", pods...)
	c.waitRouted(t, vips, 0, 1, 2)
	exchangeAll("while it is ready again")
}

// rollingUpdate replaces both pods of a Service, like a Deployment, while requests arrive at a VIP.
func (c *cluster) rollingUpdate(t *testing.T, service string, vip netip.Addr, pods []*pod) {
	next := []*pod{c.startPod(t, service+"-0", 0), c.startPod(t, service+"-1", 1)}
	done := make(chan error, 1)
	go func() {
		r := c.Load(t, vip, 20_000)
		done <- r.Err()
	}()
	time.Sleep(300 * time.Millisecond)
	c.setEndpoints(t, service, pods[0], pods[1], next[0], next[1])
	time.Sleep(500 * time.Millisecond)
	pods[0].terminating, pods[1].terminating = true, true
	c.setEndpoints(t, service, pods[0], pods[1], next[0], next[1])
	time.Sleep(time.Second)
	c.setEndpoints(t, service, next...)
	pods[0].terminating, pods[1].terminating = false, false
	must.Do(t, <-done)
}

// tunnelIsFiltered has a firewall drop the tunnel packets from node 2 to node 0. In the meantime, node 2 sends no new
// connections there, but node 1 does.
func (c *cluster) tunnelIsFiltered(t *testing.T, vips []netip.Addr) {
	from, to := c.Balancers[2], c.Balancers[0]
	// A node that has never answered is not avoided: it may lack the VIP. Nodes 1 and 2 probe node 0 equally often.
	answers := func() (n float64) {
		const series = `steelyard_datapath_packets_total{action="echo",reason="echo_reply"} `
		_, _ = fmt.Sscanf(strings.TrimPrefix(labtest.Metrics(t, c.Agents[0], series), series), "%g", &n)
		return n
	}
	before := answers()
	labtest.Until(t, "node 0 has answered", func() error {
		return labtest.ErrorIf(answers() < before+16, "%g answers", answers()-before)
	})
	for _, line := range []string{
		"add table bridge firewall", "add chain bridge firewall forward { type filter hook forward priority 0 ; }",
		fmt.Sprintf("add rule bridge firewall forward ip saddr %s ip daddr %s udp dport 6090 drop", from.V4, to.V4),
	} {
		must.Get(c.Topology.Switch.Run(t.Context(), "nft", strings.Fields(line)...))(t)
	}
	c.avoids(t, 2, 0, vips)
	time.Sleep(2 * time.Second) // in the meantime, the probes are chosen again
	c.avoids(t, 2, 0, vips)
	must.Do(t, labtest.ErrorIf(c.finding(t, 1, lb.FoundNodeUnreachable) != "", "node 1 avoids a node"))
	must.Get(c.Topology.Switch.Run(t.Context(), "nft", "delete", "table", "bridge", "firewall"))(t)
	labtest.Until(t, "node 2 uses node 0 again", func() error {
		return labtest.ErrorIf(c.finding(t, 2, lb.FoundNodeUnreachable) != "", "it does not")
	})
}

// avoids waits until a node reports that it avoids another one, and checks that all its clients are served. This takes
// 0.9 to 1.2 s, three probes; the limit allows for a busy machine.
func (c *cluster) avoids(t *testing.T, node, other int, vips []netip.Addr) {
	t.Helper()
	took := labtest.Within(t, 2500*time.Millisecond, "a node is avoided", func() error {
		text := c.finding(t, node, lb.FoundNodeUnreachable)
		return labtest.ErrorIf(!strings.Contains(text, c.Balancers[other].Name()), "%q", text)
	})
	t.Logf("node %d avoids node %d after %s", node, other, took.Round(time.Millisecond))
	for _, vip := range vips {
		c.allAnswered(t, vip, 60)
	}
}

// finding returns the text of a finding from a node's agent, or "".
func (c *cluster) finding(t *testing.T, node int, kind *lb.FindingKind) string {
	t.Helper()
	var i admin.Info
	must.Do(t, c.Agents[node].Get(t.Context(), "/v1/status", &i))
	for _, f := range i.Findings {
		if f.Code == kind.Code {
			return f.Text
		}
	}
	return ""
}

func (c *cluster) ingressNodeFails(t *testing.T, pods []*pod) {
	spread := c.startService(t, "spread", func(*core.Service) {}, []int{0, 1, 2}, pods...)
	c.overrideRoutes(t, spread, 2)
	c.tunnelIsFiltered(t, spread)
	vips := c.startService(t, "failed-node", func(*core.Service) {}, []int{0, 1, 2}, pods[1], pods[2])
	conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 300)
	if err := c.Balancers[0].PowerOff(); err != nil { // it has no pod of the Service
		t.Fatal(err)
	}
	c.avoids(t, 2, 0, spread) // without help from Kubernetes
	// The router removes the node's routes after the hold time. Until then, packets to the node are lost.
	c.waitRouted(t, vips, 1, 2)
	labtest.Exchange(t, conns, "after the router has removed its routes")
}

// podNodeFails powers off a pod's node, after node 0. Datagrams of flows that the other node relayed to it go to
// another pod once Kubernetes has marked the pod.
func (c *cluster) podNodeFails(t *testing.T, pods []*pod) {
	vips := c.startService(t, "lost-pod", func(*core.Service) {}, []int{1, 2}, pods[1])
	var flows []*datagrams
	for range 20 {
		for _, vip := range vips {
			flows = append(flows, newDatagrams(t, c.Client(), netip.AddrPortFrom(vip, 5353)))
		}
	}
	c.setEndpoints(t, "lost-pod", pods[1], pods[2])
	c.waitAnswered(t, vips...)
	for _, f := range flows {
		f.stays(t, "with another pod")
	}
	must.Do(t, c.Balancers[1].PowerOff())
	c.waitRouted(t, vips, 2)
	pods[1].ready = false
	c.setEndpoints(t, "lost-pod", pods[1], pods[2])
	for _, f := range flows {
		labtest.Until(t, pods[2].name+" responds", func() error {
			f.conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
			if _, err := f.conn.Write([]byte("who")); err != nil {
				return err
			}
			b := make([]byte, 200)
			n, err := f.conn.Read(b)
			return errors.Join(err, labtest.ErrorIf(!strings.HasPrefix(string(b[:n]), pods[2].name+" "),
				"answered by %s", b[:n]))
		})
	}
}

// replaceEndpoints replaces a Service's pods like a rollout: the old ones are first terminating for half a second.
func (c *cluster) replaceEndpoints(t *testing.T, service string, now, next []*pod) {
	t.Helper()
	both := slices.Clone(next)
	for _, p := range now {
		if !slices.Contains(next, p) {
			p.terminating = true
			both = append(both, p)
		}
	}
	c.setEndpoints(t, service, both...)
	time.Sleep(500 * time.Millisecond)
	c.setEndpoints(t, service, next...)
	for _, p := range now {
		p.terminating = false
	}
}

// checkFlowNodes fails the test if a node has a flow of a pod on another node, or if any of the 300 connections has no
// flow.
func (c *cluster) checkFlowNodes(t *testing.T, service string) {
	t.Helper()
	var flowCount, connections int
	for i, a := range c.Agents {
		var flows struct{ Flows []lb.FlowStatus }
		must.Do(t, a.Get(t.Context(), "/v1/flows?service="+service, &flows))
		four, six := podPrefixes(i)
		for _, f := range flows.Flows {
			flowCount++
			if f.Port == 9000 {
				connections++
			}
			if !four.Contains(f.Backend.Addr()) && !six.Contains(f.Backend.Addr()) {
				t.Errorf("node %d has a flow of %s", i, f.Backend)
				return
			}
		}
	}
	must.True(t, flowCount > 0 && connections == 300,
		"the nodes have %d flows, %d of connections; want 300 of connections", flowCount, connections)
}

// datagrams is a UDP client that sends from one port. pod is the first pod that responded.
type datagrams struct {
	conn net.Conn
	pod  string
}

func newDatagrams(t *testing.T, from traffic.Client, to netip.AddrPort) *datagrams {
	t.Helper()
	conn := must.Get(from.Dial(t.Context(), "udp", to.String()))(t)
	t.Cleanup(func() { conn.Close() })
	d := &datagrams{conn: conn}
	d.pod = d.request(t)
	d.request(t) // a second datagram confirms the flow
	return d
}

// request sends a datagram and returns the responding pod's name.
func (d *datagrams) request(t *testing.T) string {
	t.Helper()
	b := make([]byte, 200)
	d.conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := d.conn.Write([]byte("who")); err != nil {
		t.Error(err)
		return ""
	}
	n, err := d.conn.Read(b)
	if err != nil {
		t.Error(err)
	}
	name, _, _ := strings.Cut(string(b[:n]), " ")
	return name
}

// stays fails the test unless the same pod responds as the first time.
func (d *datagrams) stays(t *testing.T, when string) {
	t.Helper()
	pod := d.request(t)
	must.True(t, pod == d.pod, "%s: datagrams from %s went to %s, and go to %s", when, d.conn.LocalAddr(), d.pod, pod)
}
