package inside

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// clusterIP returns the i-th ClusterIP of a family.
func clusterIP(is4 bool, i int) netip.Addr {
	if is4 {
		return netip.AddrFrom4([4]byte{10, 96, 0, byte(i)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i))
}

// get sends one request and returns the name of the server and the client's address as the server sees it.
func get(t *testing.T, h *lab.Host, to netip.AddrPort) (server string, client netip.Addr, err error) {
	t.Helper()
	return getWithin(t, h, to, 15*time.Second)
}

func getWithin(
	t *testing.T, h *lab.Host, to netip.AddrPort, within time.Duration,
) (server string, client netip.Addr, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	a, err := traffic.From(h).Get(ctx, fmt.Sprintf("http://%s/", to))
	return a.Server, a.Client.Addr(), err
}

// dropped reports whether nothing answers a request.
func dropped(t *testing.T, h *lab.Host, to netip.AddrPort) bool {
	t.Helper()
	_, _, err := getWithin(t, h, to, 1500*time.Millisecond)
	return errors.Is(err, context.DeadlineExceeded)
}

// Other machines reach node ports at each of the node's addresses. A local endpoint sees the client's address; another
// node's endpoint sees this node's.
func TestNodePorts(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	var rules []lb.NodeRule
	for i, e := range []string{"p1", "b1", "q1"} {
		for _, is4 := range []bool{true, false} {
			for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
				any := netip.IPv6Unspecified()
				if is4 {
					any = netip.IPv4Unspecified()
				}
				r := n.rule(e+":np", any, uint16(30000+i), proto, e)
				r.Outside = &r.Inside
				rules = append(rules, r)
			}
		}
	}
	empty := n.rule("empty:np", netip.IPv4Unspecified(), 30010, lb.TCP)
	empty.Inside = n.rule("empty:np", netip.IPv4Unspecified(), 30010, lb.TCP, "q1").Inside
	empty.Outside = &lb.NodeChoice{Drop: true}
	refused := n.rule("refused:np", netip.IPv4Unspecified(), 30011, lb.TCP)
	refused.Outside = &lb.NodeChoice{}
	p.apply(append(rules, empty, refused)...)

	for i, e := range []string{"p1", "b1", "q1"} {
		for _, at := range []netip.Addr{nodeV4, nodeV6} {
			to := netip.AddrPortFrom(at, uint16(30000+i))
			for _, from := range []*lab.Host{n.outside, n.pods["p2"].Host, n.pods["b2"].Host, n.other, n.node} {
				server, client, err := get(t, from, to)
				if err != nil || server != e {
					t.Errorf("%s from %s: %v, server %q", to, from, err, server)
				}
				masked := e == "q1" && (from == n.outside || from == n.other || from == n.node)
				if masked != (client == nodeV4 || client == nodeV6) {
					t.Errorf("%s from %s: the endpoint sees %s", to, from, client)
				}
				r := traffic.From(from).UDP(t.Context(), to, 3, 3000, 5*time.Second)
				if err := r.Err(); err != nil || r.Servers[e] != 3 {
					t.Errorf("UDP %s from %s: %v, %s", to, from, err, r)
				}
			}
		}
	}
	if server, _, err := get(t, n.pods["p1"].Host, netip.AddrPortFrom(nodeV4, 30010)); err != nil || server != "q1" {
		t.Errorf("from a pod, policy Local without an endpoint here: %v, %q", err, server)
	}
	if !dropped(t, n.outside, netip.AddrPortFrom(nodeV4, 30010)) {
		t.Error("from outside, policy Local without an endpoint here: answered")
	}
	if _, _, err := get(t, n.outside, netip.AddrPortFrom(nodeV4, 30011)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("from outside, no endpoint: %v", err)
	}
	if _, _, err := get(t, n.outside, netip.AddrPortFrom(nodeV4, 30012)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a port of nobody: %v", err)
	}
}

// Without an endpoint, connections are refused at once or dropped, as the rule says. An unknown port of a ClusterIP is
// refused.
func TestNoEndpoints(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	var rules []lb.NodeRule
	for _, is4 := range []bool{true, false} {
		drop := n.rule("drop:http", clusterIP(is4, 2), 80, lb.TCP)
		drop.Inside.Drop = true
		rules = append(rules, n.rule("refuse:http", clusterIP(is4, 1), 80, lb.TCP),
			n.rule("refuse:dns", clusterIP(is4, 1), 53, lb.UDP), drop)
	}
	p.apply(rules...)
	for _, is4 := range []bool{true, false} {
		for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
			for _, port := range []uint16{80, 81} {
				_, _, err := get(t, h, netip.AddrPortFrom(clusterIP(is4, 1), port))
				if !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("%s, port %d: %v", h, port, err)
				}
			}
			r := traffic.From(h).UDP(t.Context(), netip.AddrPortFrom(clusterIP(is4, 1), 53), 1, 10, 3*time.Second)
			if err := r.Err(); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s, UDP: %v", h, err)
			}
			if !dropped(t, h, netip.AddrPortFrom(clusterIP(is4, 2), 80)) {
				t.Errorf("%s: answered", h)
			}
		}
	}
}

// A process of the node sees the address that it has connected to.
func TestPeerName(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("a:http", clusterIP(true, 7), 80, lb.TCP, "q1"),
		n.rule("a:http", clusterIP(false, 7), 80, lb.TCP, "q1"))
	for _, is4 := range []bool{true, false} {
		to := netip.AddrPortFrom(clusterIP(is4, 7), 80)
		c := must.Get(n.node.Dial(t.Context(), "tcp", to.String()))(t)
		if got := c.RemoteAddr().String(); got != to.String() {
			t.Errorf("the peer of a connection to %s is %s", to, got)
		}
		c.Close()
	}
}

// A client keeps its endpoint for all addresses of a Service's port, and gets another one when that leaves.
func TestAffinity(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	rules := func(pods ...string) (all []lb.NodeRule) {
		for i := range 2 {
			r := n.rule("web:http", clusterIP(true, 20+i), 80, lb.TCP, pods...)
			r.Affinity = time.Hour
			all = append(all, r)
		}
		return all
	}
	p.apply(rules("p1", "p2", "b1", "b2", "q1")...)
	c := n.pods["p2"].Host
	first, _, err := get(t, c, netip.AddrPortFrom(clusterIP(true, 20), 80))
	if err != nil {
		t.Fatal(err)
	}
	p.restart()
	rest := slices.DeleteFunc([]string{"q1", "b2", "b1", "p2", "p1"}, func(s string) bool { return s == first })
	p.apply(rules(append(rest[:3:3], first)...)...)
	for i := range 20 {
		if s, _, err := get(t, c, netip.AddrPortFrom(clusterIP(true, 20+i%2), 80)); err != nil || s != first {
			t.Fatalf("%v, %s after %s", err, s, first)
		}
	}
	p.apply(rules(rest...)...)
	next, _, err := get(t, c, netip.AddrPortFrom(clusterIP(true, 20), 80))
	if err != nil || next == first {
		t.Fatalf("%v, %s", err, next)
	}
	for range 10 {
		if s, _, err := get(t, c, netip.AddrPortFrom(clusterIP(true, 21), 80)); err != nil || s != next {
			t.Fatalf("%v, %s after %s", err, s, next)
		}
	}
}

// Only allowed sources may connect, as the list says now.
func TestAllow(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	to := netip.AddrPortFrom(clusterIP(true, 20), 80)
	p1 := netip.PrefixFrom(n.pods["p1"].v4, 32).String()
	for _, c := range []struct {
		allow  string
		p1, p2 bool
	}{
		{"", true, true}, {p1, true, false}, {p1 + " ::/0", true, false}, {"0.0.0.0/1 128.0.0.0/1 ::/0", true, true},
		{"255.255.255.255/32 ::/0", false, false}, {"10.244.0.0/16", true, true}, {"", true, true},
	} {
		r := n.rule("web:http", clusterIP(true, 20), 80, lb.TCP, "q1")
		all := n.rule("web:http", clusterIP(true, 21), 80, lb.TCP, "q1")
		for _, text := range strings.Fields(c.allow) {
			r.Allow = append(r.Allow, netip.MustParsePrefix(text))
		}
		p.apply(r, all)
		for name, want := range map[string]bool{"p1": c.p1, "p2": c.p2} {
			if !want {
				must.True(t, dropped(t, n.pods[name].Host, to), "allow %q, from %s: answered", c.allow, name)
			} else if _, _, err := get(t, n.pods[name].Host, to); err != nil {
				t.Errorf("allow %q, from %s: %v", c.allow, name, err)
			}
		}
	}
}

// A connected socket, as a resolver has one, reaches another endpoint with its next datagram after its endpoint has
// left, and sees no error. TCP connections stay.
func TestEndpointLeaves(t *testing.T) {
	t.Parallel()
	for _, is4 := range []bool{true, false} {
		endpointLeaves(t, clusterIP(is4, 30))
	}
}

func endpointLeaves(t *testing.T, ip netip.Addr) {
	t.Helper()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	rules := func(pod string) []lb.NodeRule {
		return []lb.NodeRule{n.rule("s:dns", ip, 53, lb.UDP, pod), n.rule("s:echo", ip, 80, lb.TCP, pod)}
	}
	for _, name := range []string{"node", "p1", "b1"} {
		h := n.node
		if name != "node" {
			h = n.pods[name].Host
		}
		p.apply(rules("p2")...)
		u := must.Get(h.Dial(t.Context(), "udp", netip.AddrPortFrom(ip, 53).String()))(t)
		tcp := must.Get(h.Dial(t.Context(), "tcp", netip.AddrPortFrom(ip, 80).String()))(t)
		for i, pod := range []string{"p2", "q1", "b2", "p2"} {
			p.apply(rules(pod)...)
			must.Get(fmt.Fprintf(u, "%d", i))(t)
			must.Do(t, u.SetReadDeadline(time.Now().Add(15*time.Second)))
			b := make([]byte, 100)
			k, err := u.Read(b)
			if want := fmt.Sprintf("%s %d", pod, i); err != nil || string(b[:k]) != want {
				t.Errorf("from %s: %v, %q instead of %q", name, err, b[:k], want)
			}
		}
		must.Get(fmt.Fprint(tcp, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
		must.Do(t, tcp.SetReadDeadline(time.Now().Add(15*time.Second)))
		if _, err := tcp.Read(make([]byte, 100)); err != nil {
			t.Errorf("from %s, TCP: %v", name, err)
		}
		u.Close()
		tcp.Close()
	}
}

// Connections of a pod straight to an address that is also an endpoint are never harmed, whether the same client port
// was or is used for a connection through a Service.
func TestDirectConnections(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("s:http", clusterIP(true, 30), 80, lb.TCP, "p2"),
		n.rule("other:http", clusterIP(true, 31), 80, lb.TCP, "p2"))
	c := n.pods["p1"]
	service, another := netip.AddrPortFrom(clusterIP(true, 30), 80), netip.AddrPortFrom(clusterIP(true, 31), 80)
	direct := n.pods["p2"].at(true, 8080)
	sideBySide(t, c.Host, c.v4, []netip.AddrPort{service, direct}, []netip.AddrPort{direct, service},
		[]netip.AddrPort{service, another}, []netip.AddrPort{service, another, direct},
		[]netip.AddrPort{direct, another, service})
	// Ports that were used through a Service, and then those that are.
	const requests = 5000
	load := func(to netip.AddrPort) error {
		l := traffic.Load{URL: fmt.Sprintf("http://%s/", to), Requests: requests, Timeout: 10 * time.Second}
		return traffic.From(c.Host).Load(t.Context(), l).Err()
	}
	must.Do(t, load(service))
	must.Do(t, load(direct))
	var both errgroup.Group
	both.Go(func() error { return load(service) })
	both.Go(func() error { return load(direct) })
	must.Do(t, both.Wait())
}
