package inside

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// filterIDs returns the programs of our filters on an interface.
func (n *node) filterIDs(d *devices, name string) (ids []ebpf.ProgramID) {
	n.t.Helper()
	l := n.link(name)
	n.do(func() error {
		for _, h := range d.hooks {
			own, _, _, err := h.filters(l)
			if err != nil {
				return err
			}
			if own != nil {
				ids = append(ids, ebpf.ProgramID(own.Id))
			}
		}
		return nil
	})
	return ids
}

func (d *devices) ids() []ebpf.ProgramID { return []ebpf.ProgramID{d.hooks[0].id, d.hooks[1].id} }

func TestDevices(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.pod("pod0")
	n.pod("up0")
	for _, command := range []string{
		"ip link add cni0 type bridge", "ip link add b0 type veth peer name b0p", "ip link set b0 master cni0",
		"ip tuntap add tap0 mode tap", "ip link add sy0 type veth peer name sy1",
		"ip link add mac0 link up0 type macvlan", "ip link add vx0 type vxlan id 1 dstport 4789 dev up0",
		"ip link set b0 mtu 1400 up",
	} {
		n.sh("%s", command)
	}
	d := n.devices(nil)
	n.do(d.Sync)
	all := map[string]kind{"pod0": kindPod, "b0": kindPod, "b0p": kindPod, "tap0": kindPod, "up0": kindUplink,
		"vx0": kindUplink}
	must.Equal(t, all, d.Attached())
	must.Equal(t, []string{"pods behind MACVLAN interface mac0 are not served"}, d.Findings())
	must.Equal(t, 1400, d.MTU())
	for name := range all {
		must.Row(t, name, d.ids(), n.filterIDs(d, name))
	}
	cni0, pod0, b0 := n.link("cni0").Attrs().Index, n.link("pod0"), n.link("b0").Attrs().Index
	must.Equal(t, prog.Device{Kind: uint8(kindPod), Bridge: uint32(cni0)}, n.entry(b0))
	must.True(t, pod0.Attrs().NetNsID >= 0, "pod0 has no namespace")
	must.Equal(t, prog.Device{Kind: uint8(kindPod), Netns: uint32(pod0.Attrs().NetNsID) + 1},
		n.entry(pod0.Attrs().Index))

	t.Run("attaches nothing twice", func(t *testing.T) {
		n.do(func() error {
			w, err := netwatch.Open(unix.RTNLGRP_TC)
			if err != nil {
				return err
			}
			changes := make(chan string, 100)
			must.Run(t, func(ctx context.Context) error {
				return w.Run(ctx, func(m *netwatch.Message, _ error) { changes <- fmt.Sprint(m.Header.Type) })
			})
			if err := d.Sync(); err != nil {
				return err
			}
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			if err := netlink.QdiscAdd(clsact(lo)); err != nil {
				return err
			}
			must.Equal(t, fmt.Sprint(unix.RTM_NEWQDISC), <-changes)
			return netlink.QdiscDel(clsact(lo))
		})
	})
	t.Run("takes over", func(t *testing.T) {
		d = n.devices(nil)
		n.do(d.Sync)
		must.Equal(t, all, d.Attached())
		must.Equal(t, d.ids(), n.filterIDs(d, "pod0"))
		must.True(t, strings.Count(n.sh("tc filter show dev pod0 ingress"), "sy_inside") == 1, "not replaced")
	})
	t.Run("follows names and kinds", func(t *testing.T) {
		n.sh("ip link set pod0 down")
		n.sh("ip link set pod0 name pod9")
		n.sh("tc filter del dev b0 ingress")
		n.uplinks = []string{"up0", "cni0", "tap0"}
		n.do(d.Sync)
		want := map[string]kind{"pod9": kindPod, "b0": kindPod, "b0p": kindPod, "tap0": kindUplink, "up0": kindUplink,
			"vx0": kindUplink, "cni0": kindUplink}
		must.Equal(t, want, d.Attached())
		must.Equal(t, d.ids(), n.filterIDs(d, "b0"))
		must.Equal(t, uint8(kindUplink), n.entry(cni0).Kind)
		d, n.uplinks = n.devices(nil), []string{"up0"} // an agent with another configuration
		n.do(d.Sync)
		must.Equal(t, kindNone, d.Attached()["cni0"])
		must.Equal(t, prog.Device{}, n.entry(cni0))
		must.True(t, !strings.Contains(n.sh("tc qdisc show dev cni0"), "clsact"), "cni0 still has clsact")
		must.Equal(t, uint32(cni0), n.entry(b0).Bridge)
	})
	t.Run("forgets deleted interfaces", func(t *testing.T) {
		n.sh("ip link del b0")
		n.do(d.Sync)
		must.Equal(t, kindNone, d.Attached()["b0"])
		must.Equal(t, prog.Device{}, n.entry(b0))
	})
	t.Run("detaches", func(t *testing.T) {
		n.foreign("tap0", d.hooks[1].parent)
		n.do(n.devices(nil).detach) // as a new process
		for _, name := range []string{"pod9", "up0", "vx0"} {
			must.Row(t, name, false, strings.Contains(n.sh("tc qdisc show dev %s", name), "clsact"))
		}
		must.True(t, strings.Contains(n.sh("tc filter show dev tap0 egress"), "sy_tc"), "removed another's filter")
		must.True(t, !strings.Contains(n.sh("tc filter show dev tap0 ingress"), "sy_inside"), "tap0 has our filter")
	})
}

// foreign adds a filter like that of the load balancer.
func (n *node) foreign(name string, parent uint32) {
	n.t.Helper()
	l := n.link(name)
	n.do(func() error {
		if err := netlink.QdiscAdd(clsact(l)); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		return netlink.FilterReplace(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: l.Attrs().Index, Parent: parent, Handle: 0x5359, Priority: 1,
				Protocol: unix.ETH_P_ALL},
			Fd: n.program("sy_tc_out", slotFirst).FD(), Name: "sy_tc", DirectAction: true,
		})
	})
}

// Two filters with one priority and different handles run one after the other. A Sync makes ours the first.
func TestFilterBesideAnother(t *testing.T) {
	t.Parallel()
	for _, noTCX := range []bool{true, false} {
		n := newNode(t)
		n.pod("pod0")
		n.sh("sysctl -qw net.ipv6.conf.pod0.disable_ipv6=1") // it would send packets of its own
		n.sh("ip addr add 10.1.0.1/24 dev pod0")
		n.sh("ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev pod0")
		d := n.devices(nil)
		d.hooks[1].noTCX = noTCX
		order := func(when string) {
			t.Helper()
			n.do(d.Sync)
			must.Do(t, n.counts.Put(uint32(0), [slots]uint64{}))
			n.send("10.1.0.2:9")
			must.Row(t, when, [2]uint64{1, 2}, [2]uint64{n.ran(slotOut), n.ran(slotFirst)})
		}
		n.foreign("pod0", d.hooks[1].parent)
		order("ours is the last")
		must.Equal(t, noTCX, len(n.filterIDs(d, "pod0")) == 2)
		n.do(d.detach)
		must.True(t, strings.Contains(n.sh("tc filter show dev pod0 egress"), "sy_tc"), "the other filter is gone")
		n.sh("tc qdisc del dev pod0 clsact")
		n.do(d.Sync)
		n.foreign("pod0", d.hooks[1].parent)
		order("ours is the first")
	}
}

func TestRunAttachesNewDevices(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.sh("ip link add cni0 type bridge")
	changed := make(chan struct{}, 1000)
	d := n.devices(func() { changed <- struct{}{} })
	begins, first := 0, time.Time{}
	d.o.begin = func() (func(), error) { // fails for half a second from the first notice, which follows a Sync
		if begins++; begins == 2 {
			first = time.Now()
		}
		return func() {}, labtest.ErrorIf(begins > 1 && time.Since(first) < time.Second/2, "injected")
	}
	must.Run(t, func(ctx context.Context) error { return n.Do(func() error { return d.Run(ctx) }) })
	<-changed // the first Sync
	becomes := func(what string, is func() bool) time.Duration {
		t.Helper()
		start := time.Now()
		for !is() {
			select {
			case <-changed:
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: does not happen; attached: %v", what, d.Attached())
			}
		}
		return time.Since(start)
	}
	for i := range 5 {
		name := fmt.Sprint("v", i)
		n.do(func() error {
			v := netlink.NewVeth(netlink.LinkAttrs{Name: name})
			v.PeerName = "p" + name
			return netlink.LinkAdd(v)
		})
		t.Logf("%s: attached %v after the kernel returned from its creation", name,
			becomes(name, func() bool { return d.Attached()[name] == kindPod }))
	}
	v0, cni0 := n.link("v0").Attrs().Index, uint32(n.link("cni0").Attrs().Index)
	n.sh("ip link set v0 master cni0")
	becomes("v0 joins", func() bool { return n.entry(v0).Bridge == cni0 })
	n.sh("ip link set v0 nomaster")
	becomes("v0 leaves", func() bool { return n.entry(v0) == prog.Device{Kind: uint8(kindPod)} })
	n.sh("ip link set v0 name renamed")
	becomes("v0 is renamed", func() bool { return d.Attached()["renamed"] == kindPod })
	n.sh("ip link del renamed")
	becomes("v0 is deleted", func() bool { return n.entry(v0) == prog.Device{} && d.Attached()["pv0"] == kindNone })
	pod := labtest.Host(t, n.lab, "pod")
	index := n.link("v1").Attrs().Index
	must.Do(t, pod.Do(func() error { // moves the peer, as a CNI does, and sets it up there
		peer := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "pv1"}}
		return errors.Join(n.moveHere("pv1"), netlink.LinkSetUp(peer))
	}))
	n.sh("ip link set v1 up")
	becomes("v1 leads to another namespace", func() bool { return n.entry(index).Netns != 0 })
	must.Equal(t, kindNone, d.Attached()["pv1"])
}

// moveHere moves an interface of the node to the calling thread's namespace.
func (n *node) moveHere(name string) error {
	here := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
	fd, err := unix.Open(here, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return n.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(l, fd)
	})
}

// pinCount returns the number of pinned links.
func (n *node) pinCount() (count int) {
	n.t.Helper()
	n.do(func() error {
		files, err := os.ReadDir(filepath.Join(pins, "tcx"))
		count = len(files)
		return err
	})
	return count
}

// A foreign program at tcx, or a qdisc that excludes clsact, makes ours be at tcx.
func TestTCX(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if labtest.TCHook(t) != "tcx" {
		t.Skip("this kernel has no tcx")
	}
	pod := n.pod("pod0")
	must.Do(t, pod.AddAddress("eth0", netip.MustParsePrefix("10.1.0.2/24")))
	n.sh("ip addr add 10.1.0.1/24 dev pod0")
	d := n.devices(nil)
	n.do(d.Sync)
	must.Equal(t, 2, len(n.filterIDs(d, "pod0")))
	l := n.link("pod0")
	attach := func(name string, slot int, at ebpf.AttachType) {
		t.Helper()
		n.do(func() error {
			x, err := link.AttachTCX(link.TCXOptions{
				Interface: l.Attrs().Index, Program: n.program(name, slot), Attach: at, Anchor: link.Head(),
			})
			t.Cleanup(func() { x.Close() })
			return err
		})
	}
	first := func(at ebpf.AttachType) (id ebpf.ProgramID, count int) {
		n.do(func() error {
			list, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
			if err == nil && len(list.Programs) > 0 {
				id, count = list.Programs[0].ID, len(list.Programs)
			}
			return err
		})
		return id, count
	}
	check := func(t *testing.T, at ebpf.AttachType, h int, count int) {
		t.Helper()
		n.do(d.Sync)
		id, have := first(at)
		must.Equal(t, d.hooks[h].id, id)
		must.Equal(t, count, have)
	}
	attach("cil_from_contai", slotFirst, ebpf.AttachTCXIngress)
	t.Run("moves before the foreign program", func(t *testing.T) { check(t, ebpf.AttachTCXIngress, 0, 2) })
	must.Equal(t, []string{"interface pod0 has the program cil_from_contai of another service proxy or network " +
		"policy agent; Services may fail there"}, d.Findings())
	must.Equal(t, 1, len(n.filterIDs(d, "pod0"))) // for egress
	attach("other", slotSecond, ebpf.AttachTCXIngress)
	t.Run("moves again", func(t *testing.T) { check(t, ebpf.AttachTCXIngress, 0, 3) })
	d = n.devices(nil)
	t.Run("a new agent takes over", func(t *testing.T) { check(t, ebpf.AttachTCXIngress, 0, 3) })
	must.Equal(t, 1, n.pinCount())

	n.pod("pod1")
	n.sh("tc qdisc add dev pod1 ingress")
	l = n.link("pod1")
	t.Run("a qdisc excludes clsact, in", func(t *testing.T) { check(t, ebpf.AttachTCXIngress, 0, 1) })
	t.Run("a qdisc excludes clsact, out", func(t *testing.T) { check(t, ebpf.AttachTCXEgress, 1, 1) })
	start := time.Now()
	n.do(d.Sync)
	t.Logf("Sync with nothing to do: %v", time.Since(start))
	n.sh("ip link del pod1")
	n.do(d.Sync)
	must.Equal(t, 1, n.pinCount())

	n.do(d.detach)
	l = n.link("pod0")
	labtest.Until(t, "the link ends after its pin", func() error {
		_, count := first(ebpf.AttachTCXIngress)
		return labtest.ErrorIf(count != 2, "%d programs at tcx", count)
	})
	must.True(t, !strings.Contains(n.sh("tc qdisc show dev pod0"), "clsact"), "pod0 has clsact")
}
