package agent

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A dial is tried again at each interval until it succeeds or its context ends, and logs only the first failure.
func TestRetryingDialIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		dial := retryingDial(slog.New(slog.NewTextHandler(&log, nil)), new(reachability), nil)
		socket := filepath.Join(t.TempDir(), "s")
		logged := func(unreachable, again int) {
			t.Helper()
			gone, back := strings.Count(log.String(), "unreachable"), strings.Count(log.String(), "reachable again")
			if gone != unreachable || back != again {
				t.Errorf("%d unreachable, %d reachable again; want %d, %d:\n%s", gone, back, unreachable, again, &log)
			}
			log.Reset()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*dialInterval/2)
		defer cancel()
		start := time.Now()
		conn, err := dial(ctx, "unix", socket)
		if took := time.Since(start); conn != nil || err == nil || took != 5*dialInterval/2 {
			t.Errorf("without a listener: %v, %v after %s", conn, err, took)
		}
		logged(1, 0)

		listening := make(chan net.Listener, 1)
		time.AfterFunc(5*dialInterval/2, func() { l, _ := net.Listen("unix", socket); listening <- l })
		start = time.Now()
		conn = must.Get(dial(t.Context(), "unix", socket))(t)
		defer (<-listening).Close()
		conn.Close()
		must.Equal(t, 3*dialInterval, time.Since(start))
		logged(1, 1)
		conn = must.Get(dial(t.Context(), "unix", socket))(t)
		conn.Close()
		logged(0, 0)
	})
}

// An engine that does not run is reported after its timeout.
func TestEngineThatDoesNotRun(t *testing.T) {
	f := newFixture(t)
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := f.checkEngine(); err == nil || time.Since(start) != engineTimeout {
			t.Errorf("error %v after %s, want one after %s", err, time.Since(start), engineTimeout)
		}
	})
}

// The addresses of an interface are the first global ones of each family in the order of the kernel.
func TestAddressesOfInterfaces(t *testing.T) {
	interfaces := must.Get(net.Interfaces())(t)
	for _, x := range interfaces {
		addrs, err := x.Addrs()
		if err != nil {
			continue // it was deleted in between
		}
		var want4, want6 netip.Addr
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil || !p.Addr().IsGlobalUnicast() {
				continue
			}
			if want := map[bool]*netip.Addr{true: &want4, false: &want6}[p.Addr().Is4()]; !want.IsValid() {
				*want = p.Addr()
			}
		}
		v4, v6, err := thisHost{}.addresses(x.Name)
		if _, deleted := net.InterfaceByIndex(x.Index); deleted == nil && (err != nil || v4 != want4 || v6 != want6) {
			t.Errorf("%s: %s, %s, %v; want %s, %s", x.Name, v4, v6, err, want4, want6)
		}
	}
}

// The agent sends the messages of the watchdog while its engine responds.
func TestRunSendsWatchdogMessages(t *testing.T) {
	lines := notifications(t)
	t.Setenv("WATCHDOG_USEC", "3600000000")
	t.Setenv("WATCHDOG_PID", "")
	stop := newFixture(t).start(t)
	var got []string
	for range 2 {
		select {
		case line := <-lines:
			got = append(got, line)
		case <-time.After(stepTimeout):
		}
	}
	slices.Sort(got)
	must.Equal(t, []string{"READY=1", "WATCHDOG=1"}, got)
	must.Do(t, stop())
}
