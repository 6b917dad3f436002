package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// InterfaceStatus is how programs are attached to an interface.
type InterfaceStatus struct {
	Name string `json:"interface"`
	Mode Mode   `json:"mode"` // xdp, xdp-generic or tc; "" while the interface is gone
	Hook string `json:"hook"` // tcx or clsact
}

// attachments keeps the programs on the uplinks.
type attachments struct {
	o       Options
	objects *syObjects
	pins    *pins
	sysctls *sysctls

	mu     sync.Mutex                 // guards status
	status map[string]InterfaceStatus // by name
	index  map[string]int             // by name; of Run's goroutine and Open
}

// attach puts the programs on one interface, taking over what an earlier agent pinned.
func (a *attachments) attach(name string) error {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	switch err := a.sysctls.forward(name); {
	case errors.Is(err, unix.EROFS): // in a container; what is not forwarded is counted as no_forwarding
		a.o.Log.Warn("forwarding not switched on", "interface", name, "err", err, "fix", "sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	case err != nil:
		return fmt.Errorf("interface %s: %w", name, err)
	}
	hook, err := a.attachTC(nic, inward, outward)
	if err != nil {
		return fmt.Errorf("attach tc to %s: %w", name, err)
	}
	mode, err := a.attachXDP(nic)
	if err != nil {
		return fmt.Errorf("attach XDP to %s: %w", name, err)
	}
	a.index[name] = nic.Attrs().Index
	a.mu.Lock()
	a.status[name] = InterfaceStatus{name, mode, hook}
	a.mu.Unlock()
	a.o.Log.Info("interface attached", "interface", name, "mode", mode, "hook", hook)
	return nil
}

// direction is one of the two places of tc on an interface.
type direction struct {
	pin    string
	attach ebpf.AttachType
	parent uint32 // of a clsact filter
	prog   func(*syObjects) *ebpf.Program
}

var (
	inward  = direction{"tcx", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, func(o *syObjects) *ebpf.Program { return o.SyTcIn }}
	outward = direction{"tcx-out", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, func(o *syObjects) *ebpf.Program { return o.SyTcOut }}
)

// attachTC uses tcx links where the kernel has them, else clsact filters.
func (a *attachments) attachTC(nic netlink.Link, directions ...direction) (hook string, err error) {
	hook = "clsact"
	if !a.o.ForceClsact {
		hook, err = a.attachTCX(nic, directions)
	}
	switch {
	case err != nil:
		return "", err
	case hook == "tcx":
		return hook, removeClsact(nic)
	}
	for _, d := range directions {
		err = errors.Join(err, a.unpin(pinName(nic.Attrs().Name, d.pin)), attachClsact(nic, d, a.objects))
	}
	return hook, err
}

func (a *attachments) attachTCX(nic netlink.Link, directions []direction) (hook string, err error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	for _, d := range directions {
		prog := d.prog(a.objects)
		err := a.pinned(pinName(name, d.pin), index, prog, func() (link.Link, error) {
			return link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: d.attach})
		})
		if errors.Is(err, ebpf.ErrNotSupported) {
			return "clsact", nil
		}
		if err != nil {
			return "", err
		}
	}
	return "tcx", nil
}

// attachXDP attaches as the mode says and returns what is in force.
func (a *attachments) attachXDP(nic netlink.Link) (Mode, error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	try := func(mode Mode, flags link.XDPAttachFlags, other string) error {
		if err := a.unpin(other); err != nil {
			return err
		}
		return a.pinned(pinName(name, string(mode)), index, a.objects.SyXdp, func() (link.Link, error) {
			return link.AttachXDP(link.XDPOptions{Program: a.objects.SyXdp, Interface: index, Flags: flags})
		})
	}
	native, generic := pinName(name, string(ModeXDP)), pinName(name, string(ModeXDPGeneric))
	mode := a.o.Mode
	if mode == ModeAuto && (nic.Type() == "veth" || nic.Type() == "bridge") {
		a.o.Log.Debug("native XDP would cost GSO; tc is used", "interface", name, "type", nic.Type())
		mode = ModeTC
	}
	switch mode {
	case ModeXDPGeneric:
		return mode, try(mode, link.XDPGenericMode, native)
	case ModeXDP, ModeAuto:
		err := try(ModeXDP, link.XDPDriverMode, generic)
		if err == nil {
			return ModeXDP, a.setUplink(nic)
		}
		if mode == ModeXDP {
			return "", err
		}
		a.o.Log.Info("driver has no native XDP; tc is used", "interface", name, "reason", err)
	}
	if err := ignoreMissing(a.objects.SyUplinks.Delete(uint32(index))); err != nil {
		return "", err
	}
	return ModeTC, errors.Join(a.unpin(native), a.unpin(generic))
}

// setUplink lets XDP send out of an interface by redirect, if that works there. On veth it does only while the other end
// listens to it (it has GRO or an XDP program, seen from here as a feature of our end); else tc sends.
func (a *attachments) setUplink(nic netlink.Link) error {
	index := nic.Attrs().Index
	if nic.Type() == "veth" {
		features, err := xdpFeatures(index)
		if err != nil || features&xdpFeatureXmit == 0 {
			a.o.Log.Warn("the other end of veth takes no frames from XDP; tc sends instead",
				"interface", nic.Attrs().Name, "err", err, "fix", "switch on GRO there: ethtool -K DEV gro on")
			return ignoreMissing(a.objects.SyUplinks.Delete(uint32(index)))
		}
	}
	return a.objects.SyUplinks.Put(uint32(index), uint32(1))
}

// pinned makes the link pinned under name run prog on interface index: the one that is there by an atomic update, or a
// new one.
func (a *attachments) pinned(name string, index int, prog *ebpf.Program, attach func() (link.Link, error)) error {
	path := a.pins.link(name)
	if old, err := link.LoadPinnedLink(path, nil); err == nil {
		defer old.Close()
		if linkIndex(old) == index && old.Update(prog) == nil {
			return nil
		}
		if err := old.Unpin(); err != nil {
			return fmt.Errorf("remove the link %s of a gone interface: %w", name, err)
		}
		old.Close()
	}
	l, err := attach()
	if err != nil {
		return err
	}
	defer l.Close() // the pin keeps it
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link %s: %w", name, err)
	}
	return nil
}

// pinName is the name of a link's pin: bpffs refuses dots, which names of VLAN interfaces have.
func pinName(iface, kind string) string {
	return strings.NewReplacer("%", "%25", ".", "%2e").Replace(iface) + ":" + kind
}

// linkIndex returns the interface a link is attached to; 0 when that is gone.
func linkIndex(l link.Link) int {
	info, err := l.Info()
	if err != nil {
		return 0
	}
	if x := info.XDP(); x != nil {
		return int(x.Ifindex)
	}
	if x := info.TCX(); x != nil {
		return int(x.Ifindex)
	}
	return 0
}

func (a *attachments) unpin(name string) error { return unpin(a.pins.link(name)) }

// unpin ends a link; there may be none.
func unpin(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the link %s: %w", filepath.Base(path), err)
	}
	defer l.Close()
	if err := l.Unpin(); err != nil {
		return fmt.Errorf("remove the link %s: %w", filepath.Base(path), err)
	}
	return nil
}

// prune ends the links of interfaces that are no uplinks any more.
func (a *attachments) prune() error {
	entries, err := os.ReadDir(filepath.Join(a.pins.dir, "links"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, e := range entries {
		wanted := slices.ContainsFunc(a.o.Interfaces, func(name string) bool {
			return strings.HasPrefix(e.Name(), pinName(name, ""))
		})
		if !wanted {
			errs = append(errs, a.unpin(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// A clsact filter is known by its name and handle.
const (
	filterName     = "sy_tc"
	filterPriority = 1
	filterHandle   = 0x5359
)

func clsactQdisc(nic netlink.Link) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: nic.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	}
}

func attachClsact(nic netlink.Link, d direction, o *syObjects) error {
	if err := netlink.QdiscAdd(clsactQdisc(nic)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add clsact: %w", err)
	}
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: nic.Attrs().Index, Parent: d.parent, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: d.prog(o).FD(), Name: filterName, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("set the filter: %w", err)
	}
	return nil
}

// removeClsact removes our filter, and the qdisc when nobody else has a filter there.
func removeClsact(nic netlink.Link) error {
	ours := 0
	others := 0
	for _, d := range []direction{inward, outward} {
		filters, err := netlink.FilterList(nic, d.parent)
		if err != nil {
			return fmt.Errorf("list the filters of %s: %w", nic.Attrs().Name, err)
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); !ok || b.Handle != filterHandle || !strings.HasPrefix(b.Name, filterName) {
				others++
				continue
			}
			ours++
			if err := netlink.FilterDel(f); err != nil {
				return fmt.Errorf("remove the filter of %s: %w", nic.Attrs().Name, err)
			}
		}
	}
	if ours == 0 || others > 0 {
		return nil
	}
	if err := netlink.QdiscDel(clsactQdisc(nic)); err != nil {
		return fmt.Errorf("remove clsact of %s: %w", nic.Attrs().Name, err)
	}
	return nil
}

// linkChanged attaches again to an uplink that came back, and says so when one is gone.
func (a *attachments) linkChanged(u netlink.LinkUpdate) {
	name := u.Attrs().Name
	index, ours := a.index[name]
	switch {
	case !ours:
	case u.Header.Type == unix.RTM_DELLINK && index == u.Attrs().Index:
		a.index[name] = 0
		a.mu.Lock()
		a.status[name] = InterfaceStatus{Name: name}
		a.mu.Unlock()
		a.o.Log.Warn("interface gone", "interface", name)
	case u.Header.Type == unix.RTM_NEWLINK && index != u.Attrs().Index:
		if err := a.attach(name); err != nil {
			a.o.Log.Error("interface not attached", "interface", name, "err", err)
		}
	}
}
