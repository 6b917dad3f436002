package bfd_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// The monitor runs in a child process, which can be stopped and killed: the test binary with this variable set to the
// neighbor's address. SIGUSR1 and SIGUSR2 select a long and a short interval.
const (
	childNeighbor   = "STEELYARD_BFD_TEST_NEIGHBOR"
	childMultiplier = "STEELYARD_BFD_TEST_MULTIPLIER"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(childNeighbor); text != "" {
		if err := runChild(netip.MustParseAddr(text)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func runChild(neighbor netip.Addr) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	m, err := bfd.New(bfd.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	n := fast(neighbor)
	if text := os.Getenv(childMultiplier); text != "" {
		multiplier, err := strconv.ParseUint(text, 10, 8)
		if err != nil {
			return err
		}
		n.Multiplier = uint8(multiplier)
	}
	m.Set([]bfd.Neighbor{n})
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for s := range changes {
			changed := n
			if s == syscall.SIGUSR1 {
				changed.Interval, changed.Multiplier = slowInterval, slowMultiplier
			}
			m.Set([]bfd.Neighbor{changed})
		}
	}()
	return m.Run(ctx)
}

const slowInterval, slowMultiplier = 500 * time.Millisecond, 12

func fast(a netip.Addr) bfd.Neighbor {
	return bfd.Neighbor{Addr: a, Interval: 100 * time.Millisecond, Multiplier: 3}
}

// pair is a host with a monitor and a router, connected by a link.
type pair struct {
	lab          *lab.Lab
	host, router *lab.Host
	daemon       *peers.Router
}

func newPair(t *testing.T, kind peers.RouterKind) pair { return newPairOf(t, kind, 3) }

func newPairOf(t *testing.T, kind peers.RouterKind, multiplier int) (p pair) {
	t.Parallel()
	labtest.Root(t)
	l := labtest.New(t)
	p.lab = l
	p.host, p.router = labtest.Host(t, l, "node"), labtest.Host(t, l, "router")
	must.Do(t, l.Link(end(p.host, "eth0", 2), end(p.router, "eth0", 1), lab.LinkOptions{}))
	p.daemon = startRouter(t, p.router, kind, multiplier)
	return p
}

// end is one end of the link. Addresses end in 2 on the node and in 1 on the router.
func end(h *lab.Host, name string, last int) lab.End {
	return lab.End{Host: h, Name: name, Addresses: []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/24", last)),
		netip.MustParsePrefix(fmt.Sprintf("2001:db8::%d/64", last)),
	}}
}

func startRouter(t *testing.T, h *lab.Host, kind peers.RouterKind, multiplier int) *peers.Router {
	t.Helper()
	return labtest.Router(t, h, kind, peers.RouterConfig{
		ID: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Neighbors: []peers.Neighbor{
			{Address: netip.MustParseAddr("192.0.2.2"), ASN: 64512, BFD: true, BFDMultiplier: multiplier},
			{Address: netip.MustParseAddr("2001:db8::2"), ASN: 64512, BFD: true, BFDMultiplier: multiplier},
		},
	})
}

// start starts the monitor in a child process.
func (p pair) start(t *testing.T, neighbor string, multiplier int) *lab.Process {
	t.Helper()
	self := must.Get(os.Executable())(t)
	child := must.Get(p.host.Start(lab.Command{Path: self, Env: []string{
		childNeighbor + "=" + neighbor, childMultiplier + "=" + strconv.Itoa(multiplier),
	}}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("monitor:\n%s", child.Log.Tail(40))
		}
	})
	return child
}

// sees waits until the router reports a state of its session with the node, and returns how long it took.
func (p pair) sees(t *testing.T, address, state string) time.Duration {
	t.Helper()
	took := must.Get(lab.Until(t.Context(), 20*time.Second, fmt.Sprintf("%s: session with %s", p.daemon.Kind, address),
		func() error {
			got, err := p.state(t.Context(), address)
			return errors.Join(err, labtest.ErrorIf(got != state, "%s, want %s", got, state))
		}))(t)
	return took
}

// state returns the state of the router's session, "up" or "down".
func (p pair) state(ctx context.Context, address string) (string, error) {
	if p.daemon.Kind == peers.BIRD {
		out, err := p.daemon.Show(ctx, "show bfd sessions")
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) > 2 && f[0] == address {
				return strings.ToLower(f[2]), nil
			}
		}
		return "none", err
	}
	out, err := p.daemon.Show(ctx, "show bfd peer "+address)
	if _, status, ok := strings.Cut(out, "Status: "); ok {
		return strings.Fields(status)[0], nil
	}
	return "none", err
}

func eachRouter(t *testing.T, f func(t *testing.T, kind peers.RouterKind)) {
	t.Parallel()
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) { f(t, kind) })
	}
}

// The router detects a frozen node and a planned shutdown, over both families.
func TestRouterNotices(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		p := newPair(t, kind)
		for router, node := range map[string]string{"192.0.2.1": "192.0.2.2", "2001:db8::1": "2001:db8::2"} {
			child := p.start(t, router, 3)
			p.sees(t, node, "up")
			send(t, syscall.SIGSTOP, child)
			t.Logf("%s: frozen: down after %v", node, p.sees(t, node, "down"))
			send(t, syscall.SIGCONT, child)
			t.Logf("%s: goes on: up after %v", node, p.sees(t, node, "up"))
			send(t, syscall.SIGTERM, child)
			t.Logf("%s: ends: down after %v", node, p.sees(t, node, "down"))
			err := child.Wait(t.Context())
			must.True(t, err == nil, "the monitor ended with %v", err)
		}
	})
}

// The monitor detects a frozen router. It ignores forwarded packets (RFC 5881, section 5), so only hosts on the link
// can end a session.
func TestMonitorNotices(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		p := newPair(t, kind)
		m, _ := monitor(t, p.host, bfd.Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))},
			fast(netip.MustParseAddr("192.0.2.1")))
		is := func(want bfd.State) {
			t.Helper()
			labtest.Until(t, fmt.Sprintf("the session is %v", want), func() error {
				s := m.Sessions()[0]
				return labtest.ErrorIf(s.State != want || s.Problem != "" || s.NotUpSince.IsZero() != (want == bfd.Up),
					"%+v", s)
			})
		}
		is(bfd.Up)
		since := m.Sessions()[0].Since

		for _, ttl := range []int{64, 255} { // 255 is impossible beyond the link, but lacks a discriminator
			c := must.Get(p.router.Dial(t.Context(), "udp", "192.0.2.2:3784"))(t)
			defer c.Close()
			must.Do(t, ipv4.NewConn(c).SetTTL(ttl))
			forged := bfd.Packet{State: bfd.Down, Multiplier: 3, MyDiscriminator: 1}
			before := m.Discarded()["dropped by the kernel"]
			must.Get(c.Write(forged.Append(nil)))(t)
			labtest.Until(t, fmt.Sprintf("the forged packet with TTL %d is dropped", ttl), func() error {
				return labtest.ErrorIf(m.Discarded()["dropped by the kernel"] == before, "none was dropped")
			})
		}
		s := m.Sessions()[0]
		must.True(t, s.State == bfd.Up && s.Since == since, "after a forged packet: %+v", s)

		signalAll(t, syscall.SIGSTOP, p.daemon)
		is(bfd.Down)
		must.Row(t, "the reason", bfd.DiagTimeExpired, m.Sessions()[0].Diag)
		signalAll(t, syscall.SIGCONT, p.daemon)
		is(bfd.Up)
	})
}

func monitor(t *testing.T, h *lab.Host, o bfd.Options, neighbors ...bfd.Neighbor) (m *bfd.Monitor, stop func()) {
	t.Helper()
	m = must.Get(bfd.New(o))(t)
	m.Set(neighbors)
	return m, must.Run(t, func(ctx context.Context) error { return h.Do(func() error { return m.Run(ctx) }) })
}

func signalAll(t *testing.T, s syscall.Signal, r *peers.Router) {
	t.Helper()
	send(t, s, r.Processes...)
}

// TestNoFalseAlarm checks that a session without failures stays up. With BFD_TIME=10m it lasts that long, with a
// multiplier of 3 at 100 ms and all CPUs busy; run it alone on the machine. Without BFD_TIME other tests run as well,
// so the multiplier is 10 and there is no load.
func TestNoFalseAlarm(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		duration, busy, multiplier := limits(t, 10*time.Second)
		p := newPairOf(t, kind, multiplier)
		child := p.start(t, "192.0.2.1", multiplier)
		p.sees(t, "192.0.2.2", "up")
		if busy {
			p.burn(t, (runtime.NumCPU()+1)/2) // the other router's test burns as many
		}
		time.Sleep(duration)
		var alarms []string
		for _, line := range child.Log.Lines() {
			if strings.Contains(line, "bfd session down") {
				alarms = append(alarms, line)
			}
		}
		t.Logf("%s: %d false alarms in %v, %d × 100 ms", kind, len(alarms), duration, multiplier)
		must.True(t, len(alarms) == 0, "false alarms:\n%s", strings.Join(alarms, "\n"))
		state, err := p.state(t.Context(), "192.0.2.2")
		must.True(t, err == nil && state == "up", "the session is %s at the router in the end, %v", state, err)
	})
}

// limits returns how long a test lasts, whether it keeps all CPUs busy, and the multiplier.
func limits(t *testing.T, short time.Duration) (d time.Duration, busy bool, multiplier int) {
	t.Helper()
	text := os.Getenv("BFD_TIME")
	if text == "" {
		return short, false, 10
	}
	return must.Get(time.ParseDuration(text))(t), true, 3
}

// burn keeps n CPUs busy until the test ends. The router has real-time priority, as if it had a CPU of its own.
func (p pair) burn(t *testing.T, n int) {
	t.Helper()
	attr := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}
	for _, daemon := range p.daemon.Processes {
		must.Do(t, unix.SchedSetAttr(daemon.Pid(), attr, 0))
	}
	for range n {
		busy := lab.Command{Path: "/bin/sh", Args: []string{"-c", "while :; do :; done"}, Abrupt: true}
		must.Get(p.host.Start(busy))(t)
	}
}
