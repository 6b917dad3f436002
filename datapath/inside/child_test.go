package inside

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Environment of a service proxy that runs as a process of its own, in the network namespace of a host.
const (
	envSocket    = "INSIDE_SOCKET"
	envUplinks   = "INSIDE_UPLINKS"
	envCleanup   = "INSIDE_CLEANUP"    // if set, the process removes what others left
	envNodePorts = "INSIDE_NODE_PORTS" // prefixes of the addresses at which node ports answer
	envDrain     = "INSIDE_DRAIN"      // if set, the process drains
	envWatch     = "INSIDE_WATCH"      // if set, the process is a watcher
	envPackets   = "INSIDE_PACKETS"    // if set, NoSocketLB
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(envSocket); socket != "" {
		run := serve
		if os.Getenv(envCleanup) != "" {
			run = func(socket string) error { return Cleanup(pinsOf(socket), slog.Default()) }
		}
		if os.Getenv(envWatch) != "" {
			run = func(socket string) error {
				Watch(context.Background(), pinsOf(socket), slog.New(slog.NewTextHandler(os.Stdout, nil)))
				return nil
			}
		}
		if err := run(socket); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	os.Exit(m.Run())
}

func pinsOf(socket string) string { return filepath.Join(filepath.Dir(socket), "bpf", "inside") }

// serve runs a service proxy until the process is killed.
func serve(socket string) error {
	fs := filepath.Dir(pinsOf(socket))
	if err := os.Mkdir(fs, 0o700); err == nil {
		if err := unix.Mount("bpf", fs, "bpf", 0, "mode=0700"); err != nil {
			return err
		}
	}
	i, err := Open(Options{
		Pins:      pinsOf(socket),
		Uplinks:   func() []string { return strings.Split(os.Getenv(envUplinks), ",") },
		NodePorts: nodePortAddresses(),
		Other:     proxy.Present, Drain: os.Getenv(envDrain) != "",
		NoSocketLB: os.Getenv(envPackets) != "",
		Log:        slog.New(slog.NewTextHandler(os.Stdout, nil)),
	})
	if err != nil {
		return err
	}
	if err := rpc.Register(&Control{i}); err != nil {
		return err
	}
	os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(context.Background())
	g.Go(func() error { return i.Run(ctx) })
	g.Go(func() error { rpc.Accept(l); return nil })
	return g.Wait()
}

func nodePortAddresses() (all []netip.Prefix) {
	for a := range strings.FieldsSeq(os.Getenv(envNodePorts)) {
		all = append(all, netip.MustParsePrefix(a))
	}
	return all
}

// Control is what a test may ask of the process.
type Control struct{ i *Inside }

type Change struct {
	Changed map[string][]lb.NodeRule
	All     bool
}

func (c *Control) Apply(change Change, _ *bool) error { return c.i.Apply(change.Changed, change.All) }

// Time is Apply, and returns how long it took.
func (c *Control) Time(change Change, took *time.Duration) error {
	start := time.Now()
	err := c.i.Apply(change.Changed, change.All)
	*took = time.Since(start)
	return err
}

func (c *Control) Rules(_ bool, rules *[]lb.NodeRule) error {
	*rules = c.i.Rules()
	return nil
}

func (c *Control) Sweep(_ bool, entries *int) (err error) {
	*entries, err = c.i.flows.sweep()
	return err
}

// Metrics returns the values by name and label.
func (c *Control) Metrics(_ bool, values *map[string]float64) error {
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c.i); err != nil {
		return err
	}
	families, err := registry.Gather()
	*values = map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			(*values)[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return err
}

// Explained is the result of Inside.Explain.
type Explained struct {
	E  lb.Explanation
	OK bool
}

func (c *Control) Explain(q lb.Question, x *Explained) (err error) {
	x.E, x.OK, err = c.i.Explain(q)
	return err
}

func (c *Control) Flows(want lb.FlowFilter, flows *[]lb.FlowStatus) (err error) {
	*flows, _, err = c.i.Flows(context.Background(), want)
	return err
}

// Watched reports whether a watcher runs.
func (c *Control) Watched(_ bool, is *bool) (err error) {
	*is, err = Watched(c.i.o.Pins)
	return err
}

// RepairSockets does what Run does every half minute, and returns the findings.
func (c *Control) RepairSockets(_ bool, findings *[]string) error {
	c.i.repairSockets()
	*findings = c.i.Findings()
	return nil
}

// DetachSocket detaches a program for system calls, as another program may.
func (c *Control) DetachSocket(name string, _ *bool) error {
	l, err := link.LoadPinnedLink(filepath.Join(c.i.o.Pins, "link_"+name), nil)
	if err == nil {
		err = errors.Join(l.Detach(), l.Close())
	}
	return err
}

// VerifySockets returns why the node's connections are not translated, or "".
func (c *Control) VerifySockets(_ bool, why *string) error {
	c.i.mu.Lock()
	defer c.i.mu.Unlock()
	if err := c.i.verifySockets(); err != nil {
		*why = err.Error()
	}
	return nil
}

// FollowOlder does what Run does every half minute.
func (c *Control) FollowOlder(_ bool, _ *bool) error { return c.i.followOlder() }

// ForgetUDP removes the UDP flows, as if they were idle.
func (c *Control) ForgetUDP(_ bool, _ *bool) (err error) {
	failed := c.i.flows.each(context.Background(), func(k prog.FlowKey, _ prog.Flow) {
		if k.Proto == uint8(lb.UDP) {
			err = errors.Join(err, c.i.flows.delete(k))
		}
	})
	return errors.Join(err, failed)
}

// Entries returns the number of entries in the table of flows.
func (c *Control) Entries(_ bool, n *int) error {
	return c.i.flows.each(context.Background(), func(prog.FlowKey, prog.Flow) { *n++ })
}

// process is a service proxy on a host.
type process struct {
	t      testing.TB
	host   *lab.Host
	dir    string
	env    []string
	drain  bool
	proc   *lab.Process
	client *rpc.Client
}

func startProxy(t testing.TB, h *lab.Host, uplinks ...string) *process {
	t.Helper()
	p := prepareProxy(t, h, uplinks...)
	p.start()
	return p
}

// prepareProxy returns a service proxy that has not been started.
func prepareProxy(t testing.TB, h *lab.Host, uplinks ...string) *process {
	t.Helper()
	p := &process{t: t, host: h, dir: t.TempDir()}
	t.Cleanup(func() { unix.Unmount(filepath.Join(p.dir, "bpf"), unix.MNT_DETACH) })
	p.env = []string{envSocket + "=" + filepath.Join(p.dir, "socket"), envUplinks + "=" + strings.Join(uplinks, ",")}
	return p
}

func (p *process) start() {
	p.t.Helper()
	env := p.env
	if p.drain {
		env = append(env, envDrain+"=1")
	}
	p.proc = must.Get(p.host.Start(lab.Command{Path: must.Get(os.Executable())(p.t), Env: env, Abrupt: true}))(p.t)
	_, err := lab.Until(p.t.Context(), waitLong, "the service proxy listens", func() (err error) {
		if p.client, err = rpc.Dial("unix", filepath.Join(p.dir, "socket")); err != nil &&
			p.proc.Log.Contains("open the service proxy") {
			return lab.Permanent(err)
		}
		return err
	})
	if err != nil {
		p.t.Fatalf("%v\n%s", err, p.proc.Log.Tail(100))
	}
}

// cleanup kills the process and removes what it left.
func (p *process) cleanup() {
	p.t.Helper()
	p.proc.Kill()
	c := must.Get(p.host.Start(lab.Command{
		Path: must.Get(os.Executable())(p.t), Env: append(p.env, envCleanup+"=1"),
	}))(p.t)
	if err := c.Wait(p.t.Context()); err != nil {
		p.t.Fatalf("%v\n%s", err, c.Log.Tail(50))
	}
}

// restart kills the process and starts another one.
func (p *process) restart() {
	p.t.Helper()
	p.client.Close()
	p.proc.Kill()
	os.Remove(filepath.Join(p.dir, "socket"))
	p.start()
}

func (p *process) call(method string, arg, reply any) {
	p.t.Helper()
	if err := p.client.Call("Control."+method, arg, reply); err != nil {
		p.t.Fatalf("%s: %v\n%s", method, err, p.proc.Log.Tail(50))
	}
}

func (p *process) apply(rules ...lb.NodeRule) {
	p.t.Helper()
	all := map[string][]lb.NodeRule{}
	for _, r := range rules {
		service, _, _ := strings.Cut(r.Name, ":")
		all[service] = append(all[service], r)
	}
	p.call("Apply", Change{all, true}, new(bool))
}

func (p *process) entries() (n int) {
	p.t.Helper()
	p.call("Entries", true, &n)
	return n
}
