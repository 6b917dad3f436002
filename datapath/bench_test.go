package datapath

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// BenchmarkApply measures the time until a change of plans is in force in the kernel.
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
