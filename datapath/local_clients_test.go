package datapath

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// newLocalClients opens a datapath whose machine has a server at one of its own addresses.
func newLocalClients(t *testing.T, isV6 bool) *fixture {
	t.Helper()
	fx := newFixture(t, hookTC, isV6, func(o *Options) { o.LocalClients, o.LocalBackends = true, true })
	l := must.Get(fx.host.Listen(t.Context(), "tcp", fx.at("self", 8080).String()))(t)
	t.Cleanup(func() { l.Close() })
	return fx
}

// ownService serves VIP:80 for this machine's own connections, as modified by change.
func (fx *fixture) ownService(change func(*lb.Service), backends ...string) {
	fx.t.Helper()
	fx.serve(func(s *lb.Service) {
		s.LocalClients = true
		change(s)
	}, backends...)
}

// connects opens a connection of the machine and returns the address at its other end.
func (fx *fixture) connects(to netip.AddrPort) (peer string, err error) {
	c, err := fx.host.Dial(fx.t.Context(), "tcp", to.String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.RemoteAddr().String(), nil
}

// A machine's own connection to a VIP opens to a server, and seems to be to the VIP.
func TestLocalClients(t *testing.T) {
	t.Parallel()
	for _, isV6 := range []bool{false, true} {
		fx := newLocalClients(t, isV6)
		vip := fx.at("vip", 80)
		refused := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
		served := func(err error) bool { return err == nil }
		for _, tt := range []struct {
			name   string
			change func(*lb.Service)
			is     func(error) bool
			port   uint16
		}{
			{"a server", func(*lb.Service) {}, served, 80},
			{"affinity", func(s *lb.Service) { s.Affinity = time.Minute }, served, 80},
			{"source-hash", func(s *lb.Service) { s.Algorithm = lb.AlgorithmSourceHash }, served, 80},
			{"round-robin", func(s *lb.Service) { s.Algorithm = lb.AlgorithmRoundRobin }, served, 80},
			{"least-connections", func(s *lb.Service) { s.Algorithm = lb.AlgorithmLeastConnections }, served, 80},
			{"the source is kept", func(s *lb.Service) { s.KeepSource = true }, served, 80},
			{"a range", func(s *lb.Service) {
				s.Ports[0].Port.Port, s.Ports[0].Last, s.Ports[0].Target = 79, 90, 8079
			}, served, 80},
			{"no server", func(s *lb.Service) { s.Ports[0].Backends = nil }, refused(syscall.ECONNREFUSED), 80},
			{"a source that may not connect", func(s *lb.Service) {
				s.Allow = []netip.Prefix{hostPrefix(fx.addr("client").String())}
			}, refused(syscall.EPERM), 80},
			{"a source that may", func(s *lb.Service) {
				s.Allow = []netip.Prefix{hostPrefix(fx.addr("self").String())}
			}, served, 80},
		} {
			fx.ownService(tt.change, "self")
			peer, err := fx.connects(vip)
			must.True(t, tt.is(err) && (err != nil || peer == vip.String()),
				"IPv6 %t, %s: %v, connected to %s", isV6, tt.name, err, peer)
			for _, f := range must.Get(fx.d.Held())(t) {
				fx.apply(lb.Delta{Delete: []lb.Frontend{f}})
			}
		}
	}
}

// An IPv6 socket may connect to an IPv4 VIP.
func TestLocalClientsMapped(t *testing.T) {
	t.Parallel()
	fx := newLocalClients(t, false)
	fx.ownService(func(*lb.Service) {}, "self")
	fx.do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrInet6{Port: 80, Addr: fx.addr("vip").As16()}
		if err := unix.Connect(fd, to); err != nil {
			return err
		}
		peer, err := unix.Getpeername(fd)
		if err != nil {
			return err
		}
		got, ok := peer.(*unix.SockaddrInet6)
		must.True(t, ok && got.Addr == to.Addr && got.Port == to.Port, "connected to %+v", peer)
		return nil
	})
}

// Only connections to a VIP, from the datapath's network namespace, are changed.
func TestOtherConnections(t *testing.T) {
	t.Parallel()
	fx := newLocalClients(t, false)
	fx.ownService(func(*lb.Service) {}, "self")
	e := fx.answer(fx.at("self", 40000), fx.at("vip", 80), lb.TCP)
	must.True(t, strings.Contains(strings.Join(e.Steps, "; "), "local_clients"), "explain: %v", e.Steps)
	peer, err := fx.connects(fx.at("self", 8080))
	must.True(t, err == nil && peer == fx.at("self", 8080).String(), "%v, connected to %s", err, peer)
	_, err = fx.peer.Dial(t.Context(), "tcp", fx.at("vip", 80).String())
	must.True(t, errors.Is(err, syscall.ENETUNREACH), "a host without a route: %v", err)
}

// A connection ends with its server, and an entry with its socket, even if the kernel does not tell.
func TestLocalConnectionsEnd(t *testing.T) {
	t.Parallel()
	for _, isV6 := range []bool{false, true} {
		fx := newLocalClients(t, isV6)
		entries := func(want int, when string) {
			t.Helper()
			var cookie uint64
			var value bpf.SockFlow
			n, all := 0, fx.d.objects.SySockets.Iterate()
			for all.Next(&cookie, &value) {
				n++
			}
			must.Row(t, when, want, n)
		}
		dial := func() net.Conn { return must.Get(fx.host.Dial(t.Context(), "tcp", fx.at("vip", 80).String()))(t) }
		p := fx.serve(func(s *lb.Service) { s.LocalClients = true }, "self")
		must.Do(t, dial().Close())
		entries(0, "after close")
		c := dial()
		defer c.Close()
		fx.collect()
		entries(1, "while the server is up")
		down := *p
		down.Targets, down.Down = nil, []netip.AddrPort{fx.at("self", 8080)}
		fx.apply(lb.Delta{Put: []*lb.FrontendPlan{&down}})
		fx.collect()
		must.Do(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
		_, err := c.Read(make([]byte, 1))
		must.True(t, errors.Is(err, syscall.ECONNABORTED), "IPv6 %t: %v", isV6, err)
		entries(0, "after the server failed")
		must.Do(t, fx.d.objects.SySockets.Put(uint64(1), bpf.SockFlow{}))
		fx.d.flows.EndStrays()
		fx.collect()
		entries(0, "without a socket")
	}
}

// A forged SYN of a client does not translate packets of his connection with the machine's own address.
func TestForgedSYNToThisMachine(t *testing.T) {
	t.Parallel()
	for _, isV6 := range []bool{false, true} {
		fx := newLocalClients(t, isV6)
		fx.service(lb.TCP, "self")
		forged := fx.fromClient(dptest.TCP, dptest.SYN)
		fx.run(forged.Frame())
		from := func(flags byte) netip.AddrPort {
			return fx.out(dptest.Packet{Src: fx.at("self", 8080), Dst: forged.Src, Proto: dptest.TCP, Flags: flags}).Src
		}
		must.Row(t, "data comes from", fx.at("self", 8080), from(dptest.ACK|dptest.PSH))
		must.Row(t, "an answer comes from", fx.at("vip", 80), from(dptest.SYN|dptest.ACK))
		must.Row(t, "data after the answer comes from", fx.at("vip", 80), from(dptest.ACK|dptest.PSH))
	}
}

// A backend whose address appears later gets no packets, because the programs do not translate its replies.
func TestOwnAddressAppears(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.watch()
	must.Do(t, fx.host.AddAddress("eth0", netip.MustParsePrefix("192.0.2.21/24")))
	fx.service(lb.TCP, "b1")
	labtest.Until(t, "a fault is reported", func() error { return wrong(x.of(fx.addr("vip")) == "", "none") })
}

// Programs that were detached are attached again.
func TestLocalClientsAreRepaired(t *testing.T) {
	t.Parallel()
	fx := newLocalClients(t, false)
	fx.ownService(func(*lb.Service) {}, "self")
	fx.watch()
	fx.do(func() error { return detachPin(fx.d.pins.Link(hook.PinName("", "connect4"))) })
	labtest.Within(t, noticed, "connections are balanced again", func() error {
		_, err := fx.connects(fx.at("vip", 80))
		return err
	})
	must.Row(t, "findings", 0, len(fx.d.Findings()))
	must.True(t, fx.repairs() > 0, "no repair is counted")
}
