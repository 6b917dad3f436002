package datapath

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// direction is ingress or egress of tc on an interface.
type direction struct {
	pin    string
	attach ebpf.AttachType
	parent uint32 // of a clsact filter
	prog   func(*bpf.Objects) *ebpf.Program
}

var (
	inward = direction{"tcx", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS,
		func(o *bpf.Objects) *ebpf.Program { return o.SyTcIn }}
	outward = direction{"tcx-out", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS,
		func(o *bpf.Objects) *ebpf.Program { return o.SyTcOut }}
)

// attachTC uses tcx links where the kernel supports them, and clsact filters otherwise.
func (a *attachments) attachTC(nic netlink.Link, directions ...direction) (hook string, err error) {
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
		unpin := a.open.OnSuccess(func() error { return a.unpin(pinName(nic.Attrs().Name, d.pin)) })
		err = errors.Join(err, unpin, a.attachClsact(nic, d))
	}
	return hook, err
}

func (a *attachments) attachTCX(nic netlink.Link, directions []direction) (hook string, err error) {
	name, index := nic.Attrs().Name, nic.Attrs().Index
	for _, d := range directions {
		prog := d.prog(a.objects)
		err := a.pinned(place{
			pin: pinName(name, d.pin), index: index, prog: prog,
			attach: func() (link.Link, error) {
				return link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: d.attach})
			},
			links: func() ([]link.ID, error) { return tcxLinks(index, d.attach) },
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

// tcxLinks returns the links at a hook of an interface.
func tcxLinks(index int, at ebpf.AttachType) (ids []link.ID, err error) {
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
