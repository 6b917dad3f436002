package scale

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// Applied is Apply's result for a number of services.
type Applied struct {
	Size string
	// First is the time until all services are in the kernel.
	First time.Duration
	// P50 and P99 are the times to apply a change of one service's backend, from the Service to the kernel.
	P50, P99 time.Duration
	CPU      time.Duration // of this process, per change
	Changes  int
	// KernelMemory is the memory of all maps, in bytes, as accounted by the kernel.
	KernelMemory uint64
}

type size struct {
	name                      string
	services, backends, nodes int // the backends are on this many nodes, over which flows are spread
}

var sizes = []size{
	{"1 service × 10 backends", 1, 10, 0},
	{"100 services × 10 backends", 100, 10, 0},
	{"1,000 services × 10 backends", 1000, 10, 0},
	{"10,000 services × 10 backends", 10_000, 10, 0},
	{"1 service × 10,000 backends", 1, 10_000, 0},
	{"1 service × 1,000 backends on 1,000 nodes", 1, 1000, 1000},
	{"10,000 services × 10 backends on 10 nodes", 10_000, 10, 10},
}

// Apply measures changes of the datapath. Each size has its own host and process, because all threads of Run must be in
// the host's network. program is this one, which calls ApplyHere if its argument is argument and an index.
func Apply(program, argument string, log io.Writer) (all []Applied, err error) {
	for i, s := range sizes {
		fmt.Fprintf(log, "%s\n", s.name)
		a := Applied{Size: s.name}
		if err := a.start(program, fmt.Sprint(argument, i)); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		all = append(all, a)
	}
	return all, nil
}

func (a *Applied) start(program, argument string) (err error) {
	l, err := lab.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	h, err := l.Host("node")
	if err != nil {
		return err
	}
	if err := addRouter(l, h); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	text, err := h.Run(ctx, program, argument)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), a)
}

// ApplyHere measures size i in this process's network, and writes the result as JSON.
func ApplyHere(i int, w io.Writer) error {
	a, err := sizes[i].measure()
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(a)
}

func addr(first netip.Addr, n int) netip.Addr {
	b := first.As4()
	b[1], b[2], b[3] = b[1]+byte(n>>16), b[2]+byte(n>>8), b[3]+byte(n)
	return netip.AddrFrom4(b)
}

var (
	firstVIP     = netip.AddrFrom4([4]byte{100, 64, 0, 0})
	firstBackend = netip.AddrFrom4([4]byte{10, 128, 0, 1})
	firstNode    = netip.AddrFrom4([4]byte{172, 16, 0, 1})
)

// service returns service i, without its last backend if without is set.
func (s size) service(i int, without bool) *lb.Service {
	svc := &lb.Service{
		Name: fmt.Sprint(i), VIPs: []netip.Addr{addr(firstVIP, i)},
		Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	port := &svc.Ports[0]
	for k := range s.backends {
		b := lb.Backend{Addr: addr(firstBackend, k), Weight: 1}
		if s.nodes > 0 {
			svc.NodeForwarding.Enabled = true
			b.Node, b.Local = addr(firstNode, k%s.nodes), k%s.nodes == 0
			if k < s.nodes {
				port.Nodes = append(port.Nodes, lb.Node{Addr: b.Node, Local: b.Local})
			}
		}
		if !without || k < s.backends-1 {
			port.Backends = append(port.Backends, b)
		}
	}
	return svc
}

func (s size) measure() (a Applied, err error) {
	a.Size = s.name
	d, err := datapath.Open(datapath.Options{
		Interfaces: []string{"eth0"}, Mode: datapath.ModeTC, MaxFlows: 1000,
		SNATPorts: []datapath.PortRange{{First: 61000, Last: 65535}}, TunnelPort: 6090,
		Timeouts: datapath.DefaultTimeouts, PinPath: datapath.DefaultPinPath,
		StateDir: datapath.DefaultStateDir, Delivers: s.nodes > 0, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return a, err
	}
	defer d.Close()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	defer func() {
		stop()
		err = errors.Join(err, <-done)
	}()
	if a.First, err = s.first(d); err != nil {
		return a, err
	}
	if a.KernelMemory, err = kernelMemory(datapath.DefaultPinPath); err != nil {
		return a, err
	}
	err = s.changes(d, &a)
	return a, err
}

// first puts all services, 1,000 at a time.
func (s size) first(d *datapath.Datapath) (took time.Duration, err error) {
	start := time.Now()
	for from := 0; from < s.services; from += 1000 {
		var delta lb.Delta
		for i := from; i < min(from+1000, s.services); i++ {
			delta.Put = append(delta.Put, lb.Build(s.service(i, false), nil, lb.Drains{}).Frontends...)
		}
		for f, err := range d.Apply(context.Background(), delta) {
			return 0, fmt.Errorf("%s: %w", f, err)
		}
	}
	return time.Since(start), nil
}

// changes changes one service after another, for at most three seconds.
func (s size) changes(d *datapath.Datapath, a *Applied) error {
	var times []time.Duration
	before, start := cpuTime(), time.Now()
	for i := 0; i < 200 && (i < 10 || time.Since(start) < 3*time.Second); i++ {
		svc := s.service(i/2*37%s.services, i%2 == 0)
		at := time.Now()
		for f, err := range d.Apply(context.Background(), lb.Delta{Put: lb.Build(svc, nil, lb.Drains{}).Frontends}) {
			return fmt.Errorf("%s: %w", f, err)
		}
		times = append(times, time.Since(at))
	}
	a.Changes = len(times)
	a.CPU = (cpuTime() - before) / time.Duration(len(times))
	a.P50, a.P99 = Percentile(times, 50), Percentile(times, 99)
	return nil
}

// Percentile returns the p-th percentile. It sorts the times.
func Percentile(times []time.Duration, p int) time.Duration {
	slices.Sort(times)
	return times[min(len(times)-1, len(times)*p/100)]
}

// cpuTime returns this process's CPU time.
func cpuTime() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		panic(err) // the arguments are constant
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// kernelMemory returns the memory of all maps pinned below dir, in bytes.
func kernelMemory(dir string) (sum uint64, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || filepath.Base(filepath.Dir(path)) == "links" {
			return err
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return err
		}
		bytes, _ := info.Memlock()
		sum += bytes
		return nil
	})
	return sum, err
}
