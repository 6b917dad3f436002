package bfd_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Two routers with the same addresses, on different devices of the node: each has its own sessions, which fail and come
// back alone. The second device comes later, and once more after it was removed.
func TestDevices(t *testing.T) {
	const multiplier = 10 // on a busy machine, 3 packets may be late
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	node := labtest.Host(t, l, "node")
	var routers []*peers.Router
	link := func(n int, router *lab.Host) {
		t.Helper()
		must.Do(t, l.Link(end(node, fmt.Sprintf("eth%d", n), 2), end(router, "eth0", 1), lab.LinkOptions{}))
	}
	start := func(n int, kind peers.RouterKind, h *lab.Host) {
		t.Helper()
		link(n, h)
		routers = append(routers, startRouter(t, h, kind, multiplier))
	}
	start(0, peers.BIRD, labtest.Host(t, l, "bird"))
	m := must.Get(bfd.New(bfd.Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}))(t)
	var neighbors []bfd.Neighbor
	for _, device := range []string{"eth0", "eth1"} {
		for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
			n := fast(netip.MustParseAddr(a))
			n.Device, n.Multiplier = device, multiplier
			neighbors = append(neighbors, n)
		}
	}
	m.Set(neighbors)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- node.Do(func() error { return m.Run(ctx) }) }()
	var up []time.Time // of the sessions with the first router
	are := func(first, second bfd.State, problem string) {
		t.Helper()
		labtest.Until(t, 20*time.Second, fmt.Sprintf("%v and %v, %q", first, second, problem), func() error {
			up = nil
			for i, s := range m.Sessions() {
				want, because := first, ""
				if i < 2 {
					up = append(up, s.Since)
				} else {
					want, because = second, problem
				}
				if s.State != want || s.Problem != because {
					return fmt.Errorf("session %d: %+v, discarded: %v", i, s, m.Discarded())
				}
			}
			return nil
		})
	}
	const missing = "bind to device eth1: no such device"
	are(bfd.Up, bfd.Down, missing)
	before := up
	second := labtest.Host(t, l, "frr")
	start(1, peers.FRR, second)
	are(bfd.Up, bfd.Up, "")
	signal := func(r *peers.Router, s syscall.Signal) {
		t.Helper()
		for _, d := range r.Processes {
			must.Do(t, d.Signal(s))
		}
	}
	signal(routers[1], syscall.SIGSTOP)
	are(bfd.Up, bfd.Down, "")
	signal(routers[1], syscall.SIGCONT)
	are(bfd.Up, bfd.Up, "")
	must.Get(node.Run(t.Context(), "ip", "link", "del", "eth1"))(t)
	are(bfd.Up, bfd.Down, missing)
	link(1, second)
	are(bfd.Up, bfd.Up, "")
	for i, since := range before {
		if !up[i].Equal(since) {
			t.Errorf("session %d with the first router is up since %v, was since %v", i, up[i], since)
		}
	}
	signal(routers[0], syscall.SIGSTOP)
	are(bfd.Down, bfd.Up, "")
	signal(routers[0], syscall.SIGCONT)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
