package datapath

import (
	"errors"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// attachXDP attaches in the configured mode and returns the mode in force.
func (a *attachments) attachXDP(nic netlink.Link) (Mode, error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	try := func(mode Mode, flags link.XDPAttachFlags, other string) error {
		// The kernel refuses both modes at once, so a change of mode is not undone when a later step fails; tc, which
		// is attached already, does all that XDP does.
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
		a.o.Log.Debug("native XDP would turn GSO off; tc is used", "interface", name, "type", nic.Type())
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

// setUplink lets XDP redirect frames to an interface, if that works there. On veth it works only while the peer has GRO
// or an XDP program, which the kernel shows as a feature of this end; otherwise tc sends.
func (a *attachments) setUplink(nic netlink.Link) error {
	index := nic.Attrs().Index
	if nic.Type() == "veth" {
		features, err := xdpFeatures(index)
		if err != nil || features&xdpFeatureXmit == 0 {
			a.o.Log.Warn("veth peer does not receive frames from XDP; tc sends instead",
				"interface", nic.Attrs().Name, "err", err, "fix", "turn GRO on for the peer: ethtool -K DEV gro on")
			return ignoreMissing(a.objects.SyUplinks.Delete(uint32(index)))
		}
	}
	return a.objects.SyUplinks.Put(uint32(index), uint32(1))
}
