package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Name and handle of our clsact filters.
const (
	filterName     = "sy_tc"
	filterPriority = 1
	filterHandle   = 0x5359
)

func ClsactQdisc(nic netlink.Link) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: nic.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}
}

func (a *Hooks) attachClsact(nic netlink.Link, d Direction) error {
	if err := netlink.QdiscAdd(ClsactQdisc(nic)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add clsact: %w", err)
	}
	earlier, err := ClsactFilter(nic, d)
	if err != nil {
		return err
	}
	if earlier == nil {
		a.open.OnFailure(func() error { return removeClsact(nic) })
	} else {
		id := ebpf.ProgramID(earlier.Id)
		a.open.KeepProgram(id, func(prog *ebpf.Program) error { return setFilter(nic, d, prog) })
	}
	return setFilter(nic, d, d.prog(a.programs))
}

func setFilter(nic netlink.Link, d Direction, prog *ebpf.Program) error {
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: nic.Attrs().Index, Parent: d.parent, Handle: filterHandle, Priority: filterPriority,
			Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: filterName, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("set the filter: %w", err)
	}
	return nil
}

// ClsactFilter returns our filter on an interface, or nil if there is none.
func ClsactFilter(nic netlink.Link, d Direction) (*netlink.BpfFilter, error) {
	filters, err := netlink.FilterList(nic, d.parent)
	if err != nil {
		return nil, fmt.Errorf("list the filters of %s: %w", nic.Attrs().Name, err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && ours(b) {
			return b, nil
		}
	}
	return nil, nil
}

func ours(f *netlink.BpfFilter) bool {
	return f.Handle == filterHandle && strings.HasPrefix(f.Name, filterName)
}

// removeClsact removes our filters, and the qdisc unless it has other filters.
func removeClsact(nic netlink.Link) error {
	removed, others := 0, 0
	for _, d := range []Direction{Inward, Outward} {
		filters, err := netlink.FilterList(nic, d.parent)
		if err != nil {
			return fmt.Errorf("list the filters of %s: %w", nic.Attrs().Name, err)
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); !ok || !ours(b) {
				others++
				continue
			}
			removed++
			if err := netlink.FilterDel(f); err != nil {
				return fmt.Errorf("remove the filter of %s: %w", nic.Attrs().Name, err)
			}
		}
	}
	if removed == 0 || others > 0 {
		return nil
	}
	if err := netlink.QdiscDel(ClsactQdisc(nic)); err != nil {
		return fmt.Errorf("remove clsact of %s: %w", nic.Attrs().Name, err)
	}
	return nil
}

// Direction is tc ingress or egress on an interface.
type Direction struct {
	Pin    string
	Attach ebpf.AttachType
	parent uint32 // parent of a clsact filter
	prog   func(Programs) *ebpf.Program
}

var (
	Inward = Direction{"tcx", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS,
		func(p Programs) *ebpf.Program { return p.In }}
	Outward = Direction{"tcx-out", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS,
		func(p Programs) *ebpf.Program { return p.Out }}
)

// attachTC uses tcx links if the kernel supports them, and clsact filters otherwise.
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
		prog := d.prog(a.programs)
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

// TCXLinks returns the tcx links at an interface's hook.
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
