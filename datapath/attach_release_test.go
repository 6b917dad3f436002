package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// attachedTo returns the interfaces that have programs, and an error unless that is what the kernel has.
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

// An interface to which no route leads any more loses its programs after a while, but not while a flow needs it.
func TestInterfacesAreReleased(t *testing.T) {
	t.Parallel()
	moved := &netlink.Route{Dst: prefix(v4["b1"] + "/32"), Gw: prefix("10.1.0.2/32").IP}
	both, one := []string{"eth0", "eth1"}, []string{"eth1"}
	for _, mode := range []Mode{ModeTC, ModeXDP} {
		t.Run(string(mode), func(t *testing.T) {
			follow := func(o *Options) { o.FollowRoutes = true }
			fx, x := verified(t, mode, false, follow, (*fixture).secondNIC)
			changed := func() {
				t.Helper()
				fx.do(func() error { fx.d.verifier.Changed(route.Changes{Links: true, Routes: true}); return nil })
			}
			unneededFor := func(d time.Duration, want []string, when string) {
				t.Helper()
				changed()
				a := fx.d.hooks
				a.Mu.Lock()
				a.Needed["eth0"] = a.Needed["eth0"].Add(-d)
				a.Mu.Unlock()
				fx.do(func() error { fx.d.hooks.ReleaseAt(t.Context(), time.Now()); return nil })
				if got := fx.attachedTo(); !slices.Equal(got, want) {
					t.Errorf("%s: attached to %v; want %v", when, got, want)
				}
			}
			fx.service(lb.TCP, "b1")
			unneededFor(2*hook.ReleaseAfter, []string{"eth0"}, "the only interface")
			fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
			fx.do(func() error { return netlink.RouteAdd(moved) })
			changed()
			unneededFor(0, both, "the route has moved")
			unneededFor(hook.ReleaseAfter/2, both, "a while ago")
			unneededFor(hook.ReleaseAfter, both, "a flow has its address as source")
			fx.clear("sy_halfopen_servers", "sy_stream_servers", "sy_udp_servers")
			unneededFor(0, one, "the flow has ended")
			unneededFor(0, one, "later")
			// No host has the address of the backend.
			if f := x.of(fx.addr("vip")); f != "" && !strings.Contains(f, "does not answer") {
				t.Errorf("fault %q", f)
			}
			fx.do(func() error { return netlink.RouteDel(moved) })
			changed()
			if got := fx.attachedTo(); !slices.Equal(got, both) {
				t.Errorf("the route is back: attached to %v", got)
			}
		})
	}
}

// Configured interfaces, and those on which hosts resolve VIPs, keep the programs.
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
			if !slices.Equal(got, []string{"eth0", "eth1"}) {
				t.Errorf("attached to %v", got)
			}
		})
	}
}

// An interface that is renamed keeps its programs, also while it is up: the links are the same. So does one that is
// configured by its old name.
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
					fx.do(func() error {
						nic, err := netlink.LinkByName(names[0])
						return cmp.Or(err, netlink.LinkSetName(nic, names[1]))
					})
					labtest.Until(t, 5*time.Second, "programs are on "+names[1], func() error {
						list := fx.d.Interfaces()
						ok := len(list) == 1 && list[0].Name == names[1] && list[0].Mode != "" && list[0].Fault == ""
						return wrong(!ok || x.of(fx.addr("vip")) != "", "%+v, fault %q", list, x.of(fx.addr("vip")))
					})
					if now := fx.linkIDs(); !slices.Equal(now, before) {
						t.Errorf("%s: the links are %v, were %v", names[1], now, before)
					}
				}
				if text := log.text(); strings.Contains(text, "its flows end") || strings.Contains(text, "deleted") {
					t.Errorf("logged:\n%s", text)
				}
			})
		}
	}
}

// linkIDs returns the ids of the links that the datapath holds.
func (fx *fixture) linkIDs() (ids []link.ID) {
	fx.d.hooks.Mu.Lock()
	defer fx.d.hooks.Mu.Unlock()
	for _, l := range fx.d.hooks.Held {
		info, err := l.Info()
		if err != nil {
			fx.t.Fatal(err)
		}
		ids = append(ids, info.ID)
	}
	slices.Sort(ids)
	return ids
}

// logged is what was logged.
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
