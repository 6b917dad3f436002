package bfd_test

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
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

// A flood from a host two hops away, which is no neighbour, reaches neither the queue of the sockets nor the thread,
// and ends no session. BFD_TIME=30s floods that long, with 3 packets of 100 ms and all processors busy, alone on the
// machine. Without BFD_TIME the machine runs other tests, and so there are 10 packets.
func TestFlood(t *testing.T) {
	duration, busy, multiplier := 3*time.Second, false, 10
	if text := os.Getenv("BFD_TIME"); text != "" {
		var err error
		if duration, err = time.ParseDuration(text); err != nil {
			t.Fatalf("BFD_TIME: %v", err)
		}
		busy, multiplier = true, 3
	}
	p := newPairOf(t, peers.BIRD, multiplier)
	stranger := labtest.Host(t, p.lab, "stranger")
	must.Do(t, p.lab.Link(
		lab.End{Host: p.router, Name: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}},
		lab.End{Host: stranger, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.7/24")}},
		lab.LinkOptions{}))
	must.Do(t, p.router.Forward())
	must.Do(t, stranger.AddRoute(netip.MustParsePrefix("192.0.2.0/24"), netip.MustParseAddr("198.51.100.1")))
	changes := make(chan bfd.Status, 100)
	m := must.Get(bfd.New(bfd.Options{
		Log: slog.New(slog.DiscardHandler), Changed: func(_ bfd.State, s bfd.Status) { changes <- s },
	}))(t)
	neighbor := fast(netip.MustParseAddr("192.0.2.1"))
	neighbor.Multiplier = uint8(multiplier)
	m.Set([]bfd.Neighbor{neighbor})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.host.Do(func() error { return m.Run(ctx) }) }()
	for up := false; !up; {
		select {
		case s := <-changes:
			up = s.State == bfd.Up
		case err := <-ended:
			t.Fatal("bfd has ended:", err)
		case <-time.After(20 * time.Second):
			t.Fatalf("not up after 20 s: %+v", m.Sessions())
		}
	}
	if busy {
		for _, daemon := range p.daemon.Processes { // a router has a processor of its own
			must.Do(t, unix.Setpriority(unix.PRIO_PROCESS, daemon.Pid(), -20))
		}
		for range runtime.NumCPU() {
			load := lab.Command{Path: "/bin/sh", Args: []string{"-c", "while :; do :; done"}, Abrupt: true}
			must.Get(p.host.Start(load))(t)
		}
	}
	sent := flood(t, stranger, duration)
	rate := float64(sent) / duration.Seconds()
	t.Logf("%d datagrams, %.0f a second", sent, rate)
	select {
	case s := <-changes:
		t.Errorf("the session changed: %+v", s)
	default:
	}
	discarded := m.Discarded()
	if n := discarded["no session"]; n > 0 {
		t.Errorf("%d datagrams of the stranger were read", n)
	}
	if n := discarded["dropped by the kernel"]; n == 0 {
		t.Error("none was dropped by the kernel")
	}
	cancel()
	must.Do(t, <-ended)
}

// flood sends what looks like BFD for some time, and returns how many datagrams.
func flood(t *testing.T, from *lab.Host, d time.Duration) (sent int) {
	c := must.Get(from.Dial(t.Context(), "udp", "192.0.2.2:3784"))(t)
	defer c.Close()
	data := bfd.Packet{State: bfd.Down, Multiplier: 3, MyDiscriminator: 7, DesiredMinTx: time.Second}.Append(nil)
	batch := make([]ipv4.Message, 256)
	for i := range batch {
		batch[i].Buffers = [][]byte{data}
	}
	out := ipv4.NewPacketConn(c.(*net.UDPConn))
	for end := time.Now().Add(d); time.Now().Before(end); {
		n := must.Get(out.WriteBatch(batch, 0))(t)
		sent += n
	}
	return sent
}

// TestNoFalseAlarm has a session without a failure for some time, which must not end. BFD_TIME=10m has 3 packets of 100
// ms, as long as that says, with all processors busy; alone on the machine. Without BFD_TIME the machine runs other
// tests, and so there are 10 packets and no load.
func TestNoFalseAlarm(t *testing.T) {
	long := os.Getenv("BFD_TIME")
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		duration, multiplier := 10*time.Second, 10
		if long != "" {
			var err error
			if duration, err = time.ParseDuration(long); err != nil {
				t.Fatalf("BFD_TIME: %v", err)
			}
			multiplier = 3
		}
		p := newPairOf(t, kind, multiplier)
		child := p.start(t, "192.0.2.1", multiplier)
		p.sees(t, "192.0.2.2", "up")
		if long != "" {
			for range (runtime.NumCPU() + 1) / 2 { // as many for the other router
				busy := lab.Command{Path: "/bin/sh", Args: []string{"-c", "while :; do :; done"}, Abrupt: true}
				must.Get(p.host.Start(busy))(t)
			}
		}
		time.Sleep(duration)
		var alarms []string
		for _, line := range child.Log.Lines() {
			if strings.Contains(line, "bfd session down") {
				alarms = append(alarms, line)
			}
		}
		t.Logf("%s: %d false alarms in %v, %d × 100 ms", kind, len(alarms), duration, multiplier)
		if len(alarms) > 0 {
			t.Errorf("false alarms:\n%s", strings.Join(alarms, "\n"))
		}
		if state, err := p.state(t.Context(), "192.0.2.2"); err != nil || state != "up" {
			t.Errorf("the session is %s at the router in the end, %v", state, err)
		}
	})
}
