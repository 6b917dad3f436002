package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// attachedTo returns the interfaces that have programs. It returns an error if the kernel's state differs.
func (fx *fixture) attachedTo() (names []string) {
	fx.t.Helper()
	for _, s := range fx.d.Interfaces() {
		names = append(names, s.Name)
	}
	fx.do(func() error {
		for _, name := range []string{"eth0", "eth1"} {
			nic, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			found, err := hook.ClsactFilter(nic, hook.Inward)
			if err != nil {
				return err
			}
			list, err := link.QueryPrograms(link.QueryOptions{Target: nic.Attrs().Index, Attach: ebpf.AttachTCXIngress})
			if err != nil && !errors.Is(err, link.ErrNotSupported) {
				return err
			}
			has := found != nil || list != nil && len(list.Programs) > 0 || nic.Attrs().Xdp.Attached
			if want := slices.Contains(names, name); has != want {
				return wrong(true, "programs on %s: %t, listed: %t", name, has, want)
			}
		}
		return nil
	})
	return names
}

// An interface that no route uses loses its programs after a while, but not while a flow needs it.
func TestInterfacesAreReleased(t *testing.T) {
	t.Parallel()
	moved := &netlink.Route{Dst: prefix(v4["b1"] + "/32"), Gw: prefix("10.1.0.2/32").IP}
	both, one := []string{"eth0", "eth1"}, []string{"eth1"}
	for _, mode := range []Mode{ModeTC, ModeXDP} {
		t.Run(string(mode), func(t *testing.T) {
			follow := func(o *Options) { o.FollowRoutes = true }
			fx, x := verified(t, mode, false, follow, (*fixture).secondNIC)
			unneededFor := func(d time.Duration, want []string, when string) {
				t.Helper()
				fx.changed()
				a := fx.d.hooks
				a.Mu.Lock()
				a.Needed["eth0"] = a.Needed["eth0"].Add(-d)
				a.Mu.Unlock()
				fx.do(func() error { fx.d.hooks.ReleaseAt(t.Context(), time.Now()); return nil })
				got := fx.attachedTo()
				must.True(t, slices.Equal(got, want), "%s: attached to %v; want %v", when, got, want)
			}
			fx.service(lb.TCP, "b1")
			unneededFor(2*hook.ReleaseAfter, []string{"eth0"}, "the only interface")
			fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
			fx.do(func() error { return netlink.RouteAdd(moved) })
			fx.changed()
			unneededFor(0, both, "the route has moved")
			unneededFor(hook.ReleaseAfter/2, both, "a while ago")
			unneededFor(hook.ReleaseAfter, both, "a flow has its address as source")
			fx.clear("sy_halfopen_servers", "sy_stream_servers", "sy_udp_servers")
			unneededFor(0, one, "the flow has ended")
			unneededFor(0, one, "later")
			// No host has the backend's address.
			f := x.of(fx.addr("vip"))
			must.True(t, f == "" || strings.Contains(f, "does not answer"), "fault %q", f)
			fx.do(func() error { return netlink.RouteDel(moved) })
			fx.changed()
			if got := fx.attachedTo(); !slices.Equal(got, both) {
				t.Errorf("the route is back: attached to %v", got)
			}
		})
	}
}

// Configured interfaces, and interfaces on which hosts resolve VIPs, keep the programs.
func TestInterfacesAreKept(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Options){
		"configured": func(*Options) {},
		"kept":       func(o *Options) { o.FollowRoutes, o.Keep = true, []string{"eth0", "eth9"} },
	} {
		t.Run(name, func(t *testing.T) {
			fx, _ := verified(t, ModeTC, false, change, (*fixture).secondNIC)
			fx.service(lb.TCP, "inside")
			fx.d.hooks.Needed["eth0"] = time.Now().Add(-2 * hook.ReleaseAfter)
			fx.do(func() error { fx.d.hooks.ReleaseAt(t.Context(), time.Now()); return nil })
			var got []string
			for _, s := range fx.d.Interfaces() {
				if s.Mode != "" {
					got = append(got, s.Name)
				}
			}
			must.Row(t, "attached to", []string{"eth0", "eth1"}, got)
		})
	}
}

// A renamed interface keeps its programs and links, even while it is up, and even if it is configured under its old
// name.
func TestInterfaceIsRenamed(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{ModeTC, ModeXDP} {
		for _, follow := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, follow %t", mode, follow), func(t *testing.T) {
				log := &logged{}
				fx, x := verified(t, mode, false, func(o *Options) {
					o.FollowRoutes, o.Log = follow, slog.New(slog.NewTextHandler(log, nil))
				}, func(*fixture) {})
				fx.service(lb.TCP, "b1")
				fx.watch()
				before := fx.linkIDs()
				for _, names := range [][2]string{{"eth0", "wan.0"}, {"wan.0", "eth0"}} {
					fx.onNIC(names[0], func(nic netlink.Link) error { return netlink.LinkSetName(nic, names[1]) })
					labtest.Until(t, "programs are on "+names[1], func() error {
						list := fx.d.Interfaces()
						ok := len(list) == 1 && list[0].Name == names[1] && list[0].Mode != "" && list[0].Fault == ""
						return wrong(!ok || x.of(fx.addr("vip")) != "", "%+v, fault %q", list, x.of(fx.addr("vip")))
					})
					must.Row(t, names[1], before, fx.linkIDs())
				}
				text := log.text()
				must.True(t, !strings.Contains(text, "its flows end") && !strings.Contains(text, "deleted"), "%s", text)
			})
		}
	}
}

// An interface that is renamed twice while the agent is still reading its first name has its programs once.
func TestInterfaceIsRenamedTwice(t *testing.T) {
	t.Parallel()
	fx, _ := verified(t, ModeXDP, false, func(o *Options) { o.FollowRoutes = true }, (*fixture).secondNIC)
	fx.service(lb.TCP, "b1")
	before, index := fx.linkIDs(), 0
	rename := func(nic netlink.Link, now string) error {
		index = nic.Attrs().Index
		return netlink.LinkSetName(nic, now)
	}
	fx.onNIC("eth0", func(nic netlink.Link) error { return rename(nic, "wan.0") })
	fx.do(func() error { fx.d.hooks.Repair(false, nil); return nil }) // has the list of interfaces from before
	fx.onNIC("wan.0", func(nic netlink.Link) error { return rename(nic, "eth0") })
	fx.do(func() error { fx.d.hooks.Follow([]int{index}); return nil })
	fx.do(func() error { fx.d.hooks.Repair(true, nil); return nil })
	must.Row(t, "attached to", []string{"eth0"}, fx.attachedTo())
	must.Row(t, "links", before, fx.linkIDs())
}

// linkIDs returns the ids of the links that the datapath holds.
func (fx *fixture) linkIDs() (ids []link.ID) {
	fx.d.hooks.Mu.Lock()
	defer fx.d.hooks.Mu.Unlock()
	for _, l := range fx.d.hooks.Held {
		ids = append(ids, must.Get(l.Info())(fx.t).ID)
	}
	slices.Sort(ids)
	return ids
}

// logged collects log output.
type logged struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// pinForeignXDP replaces the pinned XDP link of eth0 with one whose program the kernel refuses to exchange for sy_xdp,
// because the expected attach types differ (bpf_xdp_link_update in net/core/dev.c returns EINVAL). It returns the
// link's id.
func (fx *fixture) pinForeignXDP() (id link.ID) {
	fx.t.Helper()
	fx.do(func() error {
		path := fx.o.PinPath + "/" + pin.Schema + "/links/" + hook.PinName("eth0", string(ModeXDP))
		if err := pin.Unpin(path); err != nil {
			return err
		}
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "foreign", Type: ebpf.XDP, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}, // XDP_PASS
		})
		if err != nil {
			return err
		}
		defer prog.Close()
		l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: int(fx.nic), Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return err
		}
		id = info.ID
		return l.Pin(path)
	})
	return id
}

// If the kernel refuses to update a pinned link, Open returns the kernel's error and keeps the link attached.
func TestUpdateErrorOfALinkIsReturned(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.service(lb.TCP, "b1")
	fx.close()
	id := fx.pinForeignXDP()
	fx.do(func() error {
		d, err := Open(fx.o)
		if err == nil {
			d.Close()
		}
		must.True(t, errors.Is(err, unix.EINVAL), "Open: %v; want the error of the update", err)
		l, err := link.NewFromID(id)
		if err != nil {
			return fmt.Errorf("the active link was removed: %w", err)
		}
		return l.Close()
	})
}

// If the interface of a pinned link was deleted, a new link on the interface that now has its name replaces it.
func TestLinkOfADeletedInterfaceIsReplaced(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{ModeXDP, ModeTC} {
		fx := newFixture(t, hookTC, false, func(o *Options) { o.Mode = mode })
		fx.close()
		fx.recreateUplink()
		fx.load()
		s := fx.d.Interfaces()[0]
		must.True(t, s.Mode == mode && s.Hook == labtest.TCHook(t), "attached as %+v", s)
	}
}

// recreateUplink deletes eth0 and adds another interface with that name.
func (fx *fixture) recreateUplink() {
	fx.t.Helper()
	fx.do(func() error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.LinkDel(nic); err != nil {
			return err
		}
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return netlink.LinkSetUp(veth)
	})
}

// Endless changes postpone nothing: an address that is added between them is used (D11).
func TestSteadyChangesPostponeNothing(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	fx.service(lb.TCP, "b1")
	fx.watch()
	labtest.Until(t, "the first look at the network", func() error {
		return wrong(fx.d.verifier.Pause() == 0, "none yet")
	})
	must.Run(t, func(ctx context.Context) error {
		return fx.host.Do(func() error {
			r := &netlink.Route{LinkIndex: route.LoopbackIndex, Dst: prefix("10.1.2.0/24")}
			for ctx.Err() == nil {
				if err := errors.Join(netlink.RouteAdd(r), netlink.RouteDel(r)); err != nil {
					return err
				}
			}
			return nil
		})
	})
	second := netip.MustParsePrefix("192.0.2.2/24")
	must.Do(t, fx.host.AddAddress("eth0", second))
	flow := 0
	labtest.Until(t, "flows come from the new address", func() error {
		flow++
		from := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame()).out.Src
		return wrong(from.Addr() != second.Addr(), "from %s", from)
	})
}
