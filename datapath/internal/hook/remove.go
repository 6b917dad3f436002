package hook

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
)

// Remove detaches all agents' programs from all interfaces, and removes the routes of health checks. pinPath is the
// directory with the pins of all schemas.
func Remove(pinPath string, log *slog.Logger) error {
	links, err := filepath.Glob(filepath.Join(pinPath, "*", "links", "*"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, path := range links {
		if err := pin.Unpin(path); err != nil {
			log.Warn("link not detached; its pin is removed", "link", path, "err", err)
			errs = append(errs, os.Remove(path))
		}
	}
	nics, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	for _, nic := range nics {
		errs = append(errs, removeClsact(nic), detachOrphans(nic))
	}
	return errors.Join(append(errs, closeProbes())...)
}

// detachOrphans detaches our links whose pin is missing or hidden by another mount.
func detachOrphans(nic netlink.Link) error {
	index := nic.Attrs().Index
	ids, _ := XDPLinks(nic)
	for _, d := range []Direction{Inward, Outward} {
		more, err := TCXLinks(index, d.Attach)
		if err != nil {
			break // this kernel has no tcx
		}
		ids = append(ids, more...)
	}
	for _, id := range ids {
		l, err := link.NewFromID(id)
		if err != nil {
			continue // it was deleted, or this process may not open it
		}
		if _, name := programOf(l); slices.Contains(attachedPrograms, name) {
			err = l.Detach()
		}
		if err = errors.Join(err, l.Close()); err != nil {
			return fmt.Errorf("detach the link %d from %s: %w", id, nic.Attrs().Name, err)
		}
	}
	return nil
}

// attachedPrograms lists the names of our programs on interfaces.
var attachedPrograms = []string{"sy_xdp", "sy_tc_in", "sy_tc_out"}
