package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/lb/state"
)

func TestRetryingDial(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	at := l.Addr().String()
	l.Close()
	away := new(reachability)
	dial := retryingDial(slog.New(slog.DiscardHandler), away, nil)

	ctx, cancel := context.WithTimeout(t.Context(), dialInterval/2)
	defer cancel()
	if conn, err := dial(ctx, "tcp", at); err == nil {
		conn.Close()
		t.Error("connected without a listener")
	}
	must.True(t, !away.awaySince().IsZero(), "the API server is not away")
	time.AfterFunc(dialInterval/2, func() {
		if l, err := net.Listen("tcp", at); err == nil {
			t.Cleanup(func() { l.Close() })
		}
	})
	var since time.Time
	away.returned = func(at time.Time) { since = at }
	start := time.Now()
	conn := must.Get(dial(t.Context(), "tcp", at))(t)
	conn.Close()
	must.True(t, away.awaySince().IsZero() && !since.IsZero() && since.Before(start),
		"the API server is away, or was since %s", since)
	took := time.Since(start)
	must.True(t, took >= dialInterval/2 && took <= 3*dialInterval, "connected after %s", took)
}

// The configured API servers are tried instead of the address in the client's configuration.
func TestAPIServers(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	closed := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	must.Do(t, closed.Close())
	a := &apiDialer{servers: []string{closed.Addr().String(), l.Addr().String()}}
	for range 10 {
		conn := must.Get(a.dial(t.Context(), "tcp", "192.0.2.1:443"))(t)
		must.Equal(t, l.Addr().String(), conn.RemoteAddr().String())
		conn.Close()
	}
}

// A connection to the API server ends within seconds when nobody answers, whether it is idle or has sent a request,
// because a router may have moved it to a node that does not know it.
func TestLostConnectionEnds(t *testing.T) {
	labtest.Root(t)
	l := labtest.New(t)
	node, server := labtest.Host(t, l, "node"), labtest.Host(t, l, "server")
	end := func(h *lab.Host, address string) lab.End {
		return lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(address)}}
	}
	must.Do(t, l.Link(end(node, "192.0.2.1/24"), end(server, "192.0.2.2/24"), lab.LinkOptions{}))
	listener := must.Get(server.Listen(t.Context(), "tcp", "192.0.2.2:6443"))(t)
	defer listener.Close()
	var idle, busy net.Conn
	must.Do(t, node.Do(func() (err error) {
		if idle, err = new(apiDialer).dial(t.Context(), "tcp", "192.0.2.2:6443"); err == nil {
			busy, err = new(apiDialer).dial(t.Context(), "tcp", "192.0.2.2:6443")
		}
		return err
	}))
	defer idle.Close()
	defer busy.Close()
	must.Get(server.Run(t.Context(), "ip", "route", "add", "blackhole", "192.0.2.1"))(t)
	must.Get(busy.Write([]byte("request")))(t)
	for name, c := range map[string]net.Conn{"idle": idle, "busy": busy} {
		_ = c.SetReadDeadline(time.Now().Add(25 * time.Second)) // the default of Go is 30 s before the first probe
		_, err := c.Read(make([]byte, 1))
		must.True(t, errors.Is(err, syscall.ETIMEDOUT), "the %s connection: %v; want a timeout of TCP", name, err)
	}
}

// If the API server's address is a VIP of a known service and does not answer, the node connects to one of the
// service's endpoints, because it cannot reach its own VIPs.
func TestEndpointInsteadOfAnOwnVIP(t *testing.T) {
	listen := func() (net.Listener, uint16) {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		return l, uint16(l.Addr().(*net.TCPAddr).Port)
	}
	server, target := listen()
	defer server.Close()
	closed, port := listen()
	closed.Close()
	vip := netip.AddrPortFrom(ip("127.0.0.1"), port)
	s := stored("api")
	s.VIPs = []netip.Addr{vip.Addr()}
	s.Ports = []lb.ServicePort{{
		Port: lb.Port{Port: port, Protocol: lb.TCP, Target: target},
		Backends: []lb.Backend{
			{Addr: ip("127.0.0.1"), Port: 1, Weight: 1, Deleted: true}, {Addr: ip("127.0.0.1"), Weight: 1},
		},
	}}
	dir := t.TempDir()
	file := state.New(dir, "cluster", clusterStateVersion)
	must.Do(t, file.Save(clusterState{Services: []*lb.Service{s}}))
	for name, learn := range map[string]func(*lastKnown){
		"of the file":    (*lastKnown).replay,
		"of the cluster": func(l *lastKnown) { l.Put(s) },
	} {
		out := &puts{services: map[string]*lb.Service{}}
		known := newLastKnown(out, func([]netip.Addr) error { return nil }, dir, discard)
		a, endpoints := new(apiDialer), known.endpoints
		a.endpoints.Store(&endpoints)
		if c, err := a.dial(t.Context(), "tcp", vip.String()); err == nil {
			c.Close()
			t.Errorf("%s: connected before the service is known", name)
		}
		learn(known)
		c, err := a.dial(t.Context(), "tcp", vip.String())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		c.Close()
		at := known.endpoints("api.example:6443")
		must.True(t, at == nil, "%s: endpoints of a name: %q", name, at)
	}
}

// A dial is tried again at each interval until it succeeds or its context ends, and logs only the first failure.
func TestRetryingDialIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		dial := retryingDial(slog.New(slog.NewTextHandler(&log, nil)), new(reachability), nil)
		socket := filepath.Join(t.TempDir(), "s")
		logged := func(unreachable, again int) {
			t.Helper()
			gone, back := strings.Count(log.String(), "unreachable"), strings.Count(log.String(), "reachable again")
			must.True(t, gone == unreachable && back == again,
				"%d unreachable, %d reachable again; want %d, %d:\n%s", gone, back, unreachable, again, &log)
			log.Reset()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*dialInterval/2)
		defer cancel()
		start := time.Now()
		conn, err := dial(ctx, "unix", socket)
		must.True(t, conn == nil && err != nil, "without a listener: %v, %v", conn, err)
		must.Equal(t, 5*dialInterval/2, time.Since(start))
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

// An engine that does not run is reported after its timeout, and one that runs responds.
func TestEngineThatDoesNotRun(t *testing.T) {
	f := newFixture(t)
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		must.True(t, f.checkEngine() != nil, "an engine that does not run responds")
		must.Equal(t, engineTimeout, time.Since(start))
	})
	f = newFixture(t)
	stop := f.start(t)
	must.Do(t, errors.Join(f.checkEngine(), stop()))
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

// The agent sends watchdog messages while its engine responds.
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
