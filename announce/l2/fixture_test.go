package l2

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Tests that need a network run in a child process with its own network namespace, because the announcer opens sockets
// from many threads. TestMain starts that process.
func TestMain(m *testing.M) {
	if os.Getenv("L2_TEST_CHILD") != "" {
		os.Exit(m.Run())
	}
	if os.Geteuid() != 0 {
		if os.Getenv("STEELYARD_CI") != "" {
			fmt.Fprintln(os.Stderr, "network namespaces need root, and STEELYARD_CI forbids skipping")
			os.Exit(1)
		}
		os.Exit(m.Run()) // newNeighbour skips
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "L2_TEST_CHILD=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// neighbour is a Linux host at the other end of the veth pair of our interface "eth0".
type neighbour struct {
	t    testing.TB
	ns   netns.NsHandle
	nl   *netlink.Handle
	link netlink.Link
}

var addresses = []string{"192.0.2.1/24", "2001:db8::1/64"}

// newNeighbour creates both ends. Our addresses end in .2, and the VIPs are in the same subnets.
func newNeighbour(t testing.TB) *neighbour {
	t.Helper()
	if testing.Short() || os.Getenv("L2_TEST_CHILD") == "" {
		t.Skip("NOT TESTED: network namespaces need root")
	}
	n := &neighbour{t: t}
	runtime.LockOSThread()
	home := must.Get(netns.Get())(t)
	n.ns = must.Get(netns.New())(t)
	must.Do(t, netns.Set(home))
	runtime.UnlockOSThread()
	home.Close()
	n.nl = must.Get(netlink.NewHandleAt(n.ns))(t)
	n.connect("eth0")
	t.Cleanup(func() {
		if ours, err := netlink.LinkByName("eth0"); err == nil {
			must.Do(t, netlink.LinkDel(ours))
		}
		n.nl.Close()
		n.ns.Close()
	})
	return n
}

// connect creates our interface with this name, and the neighbour's "eth0" at the other end.
func (n *neighbour) connect(name string) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(n.ns))}
	must.Do(n.t, netlink.LinkAdd(veth))
	ours := must.Get(netlink.LinkByName(name))(n.t)
	n.link = must.Get(n.nl.LinkByName("eth0"))(n.t)
	for i, a := range addresses {
		mine := []string{"192.0.2.2/24", "2001:db8::2/64"}[i]
		must.Do(n.t, netlink.AddrAdd(ours, address(n.t, mine)))
		must.Do(n.t, n.nl.AddrAdd(n.link, address(n.t, a)))
	}
	must.Do(n.t, n.nl.LinkSetUp(n.link))
	must.Do(n.t, netlink.LinkSetUp(ours))
	// NDP sends from the link-local address, which the kernel adds shortly after the link comes up.
	until(n.t, "a link-local address", func() bool {
		all, err := netlink.AddrList(ours, netlink.FAMILY_V6)
		return err == nil && slices.ContainsFunc(all, func(a netlink.Addr) bool {
			return a.IP.IsLinkLocalUnicast() && a.Flags&syscall.IFA_F_TENTATIVE == 0
		})
	})
}

func address(t testing.TB, s string) *netlink.Addr {
	a := must.Get(netlink.ParseAddr(s))(t)
	a.Flags = syscall.IFA_F_NODAD
	return a
}

func (n *neighbour) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := netns.Set(n.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// resolve resolves ip again and returns its MAC address, or nil if there is no reply.
func (n *neighbour) resolve(ip netip.Addr) net.HardwareAddr {
	n.t.Helper()
	return n.resolveAll([]netip.Addr{ip})[ip]
}

// replyTimeout limits the time for a reply, which takes less than a millisecond on veth.
const replyTimeout = 150 * time.Millisecond

// resolveAll is like resolve for several addresses, concurrently.
func (n *neighbour) resolveAll(ips []netip.Addr) map[netip.Addr]net.HardwareAddr {
	n.t.Helper()
	for _, ip := range ips {
		n.forget(ip)
		n.sendTo(ip)
	}
	macs := map[netip.Addr]net.HardwareAddr{}
	deadline := time.Now().Add(replyTimeout)
	for ; len(macs) < len(ips) && time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		for _, ip := range ips {
			e := n.entry(ip)
			const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY
			if e != nil && len(e.HardwareAddr) > 0 && e.State&usable != 0 {
				macs[ip] = e.HardwareAddr
			}
		}
	}
	return macs
}

func (n *neighbour) sendTo(ip netip.Addr) {
	n.t.Helper()
	must.Do(n.t, n.do(func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(ip, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("x"))
		return err
	}))
}

func (n *neighbour) entry(ip netip.Addr) *netlink.Neigh {
	n.t.Helper()
	all := must.Get(n.nl.NeighList(n.link.Attrs().Index, netlink.FAMILY_ALL))(n.t)
	for _, e := range all {
		if e.IP.Equal(ip.AsSlice()) {
			return &e
		}
	}
	return nil
}

func (n *neighbour) forget(ip netip.Addr) {
	if e := n.entry(ip); e != nil {
		n.nl.NeighDel(e) // may already be deleted
	}
}

func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		must.Need(t, !time.Now().After(deadline), "waited 10 s for %s", what)
	}
}

// announced runs an announcer whose VIPs the neighbour resolves.
func (n *neighbour) announced(log *lines, vips ...netip.Addr) *Announcer {
	n.t.Helper()
	a := newAnnouncer(n.t, log, "eth0")
	must.Run(n.t, a.Run)
	set(n.t, a, vips...)
	n.resolves("the VIPs", vips...)
	return a
}

// resolves waits until the neighbour can resolve all of these addresses.
func (n *neighbour) resolves(what string, vips ...netip.Addr) {
	n.t.Helper()
	until(n.t, what+" are resolved", func() bool { return len(n.resolveAll(vips)) == len(vips) })
}

func newAnnouncer(t testing.TB, log *lines, interfaces ...string) *Announcer {
	a := must.Get(New(Options{
		Interfaces: interfaces, Repeat: []time.Duration{50 * time.Millisecond}, Claim: true,
		Log: slog.New(slog.NewTextHandler(log, nil)),
	}))(t)
	return a
}

func set(t testing.TB, a *Announcer, vips ...netip.Addr) {
	t.Helper()
	var list []lb.Announcement
	for _, v := range vips {
		list = append(list, lb.Announcement{VIP: v, Weight: 1})
	}
	must.Do(t, a.Set(t.Context(), list))
}

func ourMAC(t testing.TB) net.HardwareAddr {
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	return ours.Attrs().HardwareAddr
}
