package inside

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An externalIP may be the address of another machine, whose other ports stay reachable.
func TestSharedAddress(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	must.Get(traffic.ServeHTTP(n.other, "other", netip.AddrPortFrom(otherV4, 9090)))(t)
	tcp, udp := n.rule("s:http", otherV4, 80, lb.TCP, "p2"), n.rule("s:dns", otherV4, 53, lb.UDP, "p2")
	tcp.ClusterIP, udp.ClusterIP = false, false
	p.apply(tcp, udp)
	for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
		for port, want := range map[uint16]string{80: "p2", 9090: "other"} {
			if server, _, err := get(t, h, netip.AddrPortFrom(otherV4, port)); err != nil || server != want {
				t.Errorf("%s, port %d: %v, %q", h, port, err, server)
			}
		}
		r := traffic.From(h).UDP(t.Context(), netip.AddrPortFrom(otherV4, 53), 2, 20, 5*time.Second)
		if err := r.Err(); err != nil || r.Servers["p2"] != 2 {
			t.Errorf("%s, UDP: %v, %s", h, err, r)
		}
	}
}

// If an interface of the node has a ClusterIP, as with a node-local DNS cache, packets to it are for the process there,
// also after a restart of the agent.
func TestLocalClusterIP(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	dns := clusterIP(true, 10)
	must.Do(t, n.node.AddAddress("lo", netip.PrefixFrom(dns, 32)))
	must.Get(traffic.ServeUDPEcho(n.node, "cache", netip.AddrPortFrom(dns, 53)))(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("s:dns", dns, 53, lb.UDP, "q1"))
	for _, when := range []string{"at first", "after a restart"} {
		for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
			r := traffic.From(h).UDP(t.Context(), netip.AddrPortFrom(dns, 53), 2, 20, 5*time.Second)
			if err := r.Err(); err != nil || r.Servers["cache"] != 2 {
				t.Errorf("%s, from %s: %v, %s", when, h, err, r)
			}
		}
		p.restart()
	}
}

// The sweep removes a flow only if both of its entries refer to each other.
func TestSweep(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	table := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 40, ValueSize: 48, MaxEntries: 100}))(t)
	direct := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}))(t)
	outside := must.Get(direct.Clone())(t)
	l := flows{table: table, direct: direct, outside: outside}
	client, service := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("10.96.0.1")
	tuple := func(src, dst netip.Addr, sport, dport uint16) prog.Tuple {
		return prog.Tuple{Src: toAddr(src), Dst: toAddr(dst), Sport: sport, Dport: dport}
	}
	open := func(endpoint string, idle uint32, clientFlags, serverFlags uint8) (forward, reply prog.FlowKey) {
		e := netip.MustParseAddr(endpoint)
		forward = prog.FlowKey{T: tuple(client, service, 1000, 80), Proto: 6, Place: prog.Arrives}
		reply = prog.FlowKey{T: tuple(e, client, 8080, 1000), Proto: 6, Place: prog.Leaves}
		must.Do(t, table.Put(forward, prog.Flow{To: tuple(client, e, 1000, 8080), Seen: uptime() - idle,
			Flags: clientFlags, Other: prog.Leaves}))
		must.Do(t, table.Put(reply, prog.Flow{To: tuple(service, client, 80, 1000), Seen: uptime() - idle,
			Flags: serverFlags, Other: prog.Arrives}))
		return forward, reply
	}
	has := func(k prog.FlowKey) bool { return table.Lookup(k, new(prog.Flow)) == nil }
	const seen, rst = prog.Seen, prog.Seen | prog.RST
	// The server ended the first flow. The client opened another one from the same port, which is idle.
	_, earlier := open("10.244.1.6", 20, seen, rst)
	forward, reply := open("10.244.1.10", 15, seen, seen)
	must.Get(l.sweep())(t)
	must.True(t, !has(earlier) && has(forward) && has(reply), "the sweep removed a live flow, or kept what was left")
	open("10.244.1.10", 200, seen, 0) // the server never answered
	must.Get(l.sweep())(t)
	must.True(t, !has(forward) && !has(reply), "a flow that nobody answered is left")
}

// Node ports answer only at the configured addresses. Processes answer at the others.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	second := netip.MustParseAddr("192.0.2.11")
	must.Do(t, n.node.AddAddress("eth0", netip.PrefixFrom(second, 24)))
	must.Get(traffic.ServeHTTP(n.node, "process", netip.AddrPortFrom(second, 30000)))(t)
	p := prepareProxy(t, n.node, "eth0")
	p.env = append(p.env, envNodePorts+"="+netip.PrefixFrom(nodeV4, 32).String())
	p.start()
	r := n.rule("a:np", netip.IPv4Unspecified(), 30000, lb.TCP, "p1")
	r.Outside = &r.Inside
	p.apply(r)
	for _, from := range []*lab.Host{n.outside, n.pods["p2"].Host, n.node} {
		for at, want := range map[netip.Addr]string{nodeV4: "p1", second: "process"} {
			if server, _, err := get(t, from, netip.AddrPortFrom(at, 30000)); err != nil || server != want {
				t.Errorf("%s from %s: %v, server %q, not %q", at, from, err, server, want)
			}
		}
	}
}
