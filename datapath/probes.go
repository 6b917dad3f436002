package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Health checks of one-way services go the way of traffic: a packet that has one of these marks leaves as a client's would,
// to a given server. Nobody but that server has the VIP, so the kernel would not know where to send it: a rule makes it
// send marked packets to lo, where the program of bpf/egress.h takes them.
const (
	probeMark     = 0x5359_0000 // what the marks begin with (bpf/egress.h); the lower half tells them apart
	probeMask     = 0xffff_0000
	probeTable    = 0x5359
	probePriority = 537
	probeMTU      = 1280 // that of lo would make peers believe that we take packets of 64 KB
)

// probes keeps the marks and what goes with them.
type probes struct {
	objects *syObjects
	uplinks *attachments
	mu      sync.Mutex // guards all below
	marks   map[probeKey]uint32
	onLo    bool // the program is on lo
}

type probeKey struct {
	server netip.Addr
	method uint8
}

// ProbeWay returns how a health check to a VIP reaches one server of a service by dsr or tunnel: from this address of ours,
// with this SO_MARK. It asks the kernel for the way each time, so it is to be called for each check.
func (d *Datapath) ProbeWay(vip, server netip.Addr, method lb.Method, encap lb.Encap) (mark uint32, from netip.Addr, err error) {
	word, err := methodWord(method, encap)
	if err != nil {
		return 0, netip.Addr{}, err
	}
	p := d.probes
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.open(vip.Is4()); err != nil {
		return 0, netip.Addr{}, fmt.Errorf("make way for health checks: %w", err)
	}
	return p.way(vip, server, word)
}

func (p *probes) way(vip, server netip.Addr, method syMethod) (mark uint32, from netip.Addr, err error) {
	k := probeKey{server, uint8(method)}
	mark, known := p.marks[k]
	if !known {
		if mark = probeMark + uint32(len(p.marks)) + 1; mark > probeMark+0xffff {
			return 0, from, fmt.Errorf("there are %d probed servers, and no room for more", len(p.marks))
		}
	}
	ours, nic := ourAddressesTowards(server)
	if len(ours) == 0 {
		return 0, from, fmt.Errorf("no route to %s", server)
	}
	from = ours[0]
	if from.Is4() != vip.Is4() {
		if from, err = addressOn(nic, vip.Is4()); err != nil {
			return 0, from, err
		}
	}
	if err := p.objects.SyProbes.Put(mark, syProbe{Addr: toAddr(server), Local: toAddr(ours[0]), Method: uint32(method), Ifindex: uint32(nic)}); err != nil {
		return 0, from, fmt.Errorf("put the way of a probe: %w", err)
	}
	p.marks[k] = mark
	return mark, from, nil
}

// addressOn returns an address of a family that others can answer to, on this interface.
func addressOn(index int, is4 bool) (netip.Addr, error) {
	nic, err := netlink.LinkByIndex(index)
	if err != nil {
		return netip.Addr{}, err
	}
	family, name := netlink.FAMILY_V6, "IPv6"
	if is4 {
		family, name = netlink.FAMILY_V4, "IPv4"
	}
	addrs, err := netlink.AddrList(nic, family)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && usable(a) {
			return addr.Unmap(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s has no %s address that a server could answer to", nic.Attrs().Name, name)
}

// open makes marked packets of a family come to the program. Others tidy up rules that they do not know, so it looks anew
// each time; what is there is no error, and no news to anybody.
func (p *probes) open(is4 bool) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if !p.onLo {
		if _, err := p.uplinks.attachTC(lo, outward); err != nil {
			return fmt.Errorf("attach tc to lo: %w", err)
		}
		p.onLo = true
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
	rule.Family, rule.Mark, rule.Mask, rule.Table, rule.Priority = netlink.FAMILY_V6, probeMark, &mask, probeTable, probePriority
	all := &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	if is4 {
		rule.Family = netlink.FAMILY_V4
		all = &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	// IPv6 has no other routes through lo than local ones.
	return rule, &netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: all, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: probeTable, MTU: probeMTU,
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
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EAFNOSUPPORT) {
				errs = append(errs, fmt.Errorf("close the way of health checks: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}
