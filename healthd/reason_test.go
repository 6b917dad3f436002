package healthd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestReason(t *testing.T) {
	dial := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	for _, tt := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "no response within 1s"},
		{fmt.Errorf("read: %w", os.ErrDeadlineExceeded), "no response within 1s"},
		{dial(syscall.ETIMEDOUT), "no response within 1s"},
		{dial(os.NewSyscallError("connect", syscall.ECONNREFUSED)), "connection refused"},
		{dial(syscall.ECONNRESET), "connection reset"},
		{dial(syscall.EHOSTUNREACH), "no route to host"},
		{dial(syscall.ENETUNREACH), "network unreachable"},
		{io.EOF, "connection closed without a response"},
		{fmt.Errorf("read: %w", io.ErrUnexpectedEOF), "connection closed without a response"},
		{fmt.Errorf("outer: %w", dial(errors.New("inner"))), "inner"},
		{errors.New("first line\nsecond line"), "first line"},
		{dial(errors.New("\x1b[2JOK")), "�[2JOK"},
		{errors.New("readLoopPeekFailLocked: %!w(<nil>)"), "sent before the request"}, // of net/http
		{errors.New(strings.Repeat("x", 1<<20)), strings.Repeat("x", 200) + "…"},
	} {
		must.Row(t, tt.err, tt.want, reason(tt.err, time.Second))
	}
}

// A Result without a weight says so by -1: 0 is a weight.
func TestResultWithoutWeight(t *testing.T) {
	if r, err := ok("fine"); err != nil || r != (Result{Reason: "fine", Weight: -1}) {
		t.Errorf("%+v, %v", r, err)
	}
}

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

// hangs is a Checker of a server that does not respond.
type hangs struct{}

func (hangs) Probe(ctx context.Context) (Result, error) {
	<-ctx.Done()
	return Result{}, ctx.Err()
}

// A server that responds at its own address and not at the VIP probably lacks the VIP.
func TestServerWithoutTheVIP(t *testing.T) {
	vip := netip.MustParseAddr("203.0.113.10")
	const itself = ", but the server answers at its own address: is 203.0.113.10 on its device lo?"
	spec := lb.CheckSpec{Type: lb.CheckTCP, Interval: time.Hour, Timeout: time.Second, Rise: 1, Fall: 1}
	for _, row := range []struct {
		check lb.Check
		want  string
	}{
		{lb.Check{Target: targetOf(listen(t).Addr()), VIP: vip}, itself},
		{lb.Check{Target: netip.MustParseAddrPort("127.0.0.1:1"), VIP: vip}, itself}, // refused
		{lb.Check{Target: targetOf(listen(t).Addr())}, ""},
	} {
		reports := make(chan lb.Health, 1)
		p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
		p.make = func(lb.Check) Checker { return hangs{} }
		row.check.Spec = spec
		p.Put("web", []lb.Check{row.check})
		stop := must.Run(t, p.Run)
		if h := <-reports; h.Reason != "no response within 1s"+row.want {
			t.Errorf("%s, VIP %s: %q", row.check.Target, row.check.VIP, h.Reason)
		}
		stop()
	}
}
