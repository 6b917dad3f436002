package datapath

import (
	"errors"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// attachXDP attaches as the mode says and returns what is in force.
func (a *attachments) attachXDP(nic netlink.Link) (Mode, error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	try := func(mode Mode, flags link.XDPAttachFlags, other string) error {
		// The kernel refuses both modes at once, so a change of mode is not undone when a later step fails; tc, which is
		// attached already, does all that XDP does.
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
		a.o.Log.Info("native XDP not attached; tc is used", "interface", name, "err", err)
	}
	if err := ignoreMissing(a.objects.SyUplinks.Delete(uint32(index))); err != nil {
		return "", err
	}
	return ModeTC, a.open.onSuccess(func() error { return errors.Join(a.unpin(native), a.unpin(generic)) })
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
