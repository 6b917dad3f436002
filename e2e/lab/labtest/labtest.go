// Package labtest has helpers that build a lab in a test, with servers, routers, agents and a control plane. A helper
// that fails ends the test. Everything it builds is closed with the test.
package labtest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Root skips the test if it does not run as root. With STEELYARD_CI set, it fails the test instead, so that CI cannot
// pass by skipping tests.
func Root(t testing.TB) {
	t.Helper()
	switch {
	case testing.Short():
		t.Skip("network namespaces need root, and -short is set")
	case os.Geteuid() == 0:
	case os.Getenv("STEELYARD_CI") != "":
		t.Fatal("network namespaces need root, and STEELYARD_CI is set")
	default:
		t.Skip("network namespaces need root")
	}
}

// New returns an empty lab, closed with the test.
func New(t testing.TB) *lab.Lab {
	t.Helper()
	Root(t)
	l := must.Get(lab.New())(t)
	closeWith(t, l)
	return l
}

// Topology returns the standard network, closed with the test.
func Topology(t testing.TB, s lab.Shape) *lab.Topology {
	t.Helper()
	Root(t)
	topo := must.Get(lab.NewTopology(s))(t)
	closeWith(t, topo.Lab)
	return topo
}

func closeWith(t testing.TB, l *lab.Lab) {
	late := lateness()
	t.Cleanup(func() {
		if most := late(); t.Failed() {
			t.Logf("goroutines of this process were scheduled up to %v late during this test", most)
		}
		if err := l.Close(); err != nil {
			t.Errorf("close the lab: %v", err)
		}
	})
}

// Host adds a host.
func Host(t testing.TB, l *lab.Lab, name string) *lab.Host {
	t.Helper()
	h := must.Get(l.Host(name))(t)
	return h
}

// Router starts a routing daemon on h. If the daemon is not installed, it skips the test, or fails it with STEELYARD_CI
// set. A failed test shows the end of the daemon's log.
func Router(t testing.TB, h *lab.Host, kind peers.RouterKind, c peers.RouterConfig) *peers.Router {
	t.Helper()
	if err := kind.Installed(); err != nil {
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	r := must.Get(peers.StartRouter(t.Context(), h, kind, c))(t)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, p := range r.Processes {
			t.Logf("log of %s in %s:\n%s", kind, h, p.Log.Tail(60))
		}
	})
	return r
}

// Agent starts steelyard on h and waits until it responds. A failed test shows the end of its log and its packet
// counters.
func Agent(t testing.TB, h *lab.Host, binary string, c lab.AgentConfig) *lab.Agent {
	t.Helper()
	a := must.Get(lab.StartAgent(h, lab.AgentOptions{Binary: binary, Config: c.TOML(), Env: c.Env}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the agent of %s:\n%s\nits packet counters:\n%s", h, a.Process().Log.FailureTail(60),
				PacketCounters(a))
		}
	})
	must.Do(t, a.WaitReady(t.Context(), lab.Ready))
	return a
}

// ControlPlane starts a Kubernetes control plane on h, with the programs in dir. If they are missing, it skips the
// test, or fails it with STEELYARD_CI set.
func ControlPlane(t testing.TB, h *lab.Host, address netip.Addr, dir string) *kube.ControlPlane {
	t.Helper()
	if err := kube.Available(dir); err != nil {
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	c := must.Get(kube.StartControlPlane(t.Context(), h, address, dir))(t)
	return c
}

// HTTP starts a web server on a port of a node's addresses.
func HTTP(t testing.TB, n lab.Node, port uint16) *traffic.HTTPServer {
	t.Helper()
	s := must.Get(traffic.ServeHTTP(n.Host, n.Name(), n.At(port)...))(t)
	return s
}

// TCPEcho starts a server for long-lived connections on a port of a node's addresses.
func TCPEcho(t testing.TB, n lab.Node, port uint16) *traffic.TCPEcho {
	t.Helper()
	s := must.Get(traffic.ServeTCPEcho(n.Host, n.Name(), n.At(port)...))(t)
	return s
}

// UDPEcho starts a UDP server on a port of a node's addresses.
func UDPEcho(t testing.TB, n lab.Node, port uint16) *traffic.UDPEcho {
	t.Helper()
	s := must.Get(traffic.ServeUDPEcho(n.Host, n.Name(), n.At(port)...))(t)
	return s
}

// Connect opens n long-lived connections, closed with the test.
func Connect(t testing.TB, from traffic.Client, to netip.AddrPort, n int) *traffic.Conns {
	t.Helper()
	limit := 20*time.Second + time.Duration(n)*20*time.Millisecond // sequentially, on a busy machine
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c := must.Get(from.Connect(ctx, to, n))(t)
	t.Cleanup(c.Close)
	return c
}

// ErrorIf returns an error with this text if bad is true, for functions that Until polls.
func ErrorIf(bad bool, format string, args ...any) error {
	if bad {
		return fmt.Errorf(format, args...)
	}
	return nil
}

// Until polls f until it returns nil, and returns how long that took. It fails the test after lab.Ready. Use Within
// to test how long something takes.
func Until(t testing.TB, what string, f func() error) time.Duration {
	t.Helper()
	return Within(t, lab.Ready, what, f)
}

// Within is Until with its own time limit.
func Within(t testing.TB, within time.Duration, what string, f func() error) time.Duration {
	t.Helper()
	return must.Get(lab.Until(t.Context(), within, what, f))(t)
}

// PacketCounters returns an agent's packet counters that are not 0.
func PacketCounters(a *lab.Agent) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // t.Context() has ended
	defer cancel()
	var text string
	if err := a.Get(ctx, "/metrics", &text); err != nil {
		return err.Error()
	}
	var lines []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "steelyard_datapath_packets_total") && !strings.HasSuffix(line, " 0\n") {
			lines = append(lines, strings.TrimPrefix(line, "steelyard_datapath_packets_total"))
		}
	}
	return strings.Join(lines, "")
}
