package hook

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Direction is ingress or egress of tc on an interface.
type Direction struct {
	Pin    string
	Attach ebpf.AttachType
	parent uint32 // of a clsact filter
	prog   func(*bpf.Objects) *ebpf.Program
}

var (
	Inward = Direction{"tcx", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS,
		func(o *bpf.Objects) *ebpf.Program { return o.SyTcIn }}
	Outward = Direction{"tcx-out", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS,
		func(o *bpf.Objects) *ebpf.Program { return o.SyTcOut }}
)

// attachTC uses tcx links where the kernel supports them, and clsact filters otherwise.
func (a *Hooks) attachTC(nic netlink.Link, directions ...Direction) (hook string, err error) {
	hook = "clsact"
	if !a.o.ForceClsact {
		hook, err = a.attachTCX(nic, directions)
	}
	switch {
	case err != nil:
		return "", err
	case hook == "tcx":
		return hook, a.open.OnSuccess(func() error { return removeClsact(nic) })
	}
	for _, d := range directions {
		unpin := a.open.OnSuccess(func() error { return a.unpin(PinName(nic.Attrs().Name, d.Pin)) })
		err = errors.Join(err, unpin, a.attachClsact(nic, d))
	}
	return hook, err
}

func (a *Hooks) attachTCX(nic netlink.Link, directions []Direction) (hook string, err error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	for _, d := range directions {
		prog := d.prog(a.Objects)
		err := a.pinned(place{
			pin: PinName(name, d.Pin), index: index, prog: prog,
			attach: func() (link.Link, error) {
				return link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: d.Attach})
			},
			links: func() ([]link.ID, error) { return TCXLinks(index, d.Attach) },
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

// TCXLinks returns the links at a hook of an interface.
func TCXLinks(index int, at ebpf.AttachType) (ids []link.ID, err error) {
	list, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
	if err != nil {
		return nil, err
	}
	for _, p := range list.Programs {
		if id, ok := p.LinkID(); ok {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
