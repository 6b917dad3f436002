package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// attachXDP attaches XDP in the configured mode, and returns the active mode.
func (a *Hooks) attachXDP(nic netlink.Link) (Mode, error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	try := func(mode Mode, flags link.XDPAttachFlags, other string) error {
		// The kernel refuses two modes at the same time, so a change of mode is not undone when a later step fails. tc
		// is already attached and does everything that XDP does.
		if err := a.unpin(other); err != nil {
			return err
		}
		return a.pinned(place{
			pin: PinName(name, string(mode)), index: index, prog: a.programs.XDP,
			attach: func() (link.Link, error) {
				return link.AttachXDP(link.XDPOptions{Program: a.programs.XDP, Interface: index, Flags: flags})
			},
			links: func() ([]link.ID, error) { return XDPLinks(nic) },
		})
	}
	native, generic := PinName(name, string(ModeXDP)), PinName(name, string(ModeXDPGeneric))
	mode := a.o.Mode
	if mode == ModeAuto && (nic.Type() == "veth" || nic.Type() == "bridge") {
		a.Log.Debug("native XDP would turn GSO off; using tc", "interface", name, "type", nic.Type())
		mode = ModeTC
	}
	switch mode {
	case ModeXDPGeneric:
		return mode, errors.Join(try(mode, link.XDPGenericMode, native), a.setUplink(nic, false))
	case ModeXDP, ModeAuto:
		err := try(ModeXDP, link.XDPDriverMode, generic)
		if err == nil {
			return ModeXDP, a.setUplink(nic, a.receivesFromXDP(nic))
		}
		if mode == ModeXDP {
			return "", err
		}
		a.Log.Info("native XDP not attached; using tc", "interface", name, "err", err)
	}
	if err := a.removeUplink(index); err != nil {
		return "", err
	}
	return ModeTC, a.open.OnSuccess(func() error { return errors.Join(a.unpin(native), a.unpin(generic)) })
}

// XDPLinks returns the link that runs the XDP program of an interface, if there is one.
func XDPLinks(nic netlink.Link) (ids []link.ID, err error) {
	now, err := netlink.LinkByIndex(nic.Attrs().Index)
	if err != nil || now.Attrs().Xdp == nil || now.Attrs().Xdp.ProgId == 0 {
		return nil, err
	}
	all := new(link.Iterator)
	defer all.Close()
	for all.Next() { // yields other network namespaces as well, where interfaces have the same indexes
		info, err := all.Link.Info()
		if err == nil && info.Program == ebpf.ProgramID(now.Attrs().Xdp.ProgId) &&
			linkIndex(info) == nic.Attrs().Index {
			ids = append(ids, all.ID)
		}
	}
	return ids, all.Err()
}

// receivesFromXDP reports whether XDP can redirect frames to an interface; if not, tc sends. On veth this works only
// while the peer has GRO or an XDP program, which the kernel reports as a feature of this end.
func (a *Hooks) receivesFromXDP(nic netlink.Link) bool {
	if nic.Type() != "veth" {
		return true
	}
	features, err := xdpFeatures(nic.Attrs().Index)
	if err != nil || features&xdpFeatureXmit == 0 {
		a.Log.Warn("veth peer does not receive frames from XDP; tc sends instead",
			"interface", nic.Attrs().Name, "err", err, "fix", "turn GRO on for the peer: ethtool -K DEV gro on")
		return false
	}
	return true
}

// UplinkSlots is the size of sy_uplinks (bpf/maps.h).
const UplinkSlots = 256

// uplink returns the entry in the interface's slot, which may be its own, empty, or another uplink's.
func (a *Hooks) uplink(index int) (up bpf.Uplink, err error) {
	err = a.Objects.SyUplinks.Lookup(uint32(index%UplinkSlots), &up)
	return up, err
}

// setUplink stores the interface's MAC address for XDP, which ignores frames to other addresses.
func (a *Hooks) setUplink(nic netlink.Link, xmit bool) error {
	index := nic.Attrs().Index
	other, err := a.uplink(index)
	if err != nil {
		return err
	}
	if other.Ifindex != 0 && other.Ifindex != uint32(index) {
		if _, err := netlink.LinkByIndex(int(other.Ifindex)); err == nil {
			a.Log.Warn("interface uses only tc: another uplink has its entry in sy_uplinks",
				"interface", nic.Attrs().Name, "index", index, "other", other.Ifindex)
			return nil
		}
	}
	up := bpf.Uplink{Ifindex: uint32(index), Xmit: bpf.Truth(xmit)}
	copy(up.Mac[:], nic.Attrs().HardwareAddr)
	return a.Objects.SyUplinks.Put(uint32(index%UplinkSlots), up)
}

func (a *Hooks) removeUplink(index int) error {
	up, err := a.uplink(index)
	if err != nil || up.Ifindex != uint32(index) {
		return err
	}
	return a.Objects.SyUplinks.Put(uint32(index%UplinkSlots), bpf.Uplink{})
}

// macChanged stores the new MAC address if the uplink's has changed.
func (a *Hooks) macChanged(nic netlink.Link) error {
	up, err := a.uplink(nic.Attrs().Index)
	if err != nil || up.Ifindex != uint32(nic.Attrs().Index) || bytes.Equal(up.Mac[:], nic.Attrs().HardwareAddr) {
		return err
	}
	return a.setUplink(nic, up.Xmit != 0)
}

// The generic netlink family netdev (include/uapi/linux/netdev.h, Linux 6.3).
const (
	netdevGet         = 1
	netdevIfindex     = 1
	netdevXDPFeatures = 3

	xdpFeatureXmit = 4 // NETDEV_XDP_ACT_NDO_XMIT: a frame can be redirected to the device
)

// genlHeader is struct genlmsghdr. The library's version has a nonzero reserved field, which the family rejects.
type genlHeader [4]byte

func (h genlHeader) Len() int          { return len(h) }
func (h genlHeader) Serialize() []byte { return h[:] }

// xdpFeatures returns the XDP features of an interface. It fails before Linux 6.3.
func xdpFeatures(index int) (uint64, error) {
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return 0, fmt.Errorf("find the netdev family: %w", err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), 0)
	req.AddData(genlHeader{netdevGet, 1})
	req.AddData(nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(index))))
	answers, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("request XDP features: %w", err)
	}
	for _, a := range answers {
		attrs, err := nl.ParseRouteAttr(a[nl.SizeofGenlmsg:])
		if err != nil {
			return 0, fmt.Errorf("read XDP features: %w", err)
		}
		for _, x := range attrs {
			if x.Attr.Type == netdevXDPFeatures && len(x.Value) == 8 {
				return binary.NativeEndian.Uint64(x.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("the kernel returns no XDP features of interface %d", index)
}
