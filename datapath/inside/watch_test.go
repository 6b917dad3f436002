package inside

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// startWatcher starts a watcher beside a service proxy.
func (p *process) startWatcher() *lab.Process {
	p.t.Helper()
	return must.Get(p.host.Start(lab.Command{
		Path: must.Get(os.Executable())(p.t), Env: append(p.env, envWatch+"=1"), Abrupt: true,
	}))(p.t)
}

// waitWatched waits until a watcher runs, or none.
func (p *process) waitWatched(want bool) {
	p.t.Helper()
	labtest.Until(p.t, fmt.Sprint("watched: ", want), func() error {
		var is bool
		p.call("Watched", true, &is)
		return labtest.ErrorIf(is != want, "%v", is)
	})
}

// newPods makes pods as CNIs do: with a route for each, and behind the bridge. It returns when their devices have the
// programs.
func (n *network) newPods(t *testing.T, i int) (names []string) {
	t.Helper()
	routed, bridged := fmt.Sprint("r", i), fmt.Sprint("c", i)
	n.routed(t, n.node, routed, fmt.Sprintf("10.244.3.%d", 4*i), fmt.Sprintf("fd00:244:3:%x::", i))
	n.bridged(t, bridged, 100+i)
	names = []string{routed, bridged}
	for _, name := range names {
		labtest.Until(t, "the device of "+name+" has the programs, long before a container could start", func() error {
			out, err := n.node.Run(t.Context(), "tc", "filter", "show", "dev", "veth-"+name, "ingress")
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "sy_inside_in"), "%q", out))
		})
	}
	return names
}

// first checks that the first packets of a pod reach Services, a SYN and a datagram, which are not sent again.
func first(t *testing.T, h *lab.Host, services ...netip.Addr) {
	t.Helper()
	for _, to := range services {
		udp := must.Get(h.Dial(t.Context(), "udp", netip.AddrPortFrom(to, 53).String()))(t)
		must.Get(udp.Write([]byte("x")))(t)
		must.Do(t, udp.SetReadDeadline(time.Now().Add(waitLong)))
		answer := make([]byte, 100)
		k, err := udp.Read(answer)
		udp.Close()
		must.True(t, err == nil && strings.HasSuffix(string(answer[:k]), " x"), "a datagram from %s to %s: %q, %v", h,
			to, answer[:k], err)
		tcp := must.Get(h.Dial(t.Context(), "tcp", netip.AddrPortFrom(to, 80).String()))(t)
		tcp.Close()
	}
	noSYNLost(t, h)
}

// noSYNLost checks that a host has sent no SYN twice.
func noSYNLost(t *testing.T, h *lab.Host) {
	t.Helper()
	out := must.Get(h.Run(t.Context(), "nstat", "-asz", "TcpExtTCPSynRetrans"))(t)
	fields := strings.Fields(out)
	must.True(t, len(fields) > 1 && fields[len(fields)-2] == "0", "from %s: %s", h, out)
}

// keepAsking asks Services over HTTP and UDP, on new sockets, until stop, which fails if an answer was missing. It asks
// ten times in a second, because UDP flows stay in the table for minutes.
func keepAsking(t *testing.T, h *lab.Host, services ...netip.Addr) (stop func()) {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	g, c := new(errgroup.Group), traffic.From(h)
	for _, to := range services {
		g.Go(func() error {
			for ctx.Err() == nil {
				_, err := c.Get(t.Context(), fmt.Sprintf("http://%s/", netip.AddrPortFrom(to, 80)))
				if err == nil {
					err = c.UDP(t.Context(), netip.AddrPortFrom(to, 53), 1, 1, waitLong).Err()
				}
				if err != nil {
					return err
				}
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
			return nil
		})
	}
	return func() {
		t.Helper()
		end()
		must.Do(t, g.Wait())
		noSYNLost(t, h)
	}
}

// Pods that start while the agent is dead reach Services by their first packets. What they leave is removed when they
// end, and the next agent takes their devices over. Five dead agents lose no packet of pods, new or old.
func TestWatch(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	// As CNIs do. Otherwise the bridge takes the lowest MAC address of its ports, and pods send to the former one.
	must.Get(n.node.Run(t.Context(), "ip", "link", "set", "cni0", "address", "02:00:00:00:00:01"))(t)
	p := prepareProxy(t, n.node, "eth0")
	watcher := p.startWatcher() // waits for an agent
	p.start()
	var rules []lb.NodeRule
	services := []netip.Addr{clusterIP(true, 1), clusterIP(false, 1)}
	for _, to := range services {
		rules = append(rules, n.rule("a:http", to, 80, lb.TCP, "p2", "b2", "q1"),
			n.rule("a:dns", to, 53, lb.UDP, "p2", "b2", "q1"))
	}
	p.apply(rules...)
	p.waitWatched(true)
	stop := keepAsking(t, n.pods["p1"].Host, services...)
	for i := range 5 {
		p.proc.Kill()
		names := n.newPods(t, 2*i)
		for _, name := range names {
			first(t, n.pods[name].Host, services...)
		}
		must.Get(n.node.Run(t.Context(), "ip", "link", "del", "veth-"+names[0]))(t) // as when the pod ends
		p.restart()
		for _, name := range n.newPods(t, 2*i+1) { // beside an agent
			first(t, n.pods[name].Host, services...)
		}
		first(t, n.pods[names[1]].Host, services...)
		p.waitWatched(true)
	}
	stop()
	must.True(t, !watcher.Log.Contains("level=ERROR"), "%s", watcher.Log.Tail(50))
	must.True(t, !p.proc.Log.Contains("level=ERROR"), "%s", p.proc.Log.Tail(50))

	p.cleanup()
	must.True(t, watcher.Running(), "the watcher has ended: %s", watcher.Log.Tail(50))
	n.bridged(t, "last", 200)
	time.Sleep(2 * watchEvery) // in which the watcher must do nothing
	_, err := os.Stat(filepath.Join(p.dir, "bpf", "inside"))
	must.True(t, os.IsNotExist(err), "the watcher has pinned something after the cleanup: %v", err)
	out := must.Get(n.node.Run(t.Context(), "tc", "qdisc"))(t)
	must.True(t, !strings.Contains(out, "clsact"), "attached after the cleanup:\n%s", out)
}

// Two processes that attach the same programs at tcx at once neither fail nor remove each other's pins.
func TestTwoAttach(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if labtest.TCHook(t) != "tcx" {
		t.Skip("this kernel has no tcx")
	}
	n.do(func() error { return os.MkdirAll(pins, 0o700) })
	in, out := n.program("in", slotIn), n.program("out", slotOut)
	process := func() *devices {
		return newDevices(deviceOptions{
			in: in, out: out, devices: n.entries, pins: pins, uplinks: func() []string { return nil },
			log: slog.New(slog.DiscardHandler), begin: func() (func(), error) { return lock(pins), nil },
		})
	}
	both := []*devices{process(), process()}
	for i := range 20 {
		name := fmt.Sprint("v", i)
		n.sh("ip link add %s type veth peer name p%s", name, name)
		n.sh("tc qdisc add dev %s ingress", name)
		g := new(errgroup.Group)
		for _, d := range both {
			g.Go(func() error { return n.Do(d.Sync) })
		}
		must.Do(t, g.Wait())
		must.Equal(t, 2*(i+1), n.pinCount())
	}
}
