package inside

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
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

// While the agent is away, and when it returns, connections go on and new ones are served. It removes what left in the
// meantime.
func TestAgentRestarts(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	rules := []lb.NodeRule{n.rule("a:echo", clusterIP(true, 1), 80, lb.TCP, "q1"),
		n.rule("b:http", clusterIP(true, 2), 80, lb.TCP, "p2"), n.rule("c:http", clusterIP(true, 3), 80, lb.TCP, "p2")}
	must.Get(traffic.ServeTCPEcho(n.pods["q1"].Host, "q1", n.pods["q1"].at(true, 9000)))(t)
	rules[0].Inside.Endpoints[0] = n.pods["q1"].at(true, 9000)
	p.apply(rules...)
	echo := netip.AddrPortFrom(clusterIP(true, 1), 80)
	var conns []*traffic.Conns
	for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
		conns = append(conns, labtest.Connect(t, traffic.From(h), echo, 5))
	}
	p.proc.Kill()
	for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
		if _, _, err := get(t, h, netip.AddrPortFrom(clusterIP(true, 2), 80)); err != nil {
			t.Errorf("from %s without an agent: %v", h, err)
		}
	}
	p.restart()
	if _, _, err := get(t, n.pods["p1"].Host, netip.AddrPortFrom(clusterIP(true, 3), 80)); err != nil {
		t.Errorf("before the agent has the Services: %v", err)
	}
	p.apply(rules[:2]...)
	for _, c := range conns {
		labtest.Exchange(t, c, "after the restart")
	}
	_, _, err := getWithin(t, n.pods["p1"].Host, netip.AddrPortFrom(clusterIP(true, 3), 80), time.Second)
	must.True(t, err != nil, "a Service that was removed while the agent was away still answers")
	p.cleanup()
	out := must.Get(n.node.Run(t.Context(), "sh", "-c", "ip link; ip route; tc qdisc"))(t)
	for _, gone := range []string{"sy0", "clsact", "proto 83"} {
		if strings.Contains(out, gone) {
			t.Errorf("%s is left:\n%s", gone, out)
		}
	}
}

// The first agent serves some Services even if it never gets all, because one cannot be read.
func TestSomeServices(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	rules := []lb.NodeRule{n.rule("a:http", clusterIP(true, 1), 80, lb.TCP, "p2"),
		n.rule("a:dns", clusterIP(true, 1), 53, lb.UDP, "p2")}
	p.call("Apply", Change{map[string][]lb.NodeRule{"test/a": rules}, false}, new(bool))
	for _, h := range []*lab.Host{n.node, n.pods["p1"].Host} {
		exchange(t, h, clusterIP(true, 1), "p2")
	}
}

// An agent that cannot take over says that the programs of an earlier one still serve.
func TestAgentCannotTakeOver(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("a:http", clusterIP(true, 1), 80, lb.TCP, "p2"))
	p.proc.Kill()
	must.Get(n.node.Run(t.Context(), "sh", "-c", "ip link del sy0 && ip link add sy0 type bridge"))(t)
	next := must.Get(n.node.Start(lab.Command{Path: must.Get(os.Executable())(t), Env: p.env}))(t)
	must.True(t, next.Wait(t.Context()) != nil, "an agent starts beside another's interface sy0")
	text := next.Log.Tail(50)
	must.True(t, strings.Contains(text, "the programs of an earlier agent still serve, with its endpoints"), "%s", text)
	if _, _, err := get(t, n.pods["p1"].Host, netip.AddrPortFrom(clusterIP(true, 1), 80)); err != nil {
		t.Error(err)
	}
}

// A UDP socket whose endpoint left while no agent was running reaches another one.
func TestEndpointLeavesUnseen(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	to := clusterIP(true, 1)
	p.apply(n.rule("a:dns", to, 53, lb.UDP, "p2"))
	u := must.Get(n.pods["p1"].Dial(t.Context(), "udp", netip.AddrPortFrom(to, 53).String()))(t)
	defer u.Close()
	ask := func(want string) {
		t.Helper()
		must.Get(fmt.Fprint(u, "x"))(t)
		must.Do(t, u.SetReadDeadline(time.Now().Add(15*time.Second)))
		b := make([]byte, 100)
		k := must.Get(u.Read(b))(t)
		must.Equal(t, want+" x", string(b[:k]))
	}
	ask("p2")
	p.restart()
	p.apply(n.rule("a:dns", to, 53, lb.UDP, "q1"))
	ask("q1")
}

// Streams of many segments arrive whole, whatever the offloads do.
func TestStreams(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	var rules []lb.NodeRule
	for i, e := range []string{"p2", "b2", "q1", "p1"} {
		for _, is4 := range []bool{true, false} {
			rules = append(rules, n.rule(e+":http", clusterIP(is4, 1+i), 80, lb.TCP, e))
		}
	}
	p.apply(rules...)
	for _, h := range []*lab.Host{n.node, n.pods["p1"].Host, n.pods["b1"].Host} {
		for i := range 4 {
			for _, is4 := range []bool{true, false} {
				url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(clusterIP(is4, 1+i), 80))
				if _, err := traffic.From(h).Upload(t.Context(), url, 20<<20); err != nil {
					t.Errorf("from %s to %s: %v", h, url, err)
				}
			}
		}
	}
}

// Ended connections lose their entries; open ones keep them.
func TestFlowsEnd(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	p.apply(n.rule("a:http", clusterIP(true, 1), 80, lb.TCP, "p2"))
	open := must.Get(n.pods["p1"].Dial(t.Context(), "tcp", netip.AddrPortFrom(clusterIP(true, 1), 80).String()))(t)
	defer open.Close()
	load := traffic.Load{URL: fmt.Sprintf("http://%s/", netip.AddrPortFrom(clusterIP(true, 1), 80)), Requests: 50}
	must.Do(t, traffic.From(n.pods["p1"].Host).Load(t.Context(), load).Err())
	if got := p.entries(); got != 102 {
		t.Errorf("%d entries of 51 flows", got)
	}
	labtest.Until(t, "the ended flows are gone", func() error {
		got := p.entries()
		return labtest.ErrorIf(got != 2, "%d entries", got)
	})
}

func TestIdle(t *testing.T) {
	const none, seen, more = 0, prog.Seen, prog.Seen | prog.Confirmed
	const fin, rst = more | prog.FIN, more | prog.RST
	for _, c := range []struct {
		proto lb.Protocol
		a, b  uint8
		want  time.Duration
	}{
		{lb.TCP, seen, none, 40 * time.Second},
		{lb.TCP, seen, seen, 40 * time.Second}, // a forged SYN was answered
		{lb.TCP, more, seen, 24 * time.Hour},   // the server has nothing to say
		{lb.TCP, more, more, 24 * time.Hour},
		{lb.TCP, fin, more, time.Hour},
		{lb.TCP, more, fin, time.Hour},
		{lb.TCP, fin, fin, 10 * time.Second},
		{lb.TCP, rst, seen, 10 * time.Second},
		{lb.TCP, seen, rst, 10 * time.Second},
		{lb.SCTP, more, more, 24 * time.Hour},
		{lb.UDP, seen, none, 30 * time.Second},
		{lb.UDP, seen, seen, 30 * time.Second},
		{lb.UDP, more, seen, 3 * time.Minute},
	} {
		if got := time.Duration(idle(uint8(c.proto), c.a, c.b)) * time.Second; got != c.want {
			t.Errorf("%s, flags %d and %d: %s, not %s", c.proto, c.a, c.b, got, c.want)
		}
	}
}

// Maps of another layout are replaced, but not their directory, on which another process may have a lock.
func TestOtherLayout(t *testing.T) {
	t.Parallel()
	newNode(t).do(func() error {
		must.Do(t, os.MkdirAll(pins, 0o700))
		other := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 1, ValueSize: 1, MaxEntries: 1}))(t)
		defer other.Close()
		must.Do(t, other.Pin(filepath.Join(pins, "sy_in_services")))
		was := must.Get(os.Stat(pins))(t)
		o := must.Get(load(pins, must.Get(constants(1))(t), false))(t)
		defer o.Close()
		must.True(t, os.SameFile(was, must.Get(os.Stat(pins))(t)), "the directory is another one")
		return nil
	})
}
