package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const forwarded = "forwarded" // REASON_FORWARDED

// hookName is the program through which a packet is run.
type hookName string

const (
	hookXDP hookName = "xdp"
	hookTC  hookName = "tc"
)

// fixture is a node whose programs BPF_PROG_TEST_RUN runs on packets, for one address family.
type fixture struct {
	t    *testing.T
	lab  *lab.Lab
	host *lab.Host
	peer *lab.Host // the other end of eth0
	d    *Datapath
	o    Options
	hook hookName
	v6   bool
	nic  uint32
	// programs are run instead of those that Open has loaded.
	programs *hook.Programs
	// last is the last packet that was sent to a backend, from which reply derives its packets.
	last   dptest.Packet
	server []byte // server that after's packet was sent to
	// do's thread.
	busy  sync.Mutex
	calls chan func() // nil while there is none
}

// Addresses by name, for each family.
var (
	v4 = map[string]string{
		"self": "192.0.2.1", "loopback": "203.0.113.50", "vip": "203.0.113.10", "elsewhere": "203.0.113.99",
		"client": "192.0.2.100", "other": "192.0.2.100", "b1": "192.0.2.21", "b2": "192.0.2.22",
		"router": "192.0.2.254", "far": "198.51.100.77", "unrouted": "198.51.100.9", "unknown": "198.18.0.9",
		"peer": "192.0.2.200", "down": "192.0.2.99", "inside": "10.1.0.2",
	}
	v6 = map[string]string{
		"self": "2001:db8::1", "loopback": "2001:db8:1::50", "vip": "2001:db8:1::10", "elsewhere": "2001:db8:1::99",
		"client": "2001:db8::100", "other": "2001:db8::100", "b1": "2001:db8::21", "b2": "2001:db8::22",
		"router": "2001:db8::254", "far": "2001:db8:9::77", "unrouted": "2001:db8:9::9", "unknown": "2001:db8:77::9",
	}
)

func (fx *fixture) addr(name string) netip.Addr {
	if fx.v6 {
		return netip.MustParseAddr(v6[name])
	}
	return netip.MustParseAddr(v4[name])
}

func (fx *fixture) at(name string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(fx.addr(name), port)
}

var quiet = slog.New(slog.DiscardHandler)

func testOptions() Options {
	return Options{
		Interfaces: []string{"eth0"}, Mode: ModeXDP, MaxFlows: 1000, SNATPorts: []PortRange{{61000, 65535}},
		TunnelPort: 6090, Timeouts: DefaultTimeouts,
		PinPath: DefaultPinPath, StateDir: DefaultStateDir, Log: quiet,
	}
}

// newFixture creates a host with one uplink whose neighbours are known, and opens a datapath there.
func newFixture(t *testing.T, h hookName, isV6 bool, change func(*Options)) *fixture {
	t.Helper()
	return newFixtureWith(t, h, isV6, change, func(*fixture) {})
}

// newFixtureWith is newFixture with changes to the host before it opens the datapath.
func newFixtureWith(t *testing.T, h hookName, isV6 bool, change func(*Options), prepare func(*fixture)) *fixture {
	t.Helper()
	fx := &fixture{t: t, lab: labtest.New(t), o: testOptions(), hook: h, v6: isV6}
	t.Cleanup(fx.stopCalls)
	if change != nil {
		change(&fx.o)
	}
	fx.makeHost()
	prepare(fx)
	fx.open()
	return fx
}

// makeHost creates a host with one uplink whose neighbours are known.
func (fx *fixture) makeHost() {
	fx.t.Helper()
	fx.host, fx.peer = labtest.Host(fx.t, fx.lab, "lb"), labtest.Host(fx.t, fx.lab, "peer")
	end := lab.End{Host: fx.host, Name: "eth0",
		Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}}
	other := lab.End{Host: fx.peer, Name: "eth0"}
	must.Do(fx.t, fx.lab.Link(end, other, lab.LinkOptions{SoftwareChecksums: true}))
	fx.do(func() error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		fx.nic = uint32(nic.Attrs().Index)
		if err := netlink.LinkSetHardwareAddr(nic, dptest.MAC); err != nil {
			return err
		}
		for _, names := range []map[string]string{v4, v6} {
			if err := fx.host.AddAddress("lo", hostPrefix(names["loopback"])); err != nil {
				return err
			}
			far := net.ParseIP(names["far"])
			bits := 8 * len(far)
			if far.To4() != nil {
				far, bits = far.To4(), 32
			}
			dst := &net.IPNet{IP: far, Mask: net.CIDRMask(bits, bits)}
			if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(names["router"])}); err != nil {
				return fmt.Errorf("route to far: %w", err)
			}
			for _, name := range []string{"client", "b1", "b2", "router"} {
				err := netlink.NeighSet(&netlink.Neigh{
					LinkIndex: nic.Attrs().Index, State: netlink.NUD_PERMANENT,
					IP: net.ParseIP(names[name]), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
				})
				if err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func hostPrefix(addr string) netip.Prefix {
	a := netip.MustParseAddr(addr)
	return netip.PrefixFrom(a, a.BitLen())
}

// do runs f on the balancer. It reuses a thread, because starting one takes longer than running most packets.
func (fx *fixture) do(f func() error) {
	fx.t.Helper()
	if !fx.busy.TryLock() { // called from within f of another call
		must.Do(fx.t, fx.host.Do(f))
		return
	}
	defer fx.busy.Unlock()
	err := errEnded
	done := make(chan struct{})
	call := func() { defer close(done); err = f() }
	if fx.calls == nil {
		fx.calls = make(chan func())
		go fx.serveCalls(fx.calls)
	}
	fx.calls <- call
	<-done
	if err == errEnded { // f has ended the thread
		fx.calls = nil
	}
	must.Do(fx.t, err)
}

var errEnded = errors.New("the function has ended the test")

// serveCalls runs calls on the balancer until one of them ends the test or calls is closed.
func (fx *fixture) serveCalls(calls chan func()) {
	_ = fx.host.Do(func() error { // calls return their own errors
		for call := range calls {
			call()
		}
		return nil
	})
}

// stopCalls ends do's thread; the next call starts another one.
func (fx *fixture) stopCalls() {
	if fx.calls != nil {
		close(fx.calls)
		fx.calls = nil
	}
}

// open opens the datapath until the test ends.
func (fx *fixture) open() {
	fx.t.Helper()
	fx.load()
	fx.t.Cleanup(func() { fx.close() })
}

func (fx *fixture) load() {
	fx.t.Helper()
	fx.do(func() (err error) {
		fx.d, err = Open(fx.o)
		return err
	})
}

func (fx *fixture) close() {
	if fx.d == nil {
		return
	}
	must.Do(fx.t, fx.d.Close())
	fx.d = nil
}

// service serves VIP:80 for a protocol with port 8080 of these backends.
func (fx *fixture) service(proto lb.Protocol, backends ...string) *lb.FrontendPlan {
	fx.t.Helper()
	return fx.serve(func(s *lb.Service) { s.Ports[0].Protocol = proto }, backends...)
}

// serve serves VIP:80/tcp with port 8080 of these backends, as modified by change.
func (fx *fixture) serve(change func(*lb.Service), backends ...string) *lb.FrontendPlan {
	fx.t.Helper()
	s := &lb.Service{
		Name: "web", VIPs: []netip.Addr{fx.addr("vip")},
		Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	for _, b := range backends {
		s.Ports[0].Backends = append(s.Ports[0].Backends, lb.Backend{Addr: fx.addr(b), Weight: 1})
	}
	change(s)
	p := lb.Build(s, nil, lb.Drains{}).Frontends[0]
	fx.apply(lb.Delta{Put: []*lb.FrontendPlan{p}})
	return p
}

func (fx *fixture) apply(d lb.Delta) {
	fx.t.Helper()
	fx.do(func() error {
		for f, err := range fx.d.Apply(context.Background(), d) {
			return fmt.Errorf("%s: %w", f, err)
		}
		return nil
	})
}

// fromClient is a packet from the client to VIP:80.
func (fx *fixture) fromClient(proto uint8, flags uint8) dptest.Packet {
	p := dptest.Packet{Src: fx.at("client", 40000), Dst: fx.at("vip", 80), Proto: proto, Flags: flags,
		Payload: []byte("hello"), DF: true}
	if proto == dptest.TCP {
		p.Seq, p.Ack, p.Window = 1000, 5001, 501
	}
	return fx.marked(p)
}

// marked sets IP header fields that must be preserved.
func (fx *fixture) marked(p dptest.Packet) dptest.Packet {
	p.TOS, p.ID = 0x28, 0xbeef
	if fx.v6 {
		p.ID, p.Label = 0, 0xabcde
	}
	return p
}

// reply is a packet from the backend that received the last packet.
func (fx *fixture) reply(flags uint8) dptest.Packet {
	return fx.marked(dptest.Packet{Src: fx.last.Dst, Dst: fx.last.Src, Proto: fx.last.Proto, Flags: flags, Seq: 5000,
		Ack: 1001, Payload: []byte("answer")})
}

// each runs f for every hook and family.
func each(t *testing.T, f func(t *testing.T, h hookName, v6 bool)) {
	eachOnce(t, f)
	t.Run("xdp/v6", func(t *testing.T) { f(t, hookXDP, true) })
	t.Run("tc/v4", func(t *testing.T) { f(t, hookTC, false) })
}

// eachOnce runs f for both hooks and both families, but not all combinations, for rules that depend on neither.
func eachOnce(t *testing.T, f func(t *testing.T, h hookName, v6 bool)) {
	t.Run("xdp/v4", func(t *testing.T) { f(t, hookXDP, false) })
	t.Run("tc/v6", func(t *testing.T) { f(t, hookTC, true) })
}

// eachOf runs f for every hook and family on one host that has no services and flows at first. Tests that change the
// host or close its datapath need each.
func eachOf(t *testing.T, change func(*Options), f func(t *testing.T, fx *fixture)) {
	fx := shared(t, hookXDP, false, change)
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx.begin(t, h, v6)
		f(t, fx)
	})
	fx.t = t
}

// pinned lists the balancer's pins without programs, which only make the next start faster.
func (fx *fixture) pinned() (names []string) {
	fx.t.Helper()
	fx.do(func() error {
		return filepath.Walk(DefaultPinPath, func(path string, info os.FileInfo, err error) error {
			if err == nil && !info.IsDir() && filepath.Base(filepath.Dir(path)) != "programs" {
				names = append(names, strings.TrimPrefix(path, DefaultPinPath+"/"))
			}
			return nil
		})
	})
	return names
}

// addressesSettled waits until the host's IPv6 addresses have their local routes. The kernel adds these from a work
// queue, even for addresses without duplicate address detection (net/ipv6/addrconf.c, addrconf_dad_work).
func (fx *fixture) addressesSettled() {
	fx.t.Helper()
	fx.do(func() error {
		_, err := lab.Until(fx.t.Context(), 10*time.Second, "the addresses have routes", func() error {
			local := &netlink.Route{Table: unix.RT_TABLE_LOCAL}
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, local, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			addrs, err := netlink.AddrList(nil, netlink.FAMILY_V6)
			if err != nil {
				return err
			}
			linkLocal := false
			for _, a := range addrs {
				linkLocal = linkLocal || a.IP.IsLinkLocalUnicast()
				toIt := func(r netlink.Route) bool { return r.Type == unix.RTN_LOCAL && r.Dst.IP.Equal(a.IP) }
				if !slices.ContainsFunc(routes, toIt) {
					return fmt.Errorf("%s has no route", a.IP)
				}
			}
			return wrong(!linkLocal, "no link-local address")
		})
		return err
	})
}

// changed makes the verifier check all links and routes.
func (fx *fixture) changed() {
	fx.t.Helper()
	fx.do(func() error { fx.d.verifier.Changed(route.Changes{Links: true, Routes: true}); return nil })
}

// onNIC changes one of the balancer's interfaces.
func (fx *fixture) onNIC(name string, f func(netlink.Link) error) {
	fx.t.Helper()
	fx.do(func() error {
		nic, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(nic)
	})
}

// refused checks that Open fails with an error that contains all of these texts.
func (fx *fixture) refused(texts ...string) {
	fx.t.Helper()
	fx.do(func() error {
		d, err := Open(fx.o)
		if err == nil {
			return errors.Join(errors.New("Open succeeded"), d.Close())
		}
		for _, text := range texts {
			must.True(fx.t, strings.Contains(err.Error(), text), "Open: %v; want %q", err, text)
		}
		return nil
	})
}
