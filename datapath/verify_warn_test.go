package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// looks returns a function that runs the checks for warnings and returns the warnings. Each call advances now by the
// interval at which counters are read.
func (fx *fixture) looks(now *time.Time) func() string {
	return func() string {
		*now = now.Add(verify.WarnEvery)
		fx.do(func() error {
			v := fx.d.verifier
			v.Mu.Lock()
			defer v.Mu.Unlock()
			v.Look(false)
			v.Warn(route.Changes{}, *now)
			return nil
		})
		return strings.Join(lbtest.Texts(fx.d.Findings()), "; ")
	}
}

// New connections that are dropped because of a limit are reported as long as this happens, as a warning if they are
// less than one in a hundred.
func TestExhaustedCapacityIsReported(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	fx.service(lb.TCP, "b1")
	fx.serve(func(s *lb.Service) { s.Name, s.Method, s.Ports[0].Port.Port = "large", lb.MethodDSR, 8080 }, "b2")
	now := time.Now()
	look := fx.looks(&now)
	connect(fx)
	must.Row(t, "findings at the start", "", look()+look())
	want := " packets of new connections were dropped or reset since " + now.Format(time.TimeOnly) +
		": snat_exhausted (web to " + fx.at("b1", 8080).String() + "): some 200 tries found no free source port"
	for i := range 120 {
		p := fx.on(i, dptest.TCP, dptest.SYN)
		p.Dst = fx.at("vip", 8080)
		fx.quick(p)
	}
	for n, severity := range []lb.Severity{lb.SeverityWarning, lb.SeverityDegraded} {
		fx.wantReason("another connection", fx.on(1+n, dptest.TCP, dptest.SYN), "snat_exhausted")
		w := look()
		must.Need(t, strings.HasPrefix(w, fmt.Sprint(1+n, want)) && fx.d.Findings()[0].Severity == severity,
			"findings %q; want %s, %q", fx.d.Findings(), severity, want)
	}
	for range int(verify.ExhaustedFor/verify.WarnEvery) - 1 {
		must.Need(t, strings.HasPrefix(look(), "2"+want), "findings %q; want %q", fx.d.Findings(), want)
	}
	must.Row(t, "findings later", "", look())
}

// A server whose clients do not continue is named until they do. If no server's clients do, the port is named, unless
// as many clients continue as before, because then the others are a flood of SYNs.
func TestLostRepliesOfAServerAreFound(t *testing.T) {
	t.Parallel()
	for _, method := range []lb.Method{lb.MethodTunnel, lb.MethodNAT} {
		fx := shared(t, hookXDP, false, nil)
		fx.byTunnel(func(s *lb.Service) { s.Algorithm, s.Method = lb.AlgorithmMaglev, method })
		now, flow := time.Now(), 0
		look := fx.looks(&now)
		look()
		after := func(flows int, lost func(n int, server netip.Addr) bool) string {
			for n := range flows {
				flow++
				if lost(n, fx.went(fx.on(flow, dptest.TCP, dptest.SYN))) {
					continue
				}
				if method == lb.MethodNAT {
					fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
				}
				fx.went(fx.on(flow, dptest.TCP, dptest.ACK))
			}
			now = now.Add(verify.RepliesEvery)
			return look()
		}
		b1 := fx.went(fx.on(0, dptest.TCP, dptest.SYN))
		none := func(int, netip.Addr) bool { return false }
		all := func(int, netip.Addr) bool { return true }
		for n, tt := range []struct {
			want  string
			flows int
			lost  func(int, netip.Addr) bool
		}{
			{"", 60, none},
			{b1.String() + ":", 60, func(_ int, to netip.Addr) bool { return to == b1 }},
			{"", 60, none},
			{fx.at("vip", 80).String() + "/tcp of web, clients continued 0 (before: 60 of 60)", 60, all},
			{"clients continued 30 (before: 60 of 60)", 60, func(n int, _ netip.Addr) bool { return n%2 == 0 }},
			{"", 240, func(n int, _ netip.Addr) bool { return n%4 > 0 }}, // a flood
			{"", 5, all},
			{"", 60, none},
		} {
			w := after(tt.flows, tt.lost)
			several := strings.Count(w, "clients continued") > 1
			must.True(t, (tt.want != "" || w == "") && strings.Contains(w, tt.want) && !several,
				"%s, step %d: findings %q; want %q", method, n, w, tt.want)
		}
	}
}

// A service that has used its share of UDP flows is named.
func TestServiceWithItsShareIsNamed(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = 4 })
	dns(fx)
	v := fx.d.verifier
	owners := map[string]bool{}
	find := func() { fx.do(func() error { v.Look(false); v.FindOwners("udp_share_full", owners); return nil }) }
	find()
	must.Row(t, "without a flow", nil, owners)
	fx.run(udp(fx).Frame())
	find()
	must.Row(t, "with its share", map[string]bool{"web": true}, owners)
}

// A takeover keeps the tables with their flows, and so their size. A larger max_flows causes a warning.
func TestKeptSizeIsWarnedOf(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, func(o *Options) { o.MaxFlows = 100 })
	for _, tt := range []struct {
		flows int
		want  string
	}{
		{100, ""},
		{2000, "max_flows is 2000, but the flow tables in the kernel keep their size for 100: drain this node"},
		{50, ""},
	} {
		fx.o.MaxFlows = tt.flows
		fx.close()
		fx.open()
		w := strings.Join(lbtest.Texts(fx.d.Findings()), "; ")
		must.True(t, strings.HasPrefix(w, tt.want) && (tt.want != "" || w == ""),
			"max_flows %d: warnings %q; want %q", tt.flows, w, tt.want)
		n := fx.d.objects.SyStreamServers.MaxEntries()
		must.True(t, n == 100, "max_flows %d: the table has room for %d", tt.flows, n)
	}
}

// Tunnel packets that are dropped because they lack the key cause a warning as long as they arrive.
func TestTunnelPacketsWithoutTheKeyAreWarnedOf(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) {
		o.TunnelSources = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
	})
	fx.do(func() error { return fx.d.SetTunnelSources(nil) })
	fx.keys(true, "current")
	now := time.Now()
	look := fx.looks(&now)
	must.Row(t, "warnings at the start", "", look()+look())
	in := fx.fromClient(dptest.TCP, dptest.SYN)
	in.Dst = fx.at("loopback", 80)
	did, _ := fx.runTC(fx.fromNode(in).Frame())
	must.Need(t, did == "dropped", "a packet without a key was %s", did)
	w := look()
	must.True(t, strings.HasPrefix(w, "1 tunnel packets were dropped since ") &&
		strings.Contains(w, ": tunnel_key_mismatch: "), "warnings %q", w)
}

// If synthetic packets cannot be run, no fault is known, and a warning says so.
func TestVerificationThatDoesNotRun(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.watch()
	fx.warns()
	must.Do(t, fx.d.objects.SyExplain.Close())
	fx.warns("packets cannot be verified: run the programs on a packet: ")
	x.is("")
}

// Without descriptors, the state of the network is unknown. Then interfaces are not considered deleted, no address gets
// a fault, and a warning says so.
func TestShortageIsNoFault(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	watch := func() {
		end := time.Now().Add(2 * max(verify.ConfirmAfter, verify.ClearAfter))
		for ; time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			fx.do(func() error { fx.d.verifier.Verify(); return nil })
		}
	}
	watch()
	var limit unix.Rlimit
	must.Do(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none := limit
	none.Cur = 0 // open descriptors stay open
	set := func(limit unix.Rlimit) { must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }
	defer set(limit)
	set(none)
	watch()
	fx.warns("packets cannot be verified: read the network state: ")
	x.is("")
	set(limit)
	watch()
	fx.warns()
	for _, s := range fx.d.Interfaces() {
		must.True(t, s.Mode != "", "%+v", s)
	}
}

// Another program that runs before ours is run on a synthetic packet if this is permitted. Otherwise a warning says
// that it is not, except about our service proxy.
func TestProgramsThatMayNotBeExamined(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.do(func() error { return dptest.AttachXDP("eth0", dptest.XDPPass) })
	look := func() string {
		fx.changed()
		return strings.Join(lbtest.Texts(fx.d.Findings()), "; ")
	}
	must.Row(t, "warnings with all capabilities", "", look())
	const want = "eth0: cannot verify without CAP_SYS_ADMIN whether other programs that run before ours (id "
	w := fx.withoutAdmin()
	must.True(t, strings.HasPrefix(w, want), "warnings %q; want %q", w, want)
	fx.do(func() error { return dptest.DetachXDP("eth0") })
	if labtest.TCHook(t) == "tcx" {
		pins := filepath.Join(fx.o.PinPath, pin.Schema, "inside", "tcx")
		fx.do(func() error { return dptest.AttachTCX("eth0", pins) })
		must.Row(t, "warnings about the service proxy", "", fx.withoutAdmin())
		fx.do(func() error { return os.RemoveAll(pins) }) // ends the link
		fx.do(func() error { return dptest.AttachTCX("eth0", filepath.Join(fx.o.PinPath, "other")) })
		w := fx.withoutAdmin()
		must.True(t, strings.HasPrefix(w, want), "warnings %q; want %q", w, want)
	}
	x.is("")
}

// withoutAdmin returns the findings after a round without CAP_SYS_ADMIN.
func (fx *fixture) withoutAdmin() string {
	fx.d.hooks.Foreign = map[string]hook.Foreign{} // forget the result, which would be used for a while
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	fx.do(func() error { return unix.Capget(&header, &all[0]) })
	few := all
	few[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	fx.do(func() error {
		if err := unix.Capset(&header, &few[0]); err != nil {
			return err
		}
		fx.d.verifier.Changed(route.Changes{Links: true, Routes: true})
		return unix.Capset(&header, &all[0])
	})
	return strings.Join(lbtest.Texts(fx.d.Findings()), "; ")
}

// If routers know the VIPs, a warning says that clients behind them receive no replies because there is no route.
func TestNoRouteToClientsIsWarnedOf(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, func(o *Options) { o.Routers = true }, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.watch()
	fx.warns("only clients on this node's links get replies from " + v4["vip"] + ", because there is no default route")
	toRouter(fx)
	fx.warns()
	x.is("")
}

// numbered returns the plan of the i-th of many services with one backend, which has this weight.
func (fx *fixture) numbered(i, weight int) *lb.FrontendPlan {
	return lb.Build(&lb.Service{
		Name: fmt.Sprint(i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 1, byte(i >> 8), byte(i)})},
		Ports: lb.PortsOn([]lb.Backend{{Addr: fx.addr("unknown"), Weight: weight}},
			lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}, nil, lb.Drains{}).Frontends[0]
}

// A change of one frontend allocates as much memory when thousands have a fault as when a few do.
func TestAChangeIsIndependentOfOtherFaults(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	put := func(from, to int) {
		var d lb.Delta
		for i := from; i < to; i++ {
			d.Put = append(d.Put, fx.numbered(i, 1))
		}
		fx.apply(d)
		must.Need(t, len(x.now) == to, "%d faults of %d frontends", len(x.now), to)
	}
	garbage := func() uint64 {
		const changes = 50
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range changes {
			fx.apply(lb.Delta{Put: []*lb.FrontendPlan{fx.numbered(0, 2+i)}})
		}
		runtime.ReadMemStats(&after)
		return (after.TotalAlloc - before.TotalAlloc) / changes
	}
	put(0, 16)
	few := garbage()
	put(16, 4096)
	many := garbage()
	must.True(t, many <= few+few/2, "a change leaves %d bytes of garbage with 4096 faults, and %d with 16", many, few)
}

// While this node has a fault, each VIP has it, including a new one. A removed VIP soon has it no longer.
func TestFaultsOfTheNodeFollowChanges(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	plans := []*lb.FrontendPlan{fx.numbered(0, 1), fx.numbered(1, 1), fx.numbered(2, 1)}
	fx.apply(lb.Delta{Put: plans[:2]})
	fx.watch()
	fx.do(func() error { return ip(netlink.LinkSetDown)(fx) })
	const down = "no interface forwards: eth0 is down"
	reported := func(want ...string) error {
		var errs []error
		for i, p := range plans {
			errs = append(errs, wrong(x.of(p.VIP) != want[i], "fault of %s: %q", p.VIP, x.of(p.VIP)))
		}
		return errors.Join(errs...)
	}
	labtest.Within(t, noticed, "it is reported", func() error { return reported(down, down, "") })
	fx.apply(lb.Delta{Put: plans[2:], Delete: []lb.Frontend{plans[1].Frontend}})
	must.Row(t, "the fault when Apply returns", down, x.of(plans[2].VIP))
	labtest.Until(t, "the removed one has no fault", func() error {
		return errors.Join(reported(down, "", down), wrong(fx.d.verifier.Faults() != 2, "%d", fx.d.verifier.Faults()))
	})
	fx.do(func() error { return ip(netlink.LinkSetUp)(fx) })
	labtest.Until(t, "the faults of the frontends themselves are reported again", func() error {
		return wrong(x.of(plans[0].VIP) == down || x.of(plans[0].VIP) == "" || x.of(plans[0].VIP) != x.of(plans[2].VIP),
			"%q, %q", x.of(plans[0].VIP), x.of(plans[2].VIP))
	})
}
