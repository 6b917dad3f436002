package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

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
