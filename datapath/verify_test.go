package datapath

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// faults holds the faults that a datapath has reported and not withdrawn.
type faults struct {
	fx  *fixture
	mu  sync.Mutex // guards now
	now map[netip.Addr]string
}

func (x *faults) changed(m map[netip.Addr]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for addr, fault := range m {
		if fault == "" {
			delete(x.now, addr)
		} else {
			x.now[addr] = fault
		}
	}
}

func (x *faults) of(addr netip.Addr) string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.now[addr]
}

// is checks that the VIP's fault contains this text or, with "", that there is none.
func (x *faults) is(want string) {
	x.fx.t.Helper()
	got := x.of(x.fx.addr("vip"))
	must.True(x.fx.t, (got == "") == (want == "") && strings.Contains(got, want), "fault %q; want %q", got, want)
}

// staysAway checks for some time that the VIP has no fault.
func (x *faults) staysAway(d time.Duration) {
	x.fx.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		x.is("")
	}
}

// becomes waits until the VIP's fault contains this text or, with "", until there is none.
func (x *faults) becomes(want string, within time.Duration) {
	x.fx.t.Helper()
	labtest.Within(x.fx.t, within, "the fault is "+want, func() error {
		got := x.of(x.fx.addr("vip"))
		return wrong((got == "") != (want == "") || !strings.Contains(got, want), "fault %q", got)
	})
}

// verified is newFixture with a watched datapath, and returns the faults that it reports.
func verified(t *testing.T, mode Mode, isV6 bool, change func(*Options), prepare func(*fixture)) (*fixture, *faults) {
	t.Helper()
	fx := newFixtureWith(t, hookTC, isV6, func(o *Options) {
		o.Mode = mode
		if change != nil {
			change(o)
		}
	}, prepare)
	x := &faults{fx: fx, now: map[netip.Addr]string{}}
	fx.d.OnFault(x.changed)
	return fx, x
}

// noticed is the time within which a state is repaired or reported: 1.5 s, and half a second for a busy machine.
const noticed = 2 * time.Second

// repaired returns nil if all programs are active and the kernel permits what they need.
func (fx *fixture) repaired() error {
	fx.t.Helper()
	var out []InterfaceStatus
	missing := ""
	fx.do(func() error { out, missing = fx.d.hooks.Inspect(), fx.d.sysctls.Forwards("lo"); return nil })
	for _, s := range out {
		if s.Fault != "" {
			return fmt.Errorf("%s: %s", s.Name, s.Fault)
		}
	}
	return wrong(missing != "", "%s", missing)
}

// repairs returns the number of counted repairs.
func (fx *fixture) repairs() (sum uint64) {
	for _, n := range fx.d.hooks.Repairs() {
		sum += n
	}
	return sum
}

// explainClient explains the client's first packet to VIP:80.
func (fx *fixture) explainClient() lb.Explanation {
	fx.t.Helper()
	return fx.answer(fx.at("client", 40000), fx.at("vip", 80), lb.TCP)
}

func setSysctl(path, value string) func(*fixture) error {
	return func(*fixture) error { return os.WriteFile("/proc/sys/net/"+path, []byte(value), 0o644) }
}

func steps(all ...func(*fixture) error) func(*fixture) error {
	return func(fx *fixture) error {
		for _, f := range all {
			if err := f(fx); err != nil {
				return err
			}
		}
		return nil
	}
}

// detach detaches a pinned link, as "bpftool link detach" does.
func detach(kind string) func(*fixture) error {
	return func(fx *fixture) error {
		return detachPin(fx.d.pins.Link(hook.PinName("eth0", kind)))
	}
}

// detachPin detaches the link with this pin.
func detachPin(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	d, ok := l.(interface{ Detach() error })
	if !ok {
		return fmt.Errorf("%T cannot be detached", l)
	}
	return d.Detach()
}

// Changes by other software on the node are undone within a second.
func TestRepairs(t *testing.T) {
	t.Parallel()
	tcx := labtest.TCHook(t) == "tcx"
	for _, tt := range []struct {
		name   string
		mode   Mode
		needs  bool
		change func(*fixture) error
	}{
		{"tc ingress detached", ModeTC, tcx, detach("tcx")},
		{"tc egress detached", ModeTC, tcx, detach("tcx-out")},
		{"XDP detached", ModeXDP, true, detach("xdp")},
		{"pins of the links removed", ModeXDP, tcx, func(fx *fixture) error {
			links, err := filepath.Glob(fx.d.pins.Link("*"))
			for _, l := range links {
				err = errors.Join(err, os.Remove(l))
			}
			return err
		}},
		{"all pins removed", ModeXDP, tcx, func(fx *fixture) error {
			if err := os.RemoveAll(fx.o.PinPath); !errors.Is(err, unix.ENOTEMPTY) { // unless a repair was faster
				return err
			}
			return nil
		}},
		{"bpffs mounted over the pins", ModeXDP, tcx, func(fx *fixture) error {
			return unix.Mount("bpf", filepath.Dir(fx.o.PinPath), "bpf", 0, "")
		}},
		{"clsact removed", ModeTC, !tcx, ip(func(nic netlink.Link) error {
			return netlink.QdiscDel(hook.ClsactQdisc(nic))
		})},
		{"forwarding off", ModeTC, true, steps(setSysctl("ipv4/ip_forward", "1"), setSysctl("ipv4/ip_forward", "0"))},
		{"IPv6 forwarding off", ModeTC, true, steps(
			setSysctl("ipv6/conf/all/forwarding", "1"), setSysctl("ipv6/conf/all/forwarding", "0"))},
		{"accept_local off", ModeTC, true, setSysctl("ipv4/conf/lo/accept_local", "0")},
		{"entry in sy_uplinks removed", ModeXDP, true, func(fx *fixture) error {
			return fx.d.objects.SyUplinks.Put(fx.nic%hook.UplinkSlots, bpf.Uplink{})
		}},
	} {
		if !tt.needs { // the kernel has another hook
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			fx, x := verified(t, tt.mode, false, nil, func(*fixture) {})
			fx.service(lb.TCP, "b1")
			fx.watch()
			must.Do(t, fx.repaired())
			pins := len(fx.pinned())
			fx.do(func() error { return tt.change(fx) })
			must.Need(t, fx.repaired() != nil || len(fx.pinned()) != pins || fx.repairs() > 0, "no effect")
			labtest.Within(t, noticed, "it is repaired", func() error {
				return errors.Join(fx.repaired(), wrong(len(fx.pinned()) != pins, "pins are missing"))
			})
			must.True(t, fx.repairs() > 0, "no repair is counted")
			x.is("")
			e := fx.explainClient()
			must.True(t, e.Fault == "" && e.Reply == forwarded, "explain: reply %q, fault %q", e.Reply, e.Fault)
		})
	}
}

// The target of the tail call is restored.
func TestChainIsRepaired(t *testing.T) {
	t.Parallel()
	fx, _ := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.watch()
	must.Do(t, fx.d.objects.SyProgs.Delete(uint32(0)))
	var id uint32
	labtest.Within(t, noticed, "it is restored", func() error { return fx.d.objects.SyProgs.Lookup(uint32(0), &id) })
	labtest.Within(t, noticed, "the repair is counted", func() error { return wrong(fx.repairs() != 1, "not once") })
}

func ip(f func(nic netlink.Link) error) func(*fixture) error {
	return func(*fixture) error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return f(nic)
	}
}

func prefix(text string) *net.IPNet {
	_, n, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return n
}

// A state in which clients receive no answer is reported within a second, and explain describes it. The report is
// withdrawn when the state ends.
func TestFaults(t *testing.T) {
	t.Parallel()
	defaultRoute := &netlink.Route{Gw: net.ParseIP(v4["router"])}
	blackhole := &netlink.Route{Dst: prefix(v4["b1"] + "/32"), Type: unix.RTN_BLACKHOLE}
	for _, tt := range []struct {
		name       string
		break_, it func(*fixture) error // it undoes break_
		want       string
	}{
		{"link down", ip(netlink.LinkSetDown), steps(ip(netlink.LinkSetUp),
			func(*fixture) error { return netlink.RouteAdd(defaultRoute) }), "eth0 is down"},
		{"blackhole towards the servers", func(*fixture) error { return netlink.RouteAdd(blackhole) },
			func(*fixture) error { return netlink.RouteDel(blackhole) }, "no_route"},
		{"no default route", func(*fixture) error { return netlink.RouteDel(defaultRoute) },
			func(*fixture) error { return netlink.RouteAdd(defaultRoute) }, "no route to clients"},
		{"frontend removed from the map", func(fx *fixture) error {
			f := lb.Frontend{VIP: fx.addr("vip"), Port: 80, Protocol: lb.TCP}
			return fx.d.objects.SyFrontends.Delete(table.ToFrontendKey(f))
		}, nil, "no_frontend"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, nil, toRouter)
			fx.service(lb.TCP, "b1")
			fx.watch()
			x.is("")
			fx.do(func() error { return tt.break_(fx) })
			x.becomes(tt.want, noticed)
			if tt.it == nil {
				return
			}
			fx.do(func() error { return tt.it(fx) })
			x.becomes("", 3*time.Second)
		})
	}
}

// A new frontend's faults are reported before Apply returns, so its VIP is not announced.
func TestFaultsOfANewFrontendAreReportedAtOnce(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "unknown")
	x.is("no_route")
	e := fx.explainClient()
	must.True(t, e.Action == "reset" && e.Reason == "no_route" && strings.Contains(e.Fault, "no_route"),
		"explain: %s, %s, fault %q", e.Action, e.Reason, e.Fault)
}

// The verdict on a packet that this node delivers itself names a backend of the delivering frontend, not a node.
func TestDeliveryHereIsNoFault(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, func(o *Options) { acceptTunnels(o); o.Delivers = true }, func(*fixture) {})
	for _, nodes := range [][]string{{"self"}, {"self", "router"}, {"router"}} {
		for _, policyLocal := range []bool{false, true} {
			fx.reset()
			fx.spread(lb.TCP, policyLocal, nodes...)
			x.is("")
		}
	}
}

// secondNIC adds eth1, on whose link the host "peer" has an address.
func (fx *fixture) secondNIC() {
	fx.t.Helper()
	must.Do(fx.t, fx.lab.Link(
		lab.End{Host: fx.host, Name: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.1/24")}},
		lab.End{Host: fx.peer, Name: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")}},
		lab.LinkOptions{}))
}

// The interface towards a backend gets the programs immediately, and when the route changes later.
func TestInterfacesFollowRoutes(t *testing.T) {
	t.Parallel()
	names := func(fx *fixture) map[string]Mode {
		all := map[string]Mode{}
		for _, s := range fx.d.Interfaces() {
			all[s.Name] = s.Mode
		}
		return all
	}
	want := map[string]Mode{"eth0": ModeTC, "eth1": ModeTC}
	t.Run("at the start", func(t *testing.T) {
		fx, x := verified(t, ModeTC, false, nil, (*fixture).secondNIC)
		fx.service(lb.TCP, "inside")
		must.Row(t, "attached to", want, names(fx))
		x.is("")
		fx.close()
		fx.open() // the next agent keeps it before it has any plan
		must.Row(t, "the next agent is attached to", want, names(fx))
	})
	t.Run("a new interface", func(t *testing.T) {
		fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
		fx.service(lb.TCP, "inside")
		x.is("no_route")
		fx.watch()
		fx.secondNIC()
		labtest.Within(t, 3*time.Second, "it is attached, and the fault is withdrawn", func() error {
			return errors.Join(wrong(!maps.Equal(names(fx), want), "%v", names(fx)),
				wrong(x.of(fx.addr("vip")) != "", "%s", x.of(fx.addr("vip"))))
		})
	})
}

// If nothing works, a round takes about as many synthetic packets as if everything works, not many for each frontend.
func TestARoundOfManyFaultsIsShort(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	const n = 100
	var d lb.Delta
	for i := range n {
		d.Put = append(d.Put, fx.numbered(i, 1))
	}
	fx.apply(d)
	fx.do(func() error { fx.d.verifier.Changed(route.Changes{}); return nil })
	sum := 0
	for _, tries := range fx.d.verifier.Failed {
		sum += tries
	}
	must.True(t, sum >= n && sum <= n+2*verify.MadeTries && len(x.now) == n,
		"%d synthetic packets for %d frontends, %d faults", sum, n, len(x.now))
}

// appears waits until the VIP has a fault.
func (x *faults) appears() {
	x.fx.t.Helper()
	labtest.Until(x.fx.t, "there is a fault", func() error {
		return wrong(x.of(x.fx.addr("vip")) == "", "no fault")
	})
}
