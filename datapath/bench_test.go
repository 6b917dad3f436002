package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// BenchmarkMemory reports the memory of the maps as the kernel accounts for it (docs/sizing.md). It measures an empty
// datapath, and the increase for one more entry of max_flows, one more NAT service with one or ten backends, and one
// more backend. It needs root.
func BenchmarkMemory(b *testing.B) {
	labtest.Root(b)
	measure := func(flows, services, backends int, shared bool) float64 {
		var sum uint64
		err := labtest.Host(b, labtest.New(b), "lb").Do(func() error {
			d, err := Open(Options{Interfaces: []string{"lo"}, Mode: ModeTC, MaxFlows: flows,
				SNATPorts: []PortRange{{61000, 65535}}, TunnelPort: 6090, Timeouts: DefaultTimeouts,
				PinPath: DefaultPinPath, StateDir: DefaultStateDir, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				return err
			}
			defer d.Close()
			var delta lb.Delta
			for i := range services {
				s := sizedService(i, backends, shared)
				delta.Put = append(delta.Put, lb.Build(s, nil, lb.Drains{}).Frontends...)
			}
			for _, err := range d.Apply(context.Background(), delta) {
				return err
			}
			sum, err = mapsMemory(DefaultPinPath)
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		return float64(sum)
	}
	const few, many = 500_000, 1_000_000 // below, some tables have their smallest size
	const n = 4096
	for b.Loop() {
		empty := measure(few, 0, 0, true)
		perFlow := (measure(many, 0, 0, true) - empty) / (many - few)
		one := measure(few, n, 1, true)
		ten := measure(few, n, 10, true)
		own := measure(few, n, 10, false)
		b.ReportMetric((empty-few*perFlow)/(1<<20), "MiB-base")
		b.ReportMetric(perFlow, "B/flow")
		b.ReportMetric((one-empty)/n, "B/service-of-1")
		b.ReportMetric((ten-empty)/n, "B/service-of-10")
		b.ReportMetric((own-ten)/(10*n), "B/backend")
		b.ReportMetric(float64(ebpf.MustPossibleCPU()), "CPUs")
	}
}

// sizedService is a service whose backends are its own, or which all services share.
func sizedService(i, backends int, shared bool) *lb.Service {
	s := &lb.Service{
		Name: fmt.Sprint(i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)})},
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	var list []lb.Backend
	for k := range backends {
		id := k
		if !shared {
			id = backends*i + k
		}
		addr := netip.AddrFrom4([4]byte{10, byte(id >> 16), byte(id >> 8), byte(id)})
		list = append(list, lb.Backend{Addr: addr, Weight: 1})
	}
	s.Ports = lb.PortsOn(list, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP})
	return s
}

// mapsMemory returns the memory of all maps pinned below dir.
func mapsMemory(dir string) (sum uint64, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && slices.Contains([]string{"links", "programs"}, e.Name()) {
			return fs.SkipDir
		}
		if err != nil || e.IsDir() {
			return err
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		info, err := m.Info()
		if err != nil {
			return errors.Join(err, m.Close())
		}
		bytes, _ := info.Memlock()
		sum += bytes
		return m.Close()
	})
	return sum, err
}

// BenchmarkApply measures the time until a change of plans is active in the kernel.
func BenchmarkApply(b *testing.B) {
	labtest.Root(b)
	for _, n := range []int{1, 10, 1000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			host := labtest.Host(b, labtest.New(b), "lb")
			plans := make([][]*lb.FrontendPlan, 2)
			for i := range n {
				s := &lb.Service{
					Name: fmt.Sprint(i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, byte(i / 256), byte(i)})},
					Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}),
					Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT,
					Check: lb.CheckSpec{Type: lb.CheckNone},
				}
				for k := range byte(10) {
					s.Ports[0].Backends = append(s.Ports[0].Backends,
						lb.Backend{Addr: netip.AddrFrom4([4]byte{10, 0, 0, k + 1}), Weight: 1})
					if k == 8 {
						plans[0] = append(plans[0], lb.Build(s, nil, lb.Drains{}).Frontends...)
					}
				}
				plans[1] = append(plans[1], lb.Build(s, nil, lb.Drains{}).Frontends...)
			}
			err := host.Do(func() error {
				d, err := Open(Options{Interfaces: []string{"lo"}, Mode: ModeTC, MaxFlows: 1000,
					SNATPorts: []PortRange{{61000, 65535}}, TunnelPort: 6090, Timeouts: DefaultTimeouts,
					PinPath: DefaultPinPath, StateDir: DefaultStateDir, Log: slog.New(slog.DiscardHandler)})
				if err != nil {
					return err
				}
				defer d.Close()
				i := 0
				for b.Loop() {
					start := time.Now()
					for f, err := range d.Apply(context.Background(), lb.Delta{Put: plans[i%2]}) {
						return fmt.Errorf("%s: %w", f, err)
					}
					if i++; i == 1 {
						b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms-first")
					}
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
