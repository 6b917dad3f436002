package inside

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
)

// The routed device is a pair of veths. The routes of the Services lead to sy0, whose program at tc egress redirects
// the packets. What it lets pass reaches sy1, where the kernel drops it: the destination is sy0's address, and sy1 has
// no addresses.
const (
	deviceName = "sy0"
	peerName   = "sy1"
)

var (
	deviceMAC = net.HardwareAddr{2, 0x53, 0x79, 0, 0, 1}
	peerMAC   = net.HardwareAddr{2, 0x53, 0x79, 0, 0, 2}
)

// routeProtocol marks our routes. No program in iproute2's rt_protos uses it.
const routeProtocol = 0x53

// minMTU is the smallest MTU with IPv6 (RFC 8200), so that every path carries such packets.
const minMTU = 1280

// deviceSysctls are set before the devices are up. A reply that enters by sy0 comes from a Service, whose route leads
// to sy0, so strict reverse-path filtering accepts it. Without an address of its own, sy0 sends no packets of its own.
var deviceSysctls = []struct{ family, device, key, value string }{
	{"ipv4", deviceName, "rp_filter", "1"},
	{"ipv6", deviceName, "disable_ipv6", "0"},
	{"ipv6", deviceName, "addr_gen_mode", "1"}, // none
	{"ipv6", deviceName, "accept_ra", "0"},
	{"ipv6", deviceName, "accept_dad", "0"},
	{"ipv6", peerName, "disable_ipv6", "1"},
}

// device is the routed device in the calling thread's network namespace.
type device struct {
	log *slog.Logger

	mu    sync.Mutex
	index int
	mtu   int      // 0 until SetMTU
	send  *program // nil until attach
}

// openDevice creates the device, or takes over that of an earlier agent.
func openDevice(log *slog.Logger) (*device, error) {
	d := &device{log: log}
	return d, d.repair()
}

// Index returns the index of sy0, which does not change.
func (d *device) Index() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.index
}

// SetMTU sets the largest packet that the device takes. Redirected packets are neither fragmented nor refused with the
// path's MTU, so it must be the smallest one of all interfaces that lead to endpoints, also tunnels.
func (d *device) SetMTU(mtu int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if mtu = max(mtu, minMTU); mtu == d.mtu {
		return nil
	}
	d.mtu = mtu
	return d.repair()
}

// attach makes a program handle what leaves by the device.
func (d *device) attach(send *ebpf.Program) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := newProgram("sy_inside_send", ebpf.AttachTCXEgress, send)
	d.send = &h
	return d.repair()
}

// repair makes the device what it should be. If it was deleted, its successor has the same index, which the programs
// know.
func (d *device) repair() error {
	l, peer, err := d.find()
	if err == nil && l == nil {
		l, peer, err = d.create()
	}
	if err != nil {
		return err
	}
	for _, s := range deviceSysctls {
		if err := keep(sysctl.Path(s.family, s.device, s.key), s.value); err != nil {
			return err
		}
	}
	for _, end := range []netlink.Link{l, peer} {
		if d.mtu != 0 && end.Attrs().MTU != d.mtu {
			err = errors.Join(err, netlink.LinkSetMTU(end, d.mtu))
		}
		if end.Attrs().RawFlags&unix.IFF_NOARP == 0 {
			err = errors.Join(err, netlink.LinkSetARPOff(end))
		}
		if end.Attrs().Flags&net.FlagUp == 0 {
			err = errors.Join(err, netlink.LinkSetUp(end))
		}
	}
	if err == nil && d.send != nil {
		_, err = d.send.attach(l, "")
	}
	if err != nil {
		return fmt.Errorf("set up the interface %s: %w", deviceName, err)
	}
	d.index = l.Attrs().Index
	return nil
}

// find returns both ends of the device, or nil if there is none. It restores the address of a device that it knows, and
// removes one whose peer was moved away.
func (d *device) find() (l, peer netlink.Link, err error) {
	l, err = netlink.LinkByName(deviceName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("find the interface %s: %w", deviceName, err)
	}
	other := !bytes.Equal(l.Attrs().HardwareAddr, deviceMAC)
	if other && l.Attrs().Index == d.index {
		if err := netlink.LinkSetHardwareAddr(l, deviceMAC); err != nil {
			return nil, nil, fmt.Errorf("restore the address of the interface %s: %w", deviceName, err)
		}
		other = false
	}
	if l.Type() != "veth" || other {
		return nil, nil, fmt.Errorf("the interface %s is not Steelyard's, which is a veth with the address %s; "+
			"rename or delete it", deviceName, deviceMAC)
	}
	peer, err = netlink.LinkByName(peerName)
	if err == nil && peer.Attrs().Index == l.Attrs().ParentIndex && l.Attrs().NetNsID == -1 {
		return l, peer, nil
	}
	if err := netlink.LinkDel(l); err != nil {
		return nil, nil, fmt.Errorf("delete the interface %s, which lacks its peer: %w", deviceName, err)
	}
	return nil, nil, nil
}

func (d *device) create() (l, peer netlink.Link, err error) {
	a := netlink.NewLinkAttrs()
	a.Name, a.Index, a.HardwareAddr, a.MTU = deviceName, d.index, deviceMAC, max(d.mtu, minMTU)
	v := netlink.NewVeth(a)
	v.PeerName, v.PeerHardwareAddr, v.PeerMTU = peerName, peerMAC, uint32(a.MTU)
	if err := netlink.LinkAdd(v); err != nil {
		return nil, nil, fmt.Errorf("create the veth pair %s and %s: %w", deviceName, peerName, err)
	}
	if d.index != 0 {
		d.log.Warn("interface created again, because it was deleted", "interface", deviceName)
	}
	if l, peer, err = d.find(); err == nil && l == nil {
		err = fmt.Errorf("the new interface %s is gone", deviceName)
	}
	return l, peer, err
}

// keep sets a sysctl unless it already has the value. It skips sysctls that a kernel without IPv6 lacks, and those that
// an unprivileged container cannot write, where the kernel's defaults are sufficient.
func keep(path, value string) error {
	now, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(string(now)) == value {
		return nil
	}
	if err = errors.Join(err, sysctl.Write(path, value)); errors.Is(err, unix.EROFS) {
		return nil
	}
	return err
}

// Route makes the main table have one route to the device for each prefix and no other routes of ours, with the source
// of the prefix's family. It repairs the device first.
func (d *device) Route(prefixes []netip.Prefix, src4, src6 netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.repair(); err != nil {
		return err
	}
	var v4, v6 []netip.Prefix
	seen := map[netip.Prefix]bool{}
	for _, p := range prefixes {
		switch p = p.Masked(); {
		case seen[p]:
		case p.Addr().Is4():
			v4 = append(v4, p)
		default:
			v6 = append(v6, p)
		}
		seen[p] = true
	}
	return errors.Join(d.route(netlink.FAMILY_V4, v4, src4), d.route(netlink.FAMILY_V6, v6, src6))
}

func (d *device) route(family int, prefixes []netip.Prefix, src netip.Addr) error {
	filter := &netlink.Route{LinkIndex: d.index, Protocol: routeProtocol}
	list, err := whole(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
	})
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	stale := map[string]netlink.Route{}
	for _, r := range list {
		stale[r.Dst.String()] = r
	}
	var errs []error
	if !src.IsValid() && len(prefixes) > 0 {
		errs = append(errs, fmt.Errorf("%v are not routed: this node has no address of their family", prefixes))
		prefixes = nil
	}
	for _, p := range prefixes {
		old, had := stale[p.String()]
		delete(stale, p.String())
		if had && old.Src.Equal(src.AsSlice()) {
			continue
		}
		r := &netlink.Route{
			LinkIndex: d.index, Scope: netlink.SCOPE_LINK, Protocol: routeProtocol, Src: src.AsSlice(),
			Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		}
		set := netlink.RouteAdd // does not replace another program's
		if had {
			set = netlink.RouteReplace
		}
		err := set(r)
		if errors.Is(err, fs.ErrExist) {
			err = errors.New("another program has a route to it")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("route %s by %s with source %s: %w", p, deviceName, src, err))
		}
	}
	for _, r := range stale { // last, so that an address that changes its prefix always has a route
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove the route to %s: %w", r.Dst, err))
		}
	}
	return errors.Join(errs...)
}

// Remove deletes the device, and with it the routes.
func (d *device) Remove() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, _, err := d.find()
	if err == nil && l != nil {
		err = netlink.LinkDel(l)
	}
	return err
}
