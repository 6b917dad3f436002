package datapath

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// looks returns a function that looks for warnings, each time later by the interval of counters, and returns them.
func (fx *fixture) looks() func() string {
	now := time.Now()
	return func() string {
		now = now.Add(warnEvery)
		fx.do(func() error {
			v := fx.d.verifier
			v.mu.Lock()
			defer v.mu.Unlock()
			v.warn(changes{}, now)
			return nil
		})
		return strings.Join(fx.d.Warnings(), "; ")
	}
}

// New connections that are dropped because of a limit are warned of, as long as they are.
func TestExhaustedCapacityIsWarnedOf(t *testing.T) {
	fx := newFixture(t, hookTC, false, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
	fx.service(lb.TCP, "b1")
	look := fx.looks()
	connect(fx)
	if w := look() + look(); w != "" {
		t.Errorf("warnings at the start: %s", w)
	}
	other := fx.fromClient(dptest.TCP, dptest.SYN)
	other.Src = fx.at("client", 40001)
	if r := fx.run(other.Frame()); r.reason != "snat_exhausted" {
		t.Fatalf("a second connection: %s: %s", r.did, r.reason)
	}
	const want = "1 packets of new connections were dropped in the last 5s: snat_exhausted: "
	if w := look(); !strings.HasPrefix(w, want) {
		t.Errorf("warnings %q; want %q", w, want)
	}
	if w := look(); w != "" {
		t.Errorf("warnings later: %s", w)
	}
}

// Tunnel packets that are dropped for lack of the key are warned of, as long as they arrive.
func TestTunnelPacketsWithoutTheKeyAreWarnedOf(t *testing.T) {
	fx := newFixture(t, hookTC, false, func(o *Options) {
		o.TunnelSources = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
	})
	fx.do(func() error { return fx.d.SetTunnelSources(nil) })
	fx.keys(true, "current")
	look := fx.looks()
	if w := look() + look(); w != "" {
		t.Errorf("warnings at the start: %s", w)
	}
	in := fx.fromClient(dptest.TCP, dptest.SYN)
	in.Dst = fx.at("loopback", 80)
	if did, _ := fx.runTC(fx.fromNode(in).Frame()); did != "dropped" {
		t.Fatalf("a packet without a key was %s", did)
	}
	const want = "1 tunnel packets were dropped in the last 5s: tunnel_key_mismatch: "
	if w := look(); !strings.HasPrefix(w, want) {
		t.Errorf("warnings %q; want %q", w, want)
	}
	if w := look(); w != "" {
		t.Errorf("warnings later: %s", w)
	}
}

// When made packets cannot be run, no fault is known; that is said.
func TestVerificationThatDoesNotRun(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.watch()
	fx.warns("")
	if err := fx.d.objects.SyExplain.Close(); err != nil {
		t.Fatal(err)
	}
	fx.warns("packets cannot be verified: run the programs on a packet: ")
	if f := x.of(fx.addr("vip")); f != "" {
		t.Errorf("fault %q", f)
	}
}

// Without descriptors nothing is known of the network: interfaces are not taken for deleted, no address gets a fault,
// and that is said.
func TestShortageIsNoFault(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	watch := func() {
		end := time.Now().Add(2 * max(confirmAfter, clearAfter))
		for ; time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			fx.do(func() error { fx.d.verifier.tick(); return nil })
		}
	}
	watch()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 0 // those that are open stay
	set := func(limit unix.Rlimit) {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
	}
	defer set(limit)
	set(none)
	watch()
	fx.warns("packets cannot be verified: look at the network: ")
	if f := x.of(fx.addr("vip")); f != "" {
		t.Errorf("fault %q", f)
	}
	set(limit)
	watch()
	fx.warns("")
	for _, s := range fx.d.Interfaces() {
		if s.Mode == "" {
			t.Errorf("%+v", s)
		}
	}
}

// A program of others before ours is run on a made packet where that is permitted; where it is not, that is said.
func TestProgramsThatMayNotBeExamined(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.do(func() error { return dptest.AttachXDP("eth0", dptest.XDPPass) })
	look := func() string {
		fx.do(func() error { fx.d.verifier.changed(changes{links: true, routes: true}); return nil })
		return strings.Join(fx.d.Warnings(), "; ")
	}
	if w := look(); w != "" {
		t.Errorf("warnings with all capabilities: %s", w)
	}
	fx.d.uplinks.foreign = map[string]foreign{} // what was found is not asked again for a while
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	fx.do(func() error { return unix.Capget(&header, &all[0]) })
	few := all
	few[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	fx.do(func() error {
		if err := unix.Capset(&header, &few[0]); err != nil {
			return err
		}
		fx.d.verifier.changed(changes{links: true, routes: true})
		return unix.Capset(&header, &all[0])
	})
	const want = "eth0: whether programs of others that run before ours (id "
	if w := strings.Join(fx.d.Warnings(), "; "); !strings.HasPrefix(w, want) {
		t.Errorf("warnings %q; want %q", w, want)
	}
	if f := x.of(fx.addr("vip")); f != "" {
		t.Errorf("fault %q", f)
	}
}

// Where routers know the VIPs, it is said that clients behind them get no replies for lack of a route.
func TestNoRouteToClientsIsWarnedOf(t *testing.T) {
	reach := func(o *Options) { o.Reach = addrs(v4["router"]) }
	fx, x := verified(t, ModeTC, false, reach, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.watch()
	fx.warns("only clients on the links of this node get replies from " + v4["vip"] + ": there is no default route")
	fx.do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: prefix(v4["router"] + "/32").IP}) })
	fx.warns("")
	if f := x.of(fx.addr("vip")); f != "" {
		t.Errorf("fault %q", f)
	}
}
