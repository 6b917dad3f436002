package inside

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// otherProxy writes rules such as kube-proxy's. Endpoints are p2 and q1.
func (n *network) otherProxy(t *testing.T) {
	t.Helper()
	var b strings.Builder
	for _, f := range []struct {
		name, addr string
		is4        bool
	}{{"ip", "ip daddr", true}, {"ip6", "ip6 daddr", false}} {
		fmt.Fprintf(&b, "table %s kube-proxy {\n chain services {\n", f.name)
		for _, p := range ports {
			to := func(pod string) string {
				at := n.pods[pod].at(f.is4, p.target)
				return fmt.Sprintf("%s . %d", at.Addr(), at.Port())
			}
			dnat := fmt.Sprintf("dnat to numgen random mod 2 map { 0 : %s, 1 : %s }", to("p2"), to("q1"))
			proto := strings.ToLower(p.proto.String())
			fmt.Fprintf(&b, "  %s %s %s dport %d %s\n", f.addr, clusterIP(f.is4, 1), proto, p.port, dnat)
			fmt.Fprintf(&b, "  fib daddr type local %s dport %d meta mark set 0x4000 %s\n", proto, p.nodePort, dnat)
		}
		b.WriteString(` }
 chain pre { type nat hook prerouting priority dstnat; jump services; }
 chain out { type nat hook output priority -100; jump services; }
 chain post { type nat hook postrouting priority srcnat; meta mark 0x4000 masquerade fully-random; }
}
`)
	}
	must.Do(t, n.node.WriteFile("/run/other.nft", b.String(), 0o600))
	must.Get(n.node.Run(t.Context(), "nft", "-f", "/run/other.nft"))(t)
}

func (n *network) removeOtherProxy(t *testing.T) {
	t.Helper()
	must.Get(n.node.Run(t.Context(), "sh", "-c", "nft delete table ip kube-proxy; nft delete table ip6 kube-proxy"))(t)
}

// ports are those of the Service in otherProxy: requests by HTTP, long connections, and datagrams.
var ports = []struct {
	proto                  lb.Protocol
	port, nodePort, target uint16
}{{lb.TCP, 80, 30080, 8080}, {lb.TCP, 90, 30090, 9000}, {lb.UDP, 53, 30053, 5353}}

// talks are conversations with the Service in otherProxy.
type talks struct {
	tcp []*traffic.Conns
	udp []udpTalk
}

type udpTalk struct {
	net.Conn
	answer string
}

// talk opens n conversations by each protocol and family, from each kind of client.
func (n *network) talk(t *testing.T, count int) (all talks) {
	t.Helper()
	for h, to := range n.clients() {
		for _, is4 := range []bool{true, false} {
			all.tcp = append(all.tcp, labtest.Connect(t, traffic.From(h), to(is4, 1), count))
			for range count {
				c := must.Get(h.Dial(t.Context(), "udp", to(is4, 2).String()))(t)
				t.Cleanup(func() { c.Close() })
				all.udp = append(all.udp, udpTalk{c, must.Get(ask(c))(t)})
			}
		}
	}
	return all
}

// clients returns each kind of client, and which address it uses for a port of ports.
func (n *network) clients() map[*lab.Host]func(is4 bool, port int) netip.AddrPort {
	inside := func(is4 bool, i int) netip.AddrPort { return netip.AddrPortFrom(clusterIP(is4, 1), ports[i].port) }
	return map[*lab.Host]func(bool, int) netip.AddrPort{
		n.node: inside, n.pods["p1"].Host: inside, n.pods["b1"].Host: inside,
		n.outside: func(is4 bool, i int) netip.AddrPort {
			if is4 {
				return netip.AddrPortFrom(nodeV4, ports[i].nodePort)
			}
			return netip.AddrPortFrom(nodeV6, ports[i].nodePort)
		},
	}
}

func ask(c net.Conn) (string, error) {
	if _, err := c.Write([]byte("x")); err != nil {
		return "", err
	}
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// goOn uses each conversation, which must still be with the same server.
func (all talks) goOn(t *testing.T, when string) {
	t.Helper()
	for _, c := range all.tcp {
		labtest.Exchange(t, c, when)
	}
	for _, u := range all.udp {
		if got, err := ask(u); err != nil || got != u.answer {
			t.Errorf("%s: UDP from %s to %s: %q after %q, %v", when, u.LocalAddr(), u.RemoteAddr(), got, u.answer, err)
		}
	}
}

func (all talks) end() {
	for _, c := range all.tcp {
		c.Close()
	}
	for _, u := range all.udp {
		u.Close()
	}
}

// load makes requests, from each kind of client, until the returned function is called, which reports failures.
func (n *network) load(t *testing.T, requests int) (done func()) {
	t.Helper()
	var all sync.WaitGroup
	for h, to := range n.clients() {
		for _, is4 := range []bool{true, false} {
			all.Go(func() {
				l := traffic.Load{Requests: requests, Parallel: 4, Timeout: 10 * time.Second}
				l.URL = fmt.Sprintf("http://%s/", to(is4, 0))
				if r := traffic.From(h).Load(t.Context(), l); r.Err() != nil {
					t.Errorf("from %s: %v", h, r.Err())
				}
			})
		}
	}
	return all.Wait
}

// The service proxy takes over from another one and gives back, while clients make requests and have conversations.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	// The kernel tracks and translates connections only for the other proxy.
	must.Get(n.node.Run(t.Context(), "nft", "delete", "table", "inet", "test"))(t)
	// A conversation may pause for as long as this test takes to drain.
	must.Do(t, n.node.Sysctl(map[string]string{
		"net.netfilter.nf_conntrack_udp_timeout": "600", "net.netfilter.nf_conntrack_udp_timeout_stream": "600",
	}))
	// Without a route there is nothing for the other proxy to translate.
	must.Do(t, n.node.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.50")))
	must.Do(t, n.node.AddRoute(lab.Default6, netip.MustParseAddr("2001:db8::50")))
	for _, name := range []string{"p2", "q1"} {
		h := n.pods[name]
		must.Get(traffic.ServeTCPEcho(h.Host, name, h.at(true, 9000), h.at(false, 9000)))(t)
	}
	var rules []lb.NodeRule
	for _, is4 := range []bool{true, false} {
		for _, p := range ports {
			r := n.rule("a:x", clusterIP(is4, 1), p.port, p.proto, "p2", "q1")
			for i := range r.Inside.Endpoints {
				r.Inside.Endpoints[i] = netip.AddrPortFrom(r.Inside.Endpoints[i].Addr(), p.target)
			}
			any := r
			any.Addr, any.Port, any.ClusterIP = netip.IPv6Unspecified(), p.nodePort, false
			if is4 {
				any.Addr = netip.IPv4Unspecified()
			}
			any.Outside = &any.Inside
			rules = append(rules, r, any)
		}
	}
	n.otherProxy(t)
	older := n.talk(t, 13)
	done := n.load(t, 1250)
	p := startProxy(t, n.node, "eth0")
	p.apply(rules...)
	older.goOn(t, "beside the other proxy")
	newer := n.talk(t, 13)
	n.removeOtherProxy(t)
	older.goOn(t, "without the other proxy")
	newer.goOn(t, "without the other proxy")
	done()
	p.restart()
	p.apply(rules...)
	older.goOn(t, "after a restart")
	newer.goOn(t, "after a restart")

	done = n.load(t, 1250)
	n.otherProxy(t)
	p.drain = true
	p.restart()
	p.apply(rules...)
	newer.goOn(t, "while giving back")
	older.goOn(t, "while giving back")
	last := n.talk(t, 13)
	done()
	newer.goOn(t, "before they end")
	newer.end()
	older.end()
	p.call("ForgetUDP", true, new(bool)) // they would be idle for three minutes first
	labtest.Until(t, "nothing is left in the kernel", func() error {
		out, err := n.node.Run(t.Context(), "sh", "-c", "ip link; ip route; tc qdisc; nft list tables")
		for _, gone := range []string{"sy0", "clsact", "proto 83", "inet steelyard-hold"} {
			if err == nil && strings.Contains(out, gone) {
				err = fmt.Errorf("%s is left:\n%s", gone, out)
			}
		}
		return err
	})
	last.goOn(t, "with the other proxy alone")
}

// A UDP socket of the other proxy's time gets another endpoint when its own leaves. When the last of the other proxy's
// connections has ended, nothing is kept for them.
func TestOlderEnd(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	must.Do(t, n.node.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.50")))
	must.Get(traffic.ServeTCPEcho(n.pods["p2"].Host, "p2", n.pods["p2"].at(true, 9000)))(t)
	must.Get(traffic.ServeTCPEcho(n.pods["q1"].Host, "q1", n.pods["q1"].at(true, 9000)))(t)
	must.Do(t, n.node.Sysctl(map[string]string{
		"net.netfilter.nf_conntrack_tcp_timeout_time_wait": "1", "net.netfilter.nf_conntrack_udp_timeout": "1",
		"net.netfilter.nf_conntrack_udp_timeout_stream": "1000",
	}))
	n.otherProxy(t)
	conns := labtest.Connect(t, traffic.From(n.pods["p1"].Host), netip.AddrPortFrom(clusterIP(true, 1), 90), 1)
	u := must.Get(n.pods["p1"].Dial(t.Context(), "udp", netip.AddrPortFrom(clusterIP(true, 1), 53).String()))(t)
	defer u.Close()
	first := must.Get(ask(u))(t)[:2]
	second := map[string]string{"p2": "q1", "q1": "p2"}[first]
	p := startProxy(t, n.node, "eth0")
	echo := n.rule("a:echo", clusterIP(true, 1), 90, lb.TCP, "p2", "q1")
	for i, e := range echo.Inside.Endpoints {
		echo.Inside.Endpoints[i] = netip.AddrPortFrom(e.Addr(), 9000)
	}
	p.apply(echo, n.rule("a:dns", clusterIP(true, 1), 53, lb.UDP, "p2", "q1"))
	n.removeOtherProxy(t)
	must.Equal(t, first+" x", must.Get(ask(u))(t))
	p.apply(echo, n.rule("a:dns", clusterIP(true, 1), 53, lb.UDP, second))
	labtest.Until(t, "another endpoint answers", func() error {
		got, err := ask(u)
		return cmp.Or(err, labtest.ErrorIf(got != second+" x", "%q", got))
	})
	labtest.Exchange(t, conns, "after the UDP endpoint has left")
	tables := func() string { return must.Get(n.node.Run(t.Context(), "nft", "list", "tables"))(t) }
	must.True(t, strings.Contains(tables(), "inet steelyard-hold"), "the table is gone before the last connection")
	conns.Close()
	labtest.Until(t, "the table is gone", func() error {
		all := tables()
		return labtest.ErrorIf(strings.Contains(all, "inet steelyard-hold"), "%s", all)
	})
}

// A connection of the other proxy's time survives the end of its Service, and "nft flush ruleset" is undone.
func TestOlderOutlives(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	must.Get(n.node.Run(t.Context(), "nft", "delete", "table", "inet", "test"))(t)
	must.Do(t, n.node.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.50")))
	for _, name := range []string{"p2", "q1"} {
		must.Get(traffic.ServeTCPEcho(n.pods[name].Host, name, n.pods[name].at(true, 9000)))(t)
	}
	n.otherProxy(t)
	conns := labtest.Connect(t, traffic.From(n.pods["p1"].Host), netip.AddrPortFrom(clusterIP(true, 1), 90), 3)
	p := startProxy(t, n.node, "eth0")
	echo := n.rule("a:echo", clusterIP(true, 1), 90, lb.TCP, "p2", "q1")
	p.apply(echo)
	p.call("FollowOlder", true, new(bool))
	must.Get(n.node.Run(t.Context(), "nft", "delete", "table", "inet", "steelyard-hold"))(t)
	p.apply(n.rule("b:echo", clusterIP(true, 2), 90, lb.TCP, "p2"))
	p.call("FollowOlder", true, new(bool))
	n.removeOtherProxy(t)
	p.call("FollowOlder", true, new(bool))
	labtest.Exchange(t, conns, "without the other proxy, its table flushed and the Service deleted")
}
