package healthd

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A report carries the error of the probe, so that a receiver need not parse the reason.
func TestReportCarriesTheError(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	open := netip.MustParseAddrPort(l.Addr().String())
	defer l.Close()
	closing := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	closed := netip.MustParseAddrPort(closing.Addr().String())
	closing.Close()

	reports := make(chan lb.Health, 2)
	p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	must.Run(t, p.Run)
	spec := lb.CheckSpec{Type: lb.CheckTCP, Interval: time.Hour, Timeout: 10 * time.Second, Rise: 1, Fall: 1}
	for _, target := range []netip.AddrPort{open, closed} {
		key := lb.CheckKey{Service: target.String(), Backend: target}
		p.Put(key.Service, []lb.Check{{Key: key, Target: target, Spec: spec}})
	}
	for range 2 {
		h := <-reports
		refused := errors.Is(h.Err, syscall.ECONNREFUSED)
		if want := h.Key.Backend == closed; refused != want || (h.Err != nil) != want {
			t.Errorf("%v, %s: error %v; refused: want %t", h.Key.Backend, h.State, h.Err, want)
		}
	}
}
