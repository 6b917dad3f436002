package lb_test

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// BenchmarkEngine measures single events at 10,000 services of 10 backends, until they are in force.
func BenchmarkEngine(b *testing.B) {
	const services = 10_000
	fx := lbtest.New()
	e := must.Get(lb.NewEngine(lb.EngineOptions{
		Datapath: fx, Announcer: fx, Prober: fx, Settle: time.Second, Retry: time.Second,
		Withdraw: time.Second, Log: slog.New(slog.DiscardHandler),
	}))(b)
	must.Run(b, e.Run)
	make10 := func(i, n int) *lb.Service {
		var backends []string
		for k := range n {
			backends = append(backends, fmt.Sprintf("10.0.0.%d", k))
		}
		addr := netip.AddrFrom4([4]byte{203, 0, byte(i / 256), byte(i)})
		return service(fmt.Sprint(i), []netip.Addr{addr}, backends...)
	}
	for i := range services {
		s := make10(i, 10)
		e.Put(s)
		answer(e, s, lb.StateHealthy)
	}
	last := make10(services-1, 10)
	until := func(targets int) {
		for {
			p, ok := fx.Served(frontend(last.VIPs[0]))
			if ok && len(p.Targets) == targets && e.Progress() == (lb.Progress{Applied: true}) {
				return
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	until(10)
	for _, x := range []struct {
		name string
		do   func(i int)
	}{
		{"endpoint", func(i int) {
			e.Put(make10(services-1, 10+i%2))
			answer(e, make10(services-1, 10+i%2), lb.StateHealthy)
			until(10 + i%2)
		}},
		{"verdict", func(i int) {
			answer(e, last, lb.StateHealthy+lb.State(1-i%2), 0)
			until(9 + i%2)
		}},
		{"drain of a service", func(i int) {
			e.Drain(lb.Drains{}.With("7", i%2 == 0))
			until(10)
		}},
		{"drain of the node", func(i int) {
			e.Drain(lb.Drains{Node: i%2 == 0})
			until(10)
		}},
		{"health request", func(int) { e.Progress(); e.InForce("7") }},
		{"Status", func(int) {
			must.Get(e.Status(b.Context()))(b)
		}},
	} {
		e.Put(last)
		answer(e, last, lb.StateHealthy)
		until(10)
		b.Run(x.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				x.do(i)
			}
		})
	}
}
