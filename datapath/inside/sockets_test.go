package inside

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// sockets returns the sockets of the node's TCP connections.
func (n *network) sockets(t *testing.T) string {
	t.Helper()
	return must.Get(n.node.Run(t.Context(), "ss", "-Htn"))(t)
}

// The agent notices that connections are not translated, although it has attached the programs, and attaches them again
// when they are gone.
func TestSocketsRepaired(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("a:http", clusterIP(true, 1), 80, lb.TCP, "q1"))
	verify := func() (why string) {
		p.call("VerifySockets", true, &why)
		return why
	}
	must.Equal(t, "", verify())
	for _, c := range []struct{ detach, want string }{
		{"connect4", "connection refused"}, {"connect6", "connection refused"}, {"peer4", "getpeername"},
		{"peer6", "getpeername"},
	} {
		p.call("DetachSocket", c.detach, new(bool))
		why := verify()
		must.True(t, strings.Contains(why, c.want), "without %s: %q", c.detach, why)
		var findings []string
		p.call("RepairSockets", true, &findings)
		must.Equal(t, "", verify())
		must.Equal(t, "", strings.Join(findings, "; "))
	}
	conn := must.Get(n.node.Dial(t.Context(), "tcp", netip.AddrPortFrom(clusterIP(true, 1), 80).String()))(t)
	defer conn.Close()
	must.True(t, strings.Contains(n.sockets(t), n.pods["q1"].at(true, 8080).String()), "%s", n.sockets(t))
	must.Equal(t, 0, p.entries())
}

// If the operator wants that, the node's TCP connections to ClusterIPs have flows, as its UDP. Only those to its own
// addresses, whose packets never leave the stack, are opened to an endpoint. Connections of before go on.
func TestNoSocketLB(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	n.serveEcho(t, "q1")
	p := startProxy(t, n.node, "eth0")
	p.apply(n.echo(1, "q1")...)
	before := n.dialEcho(t, 1)
	for _, off := range []bool{true, false} {
		p.env = p.env[:2]
		if off {
			p.env = append(p.env, envPackets+"=1")
		}
		p.restart()
		p.apply(n.echo(1, "q1")...)
		for _, c := range before {
			must.Do(t, askLine(c))
		}
		for _, is4 := range []bool{true, false} {
			entries := p.entries()
			c := must.Get(n.node.Dial(t.Context(), "tcp", netip.AddrPortFrom(clusterIP(is4, 1), 90).String()))(t)
			t.Cleanup(func() { c.Close() })
			must.Do(t, askLine(c))
			before = append(before, c)
			must.Row(t, "entries of a connection to a ClusterIP", map[bool]int{true: 2, false: 0}[off],
				p.entries()-entries)
			entries = p.entries()
			at := netip.AddrPortFrom(map[bool]netip.Addr{true: nodeV4, false: nodeV6}[is4], 30090)
			own := must.Get(n.node.Dial(t.Context(), "tcp", at.String()))(t)
			t.Cleanup(func() { own.Close() })
			must.Do(t, askLine(own))
			must.Row(t, "entries of a connection to a node port", 0, p.entries()-entries)
		}
	}
}
