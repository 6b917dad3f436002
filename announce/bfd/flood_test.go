package bfd_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/sys/unix"
)

// A flood from a host two hops away ends no session, because it reaches neither the sockets' queues nor the thread. It
// comes from unknown addresses and, where the neighbor may be as far away, from the neighbor's. Each frame arrives
// separately. With BFD_TIME=30s, the flood lasts that long, with a multiplier of 3 at 100 ms and all CPUs busy; run it
// alone on the machine. Without BFD_TIME other tests run as well, so the multiplier is 10.
func TestFlood(t *testing.T) {
	t.Run("one hop", func(t *testing.T) { testFlood(t, 3784) })
	t.Run("several hops", func(t *testing.T) { testFlood(t, 4784) })
}

func testFlood(t *testing.T, port int) {
	duration, busy, multiplier := limits(t, 3*time.Second)
	labtest.Root(t)
	l := labtest.New(t)
	p := pair{lab: l, host: labtest.Host(t, l, "node"), router: labtest.Host(t, l, "router")}
	must.Do(t, l.Link(end(p.host, "eth0", 2), end(p.router, "eth0", 1), lab.LinkOptions{SoftwareChecksums: true}))
	p.daemon = startRouter(t, p.router, peers.BIRD, multiplier)
	stranger := beyond(t, p, "eth1", 100)
	changes := make(chan bfd.Status, 100)
	start := func(h *lab.Host, n bfd.Neighbor) *bfd.Monitor {
		m, _ := monitor(t, h, bfd.Options{
			Log: slog.New(slog.DiscardHandler), Changed: func(_ bfd.State, s bfd.Status) { changes <- s },
		}, n)
		return m
	}
	neighbor := fast(netip.MustParseAddr("192.0.2.1"))
	neighbor.Multiplier = uint8(multiplier)
	sessions := 1
	if port == 4784 { // the neighbor is also two hops away
		far := beyond(t, p, "eth2", 101)
		must.Do(t, p.host.AddRoute(netip.MustParsePrefix("198.51.101.0/24"), netip.MustParseAddr("192.0.2.1")))
		back := neighbor
		back.Multihop, back.MinTTL, back.Addr = true, 254, netip.MustParseAddr("192.0.2.2")
		neighbor.Multihop, neighbor.MinTTL, neighbor.Addr = true, 254, netip.MustParseAddr("198.51.101.7")
		start(far, back)
		sessions = 2
	}
	m := start(p.host, neighbor)
	for up := 0; up < sessions; {
		select {
		case s := <-changes:
			if s.State == bfd.Up {
				up++
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("not up after 20 s: %+v", m.Sessions())
		}
	}
	if busy {
		p.burn(t, runtime.NumCPU())
	}
	sources := []netip.Addr{
		netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"),
	}
	if port == 4784 {
		sources = append(sources, neighbor.Addr, neighbor.Addr, neighbor.Addr)
	}
	sent := flood(t, stranger, sources, port, duration)
	rate := func(n uint64) float64 { return float64(n) / duration.Seconds() }
	t.Logf("%.0f datagrams a second sent, %.0f dropped by the kernel", rate(sent),
		rate(m.Discarded()["dropped by the kernel"]))
	select {
	case s := <-changes:
		t.Errorf("the session changed: %+v", s)
	default:
	}
	discarded := m.Discarded()
	t.Logf("%v", discarded)
	for _, reason := range []string{"no session", "no discriminator while up"} {
		n := discarded[reason]
		must.True(t, n == 0, "%d datagrams of the stranger were read: %s", n, reason)
	}
	if n := rate(discarded["dropped by the kernel"]); n == 0 || busy && n < 100_000 {
		t.Errorf("%.0f datagrams a second were dropped by the kernel", n)
	}
}

func beyond(t *testing.T, p pair, name string, third byte) *lab.Host {
	h := labtest.Host(t, p.lab, fmt.Sprint("host", third))
	address := func(last byte) []netip.Prefix {
		return []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, third, last}), 24)}
	}
	must.Do(t, p.lab.Link(
		lab.End{Host: p.router, Name: name, Addresses: address(1)},
		lab.End{Host: h, Name: "eth0", Addresses: address(7)}, lab.LinkOptions{}))
	must.Do(t, p.router.Forward())
	must.Do(t, h.AddRoute(netip.MustParsePrefix("192.0.2.0/24"), address(1)[0].Addr()))
	return h
}

// floodRate is in datagrams per second. At twice that rate, the links between the hosts also lose the sessions'
// packets.
const floodRate = 150_000

// flood sends packets that resemble BFD for d, many with each system call (UDP_SEGMENT in udp(7)), and returns how
// many.
func flood(t *testing.T, from *lab.Host, sources []netip.Addr, port int, d time.Duration) uint64 {
	const together = 60
	pause := time.Duration(together*len(sources)) * time.Second / floodRate
	p := bfd.Packet{State: bfd.Down, Multiplier: 3, MyDiscriminator: 7, DesiredMinTx: time.Second}.Append(nil)
	data := bytes.Repeat(p, together)
	var sent atomic.Uint64
	var all sync.WaitGroup
	end := time.Now().Add(d)
	for _, source := range sources {
		dialer := net.Dialer{
			LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)),
			Control: func(_, _ string, c syscall.RawConn) (err error) {
				_ = c.Control(func(fd uintptr) {
					if err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, len(p)); err == nil {
						err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TTL, 255)
					}
					if err == nil {
						err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
					}
				})
				return err
			},
		}
		var c net.Conn
		must.Do(t, from.Do(func() (err error) {
			c, err = dialer.DialContext(context.WithoutCancel(t.Context()), "udp", fmt.Sprintf("192.0.2.2:%d", port))
			return err
		}))
		all.Go(func() {
			defer c.Close()
			for next := time.Now(); next.Before(end); next = next.Add(pause) {
				time.Sleep(time.Until(next))
				if _, err := c.Write(data); err != nil {
					t.Error(err)
					return
				}
				sent.Add(together)
			}
		})
	}
	all.Wait()
	return uint64(sent.Load())
}
