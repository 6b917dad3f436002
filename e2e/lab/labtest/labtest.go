// Package labtest is package lab for tests: what cannot be built fails the test, and everything built ends with it.
package labtest

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Root skips the test when it does not run as root; with STEELYARD_CI set it fails instead, for a suite that skips
// everything proves nothing.
func Root(t testing.TB) {
	t.Helper()
	switch {
	case os.Geteuid() == 0:
	case os.Getenv("STEELYARD_CI") != "":
		t.Fatal("network namespaces need root, and STEELYARD_CI forbids to skip")
	default:
		t.Skip("network namespaces need root")
	}
}

// New returns an empty lab that is closed with the test.
func New(t testing.TB) *lab.Lab {
	t.Helper()
	Root(t)
	l, err := lab.New()
	must(t, err)
	closeWith(t, l)
	return l
}

// Topology returns the standard network, closed with the test.
func Topology(t testing.TB, s lab.Shape) *lab.Topology {
	t.Helper()
	Root(t)
	topo, err := lab.NewTopology(s)
	must(t, err)
	closeWith(t, topo.Lab)
	return topo
}

func closeWith(t testing.TB, l *lab.Lab) {
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close the lab: %v", err)
		}
	})
}

// Host adds a host.
func Host(t testing.TB, l *lab.Lab, name string) *lab.Host {
	t.Helper()
	h, err := l.Host(name)
	must(t, err)
	return h
}

// Router starts a routing daemon in h. A daemon that is not installed skips the test, or with STEELYARD_CI fails it. The
// end of its log is shown when the test fails.
func Router(t testing.TB, h *lab.Host, kind lab.RouterKind, c lab.RouterConfig) *lab.Router {
	t.Helper()
	if err := kind.Installed(); err != nil {
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	r, err := lab.StartRouter(t.Context(), h, kind, c)
	must(t, err)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, p := range r.Processes {
			t.Logf("%s of %s said:\n%s", kind, h, p.Log.Tail(60))
		}
	})
	return r
}

// Agent starts a steelyard in h and waits until it answers. The end of its log is shown when the test fails.
func Agent(t testing.TB, h *lab.Host, binary string, c lab.AgentConfig) *lab.Agent {
	t.Helper()
	a, err := lab.StartAgent(h, lab.AgentOptions{Binary: binary, Config: c.TOML(), Env: c.Env})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent of %s said:\n%s\nand counted:\n%s", h, a.Process().Log.LastWords(60), counted(a))
		}
	})
	must(t, a.WaitReady(t.Context(), 15*time.Second))
	return a
}

// ControlPlane starts a Kubernetes control plane in h, whose programs are in dir.
func ControlPlane(t testing.TB, h *lab.Host, address netip.Addr, dir string) *lab.ControlPlane {
	t.Helper()
	if err := lab.HaveControlPlane(dir); err != nil {
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	c, err := lab.StartControlPlane(t.Context(), h, address, dir)
	must(t, err)
	return c
}

// HTTP starts a web server on a port of every address of a node.
func HTTP(t testing.TB, n lab.Node, port uint16) *lab.HTTPServer {
	t.Helper()
	s, err := n.ServeHTTP(n.Name(), n.At(port)...)
	must(t, err)
	return s
}

// TCPEcho starts a server for long-lived connections on a port of every address of a node.
func TCPEcho(t testing.TB, n lab.Node, port uint16) *lab.TCPEcho {
	t.Helper()
	s, err := n.ServeTCPEcho(n.Name(), n.At(port)...)
	must(t, err)
	return s
}

// UDPEcho starts a UDP server on a port of every address of a node.
func UDPEcho(t testing.TB, n lab.Node, port uint16) *lab.UDPEcho {
	t.Helper()
	s, err := n.ServeUDPEcho(n.Name(), n.At(port)...)
	must(t, err)
	return s
}

// Connect opens n long-lived connections, closed with the test.
func Connect(t testing.TB, h *lab.Host, to netip.AddrPort, n int) *lab.Conns {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := h.Connect(ctx, to, n)
	must(t, err)
	t.Cleanup(c.Close)
	return c
}

// Until fails the test when f has not returned nil within a time, and returns how long it took.
func Until(t testing.TB, within time.Duration, what string, f func() error) time.Duration {
	t.Helper()
	took, err := lab.Until(t.Context(), within, what, f)
	must(t, err)
	return took
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// counted returns what an agent has done with packets that it did not leave alone.
func counted(a *lab.Agent) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // the test's own is over
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
