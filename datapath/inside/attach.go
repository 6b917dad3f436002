package inside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Our filters can stand beside the one of the load balancer (datapath/internal/hook), which has another handle. Of two
// filters with one priority, the kernel runs the one that was added last first, and the other one only after
// TC_ACT_UNSPEC.
const (
	filterPriority = 1
	filterHandle   = 0x5369
)

// program is one direction of an interface, and the program that belongs there. A clsact filter takes less than a
// millisecond to attach, a tcx link more than ten, because it waits for a grace period of RCU. So tcx is only for
// interfaces with programs of others: what is at its head runs before them all.
type program struct {
	name   string // of the filter
	at     ebpf.AttachType
	parent uint32 // of the filter
	prog   *ebpf.Program
	id     ebpf.ProgramID // 0 if unknown, then the program is attached again each time
	noTCX  bool           // for tests: as before Linux 6.6
}

func newProgram(name string, at ebpf.AttachType, prog *ebpf.Program) program {
	h := program{name: name, at: at, parent: netlink.HANDLE_MIN_INGRESS, prog: prog}
	if at == ebpf.AttachTCXEgress {
		h.parent = netlink.HANDLE_MIN_EGRESS
	}
	if prog == nil { // to detach
		return h
	}
	if info, err := prog.Info(); err == nil {
		h.id, _ = info.ID()
	}
	return h
}

// attach runs the program on an interface ahead of other programs, and returns their names.
func (h program) attach(l netlink.Link, pins string) (others []string, err error) {
	own, first, filters, err := h.filters(l)
	if err != nil {
		return nil, err
	}
	programs, err := h.programs(l)
	if err != nil {
		return nil, err
	}
	pinned, err := h.pinned(l, pins)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			others = append(others, b.Name, programName(ebpf.ProgramID(b.Id)))
		}
	}
	for _, p := range programs {
		if id, ok := p.LinkID(); !ok || id != pinned {
			others = append(others, programName(p.ID))
		}
	}
	err = ebpf.ErrNotSupported
	if !h.noTCX && len(filters)+len(programs) > 0 {
		err = h.attachTCX(l, pins, programs)
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		if first && h.id != 0 && ebpf.ProgramID(own.Id) == h.id {
			return others, nil
		}
		if own != nil && !first {
			if err := netlink.FilterDel(own); err != nil {
				return others, fmt.Errorf("remove the filter %s: %w", h.name, err)
			}
		}
		if err = h.setFilter(l); !errors.Is(err, errNoClsact) {
			return others, err
		}
		err = h.attachTCX(l, pins, programs)
	}
	if err == nil && own != nil {
		err = netlink.FilterDel(own)
	}
	return others, err
}

// programs returns what is at tcx, which Linux has since 6.6.
func (h program) programs(l netlink.Link) ([]link.AttachedProgram, error) {
	list, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: h.at})
	if h.noTCX || errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return list.Programs, nil
}

var errNoClsact = errors.New("another qdisc excludes clsact")

func clsact(l netlink.Link) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// setFilter attaches or replaces the clsact filter. It returns errNoClsact if the interface has a qdisc "ingress", as
// the bandwidth plugin of CNI makes it: there, a filter for egress would run at ingress.
func (h program) setFilter(l netlink.Link) error {
	err := netlink.QdiscAdd(clsact(l))
	if errors.Is(err, fs.ErrExist) {
		var list []netlink.Qdisc
		if list, err = netlink.QdiscList(l); err == nil &&
			slices.ContainsFunc(list, func(q netlink.Qdisc) bool { return q.Type() == "ingress" }) {
			return errNoClsact
		}
	}
	if err != nil {
		return fmt.Errorf("add clsact: %w", err)
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: h.parent, Handle: filterHandle, Priority: filterPriority,
			Protocol: unix.ETH_P_ALL,
		},
		Fd: h.prog.FD(), Name: h.name, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("set the filter %s: %w", h.name, err)
	}
	return nil
}

// filters returns our clsact filter on an interface, or nil, whether it is the first, and the other filters.
func (h program) filters(l netlink.Link) (own *netlink.BpfFilter, first bool, others []netlink.Filter, err error) {
	list, err := netlink.FilterList(l, h.parent)
	if err != nil {
		return nil, false, nil, fmt.Errorf("list filters: %w", err)
	}
	for i, f := range list {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Handle == filterHandle && strings.HasPrefix(b.Name, h.name) {
			own, first = b, i == 0
		} else {
			others = append(others, f)
		}
	}
	return own, first, others, nil
}

// removeFilters removes the filters of hooks, and clsact unless it has other filters.
func removeFilters(l netlink.Link, hooks []program) error {
	removed, left := false, 0
	for _, h := range hooks {
		own, _, others, err := h.filters(l)
		if err == nil && own != nil {
			removed, err = true, netlink.FilterDel(own)
		}
		if err != nil {
			return fmt.Errorf("remove the filter %s: %w", h.name, err)
		}
		left += len(others)
	}
	if !removed || left > 0 {
		return nil
	}
	return netlink.QdiscDel(clsact(l))
}

func (h program) pin(index int, pins string) string {
	return filepath.Join(pins, strconv.Itoa(index)+"-"+h.name)
}

// pinned returns the tcx link that an agent has pinned for an interface, or 0. It removes a link that has ended.
func (h program) pinned(l netlink.Link, pins string) (link.ID, error) {
	pin := h.pin(l.Attrs().Index, pins)
	old, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open the pinned link: %w", err)
	}
	defer old.Close()
	info, err := old.Info()
	if err != nil {
		return 0, err
	}
	if t := info.TCX(); t == nil || t.Ifindex != uint32(l.Attrs().Index) {
		return 0, os.Remove(pin)
	}
	return info.ID, nil
}

// attachTCX makes the program the first of those at tcx.
func (h program) attachTCX(l netlink.Link, pins string, programs []link.AttachedProgram) error {
	pin := h.pin(l.Attrs().Index, pins)
	old, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		defer old.Close()
		info, err := old.Info()
		if err != nil {
			return err
		}
		if len(programs) > 0 {
			if id, ok := programs[0].LinkID(); ok && id == info.ID && info.Program == h.id {
				return nil
			} else if ok && id == info.ID {
				return old.Update(h.prog)
			}
		}
		// A link cannot be moved, and the kernel refuses the same program twice.
		if err := errors.Join(old.Unpin(), old.Close()); err != nil {
			return err
		}
	}
	now, err := link.AttachTCX(link.TCXOptions{
		Interface: l.Attrs().Index, Program: h.prog, Attach: h.at, Anchor: link.Head(),
	})
	if err != nil {
		return err
	}
	defer now.Close() // ends the link unless it is pinned
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return err
	}
	return now.Pin(pin)
}

// programName returns a program's name of at most 15 bytes, or "" if it has none or is gone.
func programName(id ebpf.ProgramID) string {
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return ""
	}
	return info.Name
}
