package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Health checks of services with direct return take the path of service traffic. A packet with one of these marks is
// sent like a client's packet, but to a given server. Its destination is the VIP, which the kernel cannot route to a
// particular server. So a rule routes marked packets to lo, where sy_tc_out redirects them.
const (
	probeMark     = 0x5359_0000 // upper half of the marks, as in the C code; the lower half numbers them
	probeMask     = 0xffff_0000
	probeTable    = 0x5359
	probePriority = 537
	probeMTU      = 1280 // with the MTU of lo, TCP would announce an MSS of 64 KB
)

// probes holds the marks in use.
type probes struct {
	mu    sync.Mutex // guards marks
	marks map[probeKey]uint32
}

type probeKey struct {
	server netip.Addr
	method uint8
}

// ProbeWay returns the SO_MARK and source address that a health check to a VIP needs to reach the given server of a
// service with dsr or tunnel. It reads the route from the kernel, so call it for every check.
func (a *Hooks) ProbeWay(
	vip, server netip.Addr, method lb.Method, encap lb.Encap,
) (mark uint32, from netip.Addr, err error) {
	word, err := table.EncodeMethod(method, encap)
	if err != nil {
		return 0, netip.Addr{}, err
	}
	a.probes.mu.Lock()
	defer a.probes.mu.Unlock()
	if err := a.openProbes(vip.Is4()); err != nil {
		return 0, netip.Addr{}, fmt.Errorf("route health checks: %w", err)
	}
	return a.probeWay(vip, server, word)
}

func (a *Hooks) probeWay(vip, server netip.Addr, method bpf.Method) (mark uint32, from netip.Addr, err error) {
	k := probeKey{server, uint8(method)}
	mark, known := a.probes.marks[k]
	if !known {
		if mark = probeMark + uint32(len(a.probes.marks)) + 1; mark > probeMark+0xffff {
			return 0, from, fmt.Errorf("all %d probe marks are in use", len(a.probes.marks))
		}
	}
	finder := &route.SourceFinder{}
	ours := finder.Find(server)
	if len(ours.Addrs) == 0 {
		return 0, from, fmt.Errorf("no route to %s", server)
	}
	from = ours.Addrs[0]
	if from.Is4() != vip.Is4() {
		if from = finder.AddressOn(ours.NIC, vip.Is4()); !from.IsValid() {
			return 0, from, fmt.Errorf("no usable address of the family of %s on the interface towards %s", vip, server)
		}
	}
	// SyTunnelSrc also has the nodes of a cluster, which are not in the configuration.
	var source uint32
	err = a.Objects.SyTunnelSrc.Lookup(bpf.ToAllowKey(0, netip.PrefixFrom(server, server.BitLen())), &source)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, from, fmt.Errorf("read the tunnel sources: %w", err)
	}
	probe := bpf.Probe{
		Addr: bpf.ToAddr(server), Local: bpf.ToAddr(ours.Addrs[0]), Method: uint8(method),
		Keyed: bpf.Truth(err == nil),
	}
	if err := a.Objects.SyProbes.Put(mark, probe); err != nil {
		return 0, from, fmt.Errorf("put a probe: %w", err)
	}
	a.probes.marks[k] = mark
	return mark, from, nil
}

// openProbes routes marked packets of a family to the program. It adds the rules on each call, because other software
// may remove them, and ignores those that exist.
func (a *Hooks) openProbes(is4 bool) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := a.attachLo(); err != nil {
		return err
	}
	rule, route := probeRoute(is4, lo)
	if err := netlink.RouteAdd(route); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add the route: %w", err)
	}
	if err := netlink.RuleAdd(rule); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add the rule: %w", err)
	}
	return nil
}

func probeRoute(is4 bool, lo netlink.Link) (*netlink.Rule, *netlink.Route) {
	rule, mask := netlink.NewRule(), uint32(probeMask)
	rule.Mark, rule.Mask, rule.Table, rule.Priority = probeMark, &mask, probeTable, probePriority
	rule.Family = netlink.FAMILY_V6
	all := &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	if is4 {
		rule.Family = netlink.FAMILY_V4
		all = &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	// Through lo, the kernel allows only local IPv6 routes.
	return rule, &netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: all, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Table: probeTable, MTU: probeMTU,
	}
}

// closeProbes removes the rules and routes.
func closeProbes() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	var errs []error
	for _, is4 := range []bool{true, false} {
		rule, route := probeRoute(is4, lo)
		for _, err := range []error{netlink.RuleDel(rule), netlink.RouteDel(route)} {
			missing := errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EAFNOSUPPORT)
			if err != nil && !missing {
				errs = append(errs, fmt.Errorf("remove the route of health checks: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}
