package e2e

import (
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
)

// Connections live as long as the pod that they are on, whatever happens to the nodes that they pass.
func TestKubernetesConnectionsLive(t *testing.T) {
	c := newCluster(t, "tunnel", true)
	var pods []*pod
	for i := range 3 {
		pods = append(pods, c.startPod(t, fmt.Sprintf("pod-%d", i), i))
	}
	more := c.startPod(t, "pod-more", 1)
	t.Run("the set of targets changes under load", func(t *testing.T) {
		vips := c.startService(t, "changes", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
		four, six := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 150), labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[1], 9000), 150)
		stream := c.client().Stream(t.Context(), url(vips[0]), 5*time.Millisecond, 2*time.Second)
		var talks []*datagrams
		for _, vip := range vips {
			for range 50 {
				talks = append(talks, newDatagrams(t, c.client(), netip.AddrPortFrom(vip, 5353)))
			}
		}
		c.checkFlowNodes(t, "default/changes")
		now := []*pod{pods[0], pods[1]}
		for i, set := range [][]*pod{{pods[0], pods[1], pods[2]}, {pods[0], pods[1], more}, {pods[0], pods[1], pods[2], more}, {pods[0], pods[1]}} {
			c.replaceEndpoints(t, "changes", now, set)
			now = set
			// What comes while the nodes do not agree yet is to arrive, too.
			for range 5 {
				exchange(t, four, fmt.Sprintf("set %d", i))
				exchange(t, six, fmt.Sprintf("set %d", i))
			}
			time.Sleep(300 * time.Millisecond)
			exchange(t, four, fmt.Sprintf("after set %d", i))
			exchange(t, six, fmt.Sprintf("after set %d", i))
			for _, d := range talks {
				d.stays(t, fmt.Sprintf("after set %d", i))
			}
			c.checkFlowNodes(t, "default/changes")
		}
		stream.Stop()
		if r := stream.Between(time.Time{}, time.Time{}); r.Err() != nil {
			t.Errorf("%v", r.Err())
		}
	})
	t.Run("Local: the router moves connections to other nodes", func(t *testing.T) {
		vips := c.startService(t, "moved", local, []int{0, 1, 2}, pods...)
		var conns []*traffic.Conns
		for _, vip := range vips {
			conns = append(conns, labtest.Connect(t, c.client(), netip.AddrPortFrom(vip, 9000), 100))
		}
		live := func(when string) {
			t.Helper()
			for _, some := range conns {
				exchange(t, some, when)
			}
		}
		pods[0].terminating = true
		c.setEndpoints(t, "moved", pods...)
		c.waitRouted(t, 5*time.Second, vips, 1, 2)
		live("a node is about to lose its pod")
		pods[0].terminating = false
		c.setEndpoints(t, "moved", pods...)
		c.waitRouted(t, 5*time.Second, vips, 0, 1, 2)
		live("it has it again")
	})
	for name, policy := range map[string]struct {
		change func(*core.Service)
		nodes  []int
	}{"Local": {local, []int{0, 1}}, "Cluster": {func(*core.Service) {}, []int{0, 1, 2}}} {
		t.Run("rolling update under load, "+name, func(t *testing.T) {
			service := "rolling-" + strings.ToLower(name)
			vips := c.startService(t, service, policy.change, policy.nodes, pods[0], pods[1])
			next := []*pod{c.startPod(t, "next-0-"+name, 0), c.startPod(t, "next-1-"+name, 1)}
			done := make(chan error, 1)
			go func() {
				r := c.load(t, vips[0], 20_000)
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
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("an ingress node is killed", func(t *testing.T) {
		vips := c.startService(t, "killed-node", func(*core.Service) {}, []int{0, 1, 2}, pods[1], pods[2])
		conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 300)
		if err := c.Balancers[0].PowerOff(); err != nil { // it has no pod of the Service
			t.Fatal(err)
		}
		// Its sessions end when nothing is heard of it any more; until then the router sends packets to nobody.
		c.waitRouted(t, 15*time.Second, vips, 1, 2)
		exchange(t, conns, "after the router has noticed")
	})
}

// replace makes the pods of a Service others, as a rollout does: those that go finish what they have begun.
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

// flowsAtHome checks that a flow is known to no other node than that of its pod, and that some are.
func (c *cluster) checkFlowNodes(t *testing.T, service string) {
	t.Helper()
	var known, streams int
	for i, a := range c.agents {
		var flows struct{ Flows []lb.FlowStatus }
		if err := a.Get(t.Context(), "/v1/flows?service="+service, &flows); err != nil {
			t.Fatal(err)
		}
		four, six := podPrefixes(i)
		for _, f := range flows.Flows {
			known++
			if f.Port == 9000 {
				streams++
			}
			if !four.Contains(f.Backend.Addr()) && !six.Contains(f.Backend.Addr()) {
				t.Errorf("node %d knows a flow of %s", i, f.Backend)
				return
			}
		}
	}
	if known == 0 || streams != 300 {
		t.Errorf("all nodes know %d flows, %d of them of connections; want 300", known, streams)
	}
}

// datagrams is a client that sends from one port and is answered by one pod.
type datagrams struct {
	conn net.Conn
	pod  string
}

func newDatagrams(t *testing.T, from traffic.Client, to netip.AddrPort) *datagrams {
	t.Helper()
	conn, err := from.Dial(t.Context(), "udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	d := &datagrams{conn: conn}
	d.pod = d.ask(t)
	d.ask(t) // it goes on
	return d
}

// ask returns the name of the pod that answers.
func (d *datagrams) ask(t *testing.T) string {
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

func (d *datagrams) stays(t *testing.T, when string) {
	t.Helper()
	if pod := d.ask(t); pod != d.pod {
		t.Errorf("%s: datagrams from %s went to %s, and now to %s", when, d.conn.LocalAddr(), d.pod, pod)
	}
}
