package inside

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// echo returns rules for TCP connections to a Service, at a ClusterIP of each family and a node port, with servers of
// their own at these pods.
func (n *network) echo(i int, pods ...string) (rules []lb.NodeRule) {
	for _, is4 := range []bool{true, false} {
		r := n.rule("echo:tcp", clusterIP(is4, i), 90, lb.TCP, pods...)
		for i, at := range r.Inside.Endpoints {
			r.Inside.Endpoints[i] = netip.AddrPortFrom(at.Addr(), 9000)
		}
		any := r
		any.Addr, any.Port, any.ClusterIP = unspecified(r.Addr), 30090, false
		any.Outside = &any.Inside
		rules = append(rules, r, any)
	}
	return rules
}

// serveEcho starts the servers for echo.
func (n *network) serveEcho(t *testing.T, pods ...string) {
	t.Helper()
	for _, name := range pods {
		h := n.pods[name]
		must.Get(traffic.ServeTCPEcho(h.Host, name, h.at(true, 9000), h.at(false, 9000)))(t)
	}
}

// dialEcho opens a connection from each kind of client.
func (n *network) dialEcho(t *testing.T, i int) (all []net.Conn) {
	t.Helper()
	for h, at := range map[*lab.Host]func(is4 bool) netip.AddrPort{
		n.node: nil, n.pods["p1"].Host: nil, n.pods["b1"].Host: nil,
		n.outside: func(is4 bool) netip.AddrPort {
			return netip.AddrPortFrom(map[bool]netip.Addr{true: nodeV4, false: nodeV6}[is4], 30090)
		},
	} {
		for _, is4 := range []bool{true, false} {
			to := netip.AddrPortFrom(clusterIP(is4, i), 90)
			if at != nil {
				to = at(is4)
			}
			c := must.Get(h.Dial(t.Context(), "tcp", to.String()))(t)
			t.Cleanup(func() { c.Close() })
			must.Do(t, askLine(c))
			all = append(all, c)
		}
	}
	return all
}

// askLine exchanges a line with a server of serveEcho.
func askLine(c net.Conn) error {
	if _, err := c.Write([]byte("x\n")); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(15 * time.Second)); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 100))
	return err
}

// areEnded waits until all connections are reset, without sending anything. It returns how long the first one lasted.
func areEnded(t *testing.T, all []net.Conn, within time.Duration) (least time.Duration) {
	t.Helper()
	took, errs := make([]time.Duration, len(all)), make([]error, len(all))
	var g sync.WaitGroup
	for i, c := range all {
		g.Go(func() { took[i], errs[i] = isEnded(c, within) })
	}
	g.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	return slices.Min(took)
}

// isEnded waits until a connection is reset, without sending anything. It returns how long that took.
func isEnded(c net.Conn, within time.Duration) (time.Duration, error) {
	start := time.Now()
	if err := c.SetReadDeadline(start.Add(within)); err != nil {
		return 0, err
	}
	_, err := c.Read(make([]byte, 100))
	took := time.Since(start)
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.ECONNABORTED) {
		return took, fmt.Errorf("%s to %s: %w after %s", c.LocalAddr(), c.RemoteAddr(), err, took.Round(time.Second))
	}
	return took, nil
}

// Clients that only wait for data are told within seconds that the pod of their endpoint has ended. Connections to
// others go on, also to one that is ending.
func TestPodEnds(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	n.serveEcho(t, "p2", "q1", "b2")
	p := startProxy(t, n.node, "eth0")
	for _, ended := range []string{"p2", "q1"} {
		p.apply(n.echo(1, "b2")...)
		stay := n.dialEcho(t, 1)
		p.apply(n.echo(1, ended)...)
		end := n.dialEcho(t, 1)
		ending := n.echo(1, "p1")
		for i, r := range n.echo(1, ended) {
			ending[i].Ending = r.Inside.Endpoints
		}
		p.apply(ending...)
		time.Sleep(3 * time.Second) // what is wrongly ended is, by then
		for _, c := range append(stay, end...) {
			if err := askLine(c); err != nil {
				t.Errorf("%s is ending, %s to %s: %v", ended, c.LocalAddr(), c.RemoteAddr(), err)
			}
		}
		p.apply(n.echo(1, "p1")...)
		areEnded(t, end, 20*time.Second)
		for _, c := range stay {
			if err := askLine(c); err != nil {
				t.Errorf("to an endpoint that has left: %s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
			}
		}
	}
}

// When the pod of an endpoint that has left loses its device, its connections are reset.
func TestPodDeviceGone(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	n.serveEcho(t, "p2", "b2")
	p := startProxy(t, n.node, "eth0")
	p.apply(n.echo(1, "b2")...)
	stay := n.dialEcho(t, 1)
	p.apply(n.echo(1, "p2")...)
	end := n.dialEcho(t, 1)
	p.apply(n.echo(1, "p1")...)
	must.Get(n.node.Run(t.Context(), "ip", "link", "del", "veth-p2"))(t)
	areEnded(t, end, 30*time.Second)
	for _, c := range stay {
		if err := askLine(c); err != nil {
			t.Errorf("%s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}

// Connections end if they get no answer from an endpoint that left, even while no agent was running. Without a request
// there is no answer to miss, and an endpoint that is still listed may return.
func TestEndpointSilent(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	n.serveEcho(t, "q1", "b2")
	p := startProxy(t, n.node, "eth0")
	for restart, pod := range map[bool]string{false: "q1", true: "b2"} {
		p.apply(n.echo(1, pod)...)
		end, idle := n.dialEcho(t, 1), n.dialEcho(t, 1)
		if restart {
			p.restart()
		}
		p.apply(n.echo(1, "p1")...)
		must.Get(n.pods[pod].Run(t.Context(), "ip", "link", "set", "eth0", "down"))(t)
		for _, c := range end {
			must.Get(c.Write([]byte("x")))(t)
		}
		if took := areEnded(t, end, time.Minute); took < 9*time.Second {
			t.Errorf("ended after %s", took)
		}
		for _, c := range idle {
			if _, err := isEnded(c, time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("idle: %v", err)
			}
		}
	}
}
