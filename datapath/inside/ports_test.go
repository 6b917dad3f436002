package inside

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The verifier refuses a program after a million steps. Linux 6.1 takes twice as many as 6.12.
func TestVerifierBudget(t *testing.T) {
	t.Parallel()
	const limit = 400_000
	n := newNode(t)
	var o *prog.Objects
	var values map[string]any
	n.do(func() (err error) {
		values = must.Get(constants(1))(t)
		o, err = load(pins, values, false)
		return err
	})
	defer o.Close()
	tracer := must.Get(trace.Open(trace.Filter{}))(t)
	defer tracer.Close()
	traced := must.Get(loadTraced(tracer, o, values))(t)
	all := append([]*ebpf.Program{o.Arrive, o.Leave, o.Send, o.Connect4, o.Connect6},
		slices.Collect(maps.Values(traced))...)
	must.Equal(t, 8, len(all))
	for _, p := range all {
		info := must.Get(p.Info())(t)
		steps, ok := info.VerifiedInstructions()
		must.True(t, ok && steps <= limit, "%s: the verifier takes %d steps; want at most %d", info.Name, steps, limit)
		t.Logf("%s: %d steps", info.Name, steps)
	}
}

// A SYN that is sent again reaches another endpoint if the first has not answered.
func TestEndpointNeverAnswers(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	to := netip.AddrPortFrom(clusterIP(true, 1), 80)
	silent := n.rule("s:http", to.Addr(), 80, lb.TCP)
	silent.Inside.Endpoints = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.99:8080")} // no machine has it
	for _, pod := range []string{"p1", "b1"} {
		p.apply(silent)
		before := p.entries()
		result := make(chan error, 1)
		go func() {
			c, err := n.pods[pod].Dial(t.Context(), "tcp", to.String())
			if err == nil {
				err = c.Close()
			}
			result <- err
		}()
		for p.entries() == before { // until the first SYN
			time.Sleep(time.Millisecond)
		}
		p.apply(n.rule("s:http", to.Addr(), 80, lb.TCP, "q1"))
		select {
		case err := <-result:
			must.Do(t, err)
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: its SYNs go to the endpoint that has left", pod)
		}
	}
}

// Most of the source ports to one remote endpoint can be in use.
func TestManyMasked(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	must.Get(traffic.ServeTCPEcho(n.pods["q1"].Host, "q1", n.pods["q1"].at(true, 9000)))(t)
	r := n.rule("s:np", netip.IPv4Unspecified(), 30000, lb.TCP, "q1")
	r.Inside.Endpoints[0] = n.pods["q1"].at(true, 9000)
	r.Outside = &r.Inside
	p.apply(r)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for i := range 9000 {
		c, err := n.outside.Dial(ctx, "tcp", netip.AddrPortFrom(nodeV4, 30000).String())
		must.Need(t, err == nil, "connection %d of 10,000 possible ones: %v", i, err)
		defer c.Close()
	}
}

// dialFrom opens a connection from a source port that others may use as well.
func dialFrom(ctx context.Context, h *lab.Host, from, to netip.AddrPort) (conn net.Conn, err error) {
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: 15 * time.Second,
		Control: func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) {
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			})
		},
	}
	return conn, h.Do(func() error { conn, err = d.DialContext(ctx, "tcp", to.String()); return err })
}

// sideBySide opens connections from one source port in each order, and checks that all of them go on.
func sideBySide(t *testing.T, h *lab.Host, from netip.Addr, orders ...[]netip.AddrPort) {
	t.Helper()
	for i, order := range orders {
		var conns []net.Conn
		for _, to := range order {
			conn, err := dialFrom(t.Context(), h, netip.AddrPortFrom(from, uint16(20000+i)), to)
			if err != nil {
				t.Fatalf("order %d, to %s: %v", i, to, err)
			}
			defer conn.Close()
			conns = append(conns, conn)
		}
		for j, conn := range conns {
			must.Get(fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
			must.Do(t, conn.SetReadDeadline(time.Now().Add(15*time.Second)))
			if _, err := conn.Read(make([]byte, 1000)); err != nil {
				t.Errorf("order %d, connection %d: %v", i, j, err)
			}
		}
	}
}

// Another machine uses one source port for connections to a pod and to a node port whose endpoint is that pod.
func TestDirectConnectionsFromOutside(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	var rules []lb.NodeRule
	for i, any := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		for j := range 2 {
			r := n.rule(fmt.Sprintf("s%d%d:np", i, j), any, uint16(30000+j), lb.TCP, "p2")
			r.Outside = &r.Inside
			rules = append(rules, r)
		}
	}
	p.apply(rules...)
	must.Do(t, n.outside.AddRoute(netip.MustParsePrefix("10.244.0.0/16"), nodeV4))
	must.Do(t, n.outside.AddRoute(netip.MustParsePrefix("fd00:244::/32"), nodeV6))
	for _, own := range []netip.Addr{nodeV4, nodeV6} {
		from := map[bool]netip.Addr{true: netip.MustParseAddr("192.0.2.50"), false: netip.MustParseAddr("2001:db8::50")}
		direct := n.pods["p2"].at(own.Is4(), 8080)
		service, another := netip.AddrPortFrom(own, 30000), netip.AddrPortFrom(own, 30001)
		sideBySide(t, n.outside, from[own.Is4()], []netip.AddrPort{service, direct}, []netip.AddrPort{direct, service},
			[]netip.AddrPort{service, another, direct}, []netip.AddrPort{direct, another, service})
	}
}
