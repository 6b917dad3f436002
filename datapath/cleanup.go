package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
)

// Cleanup removes all state from the kernel: links with their programs, maps with all flows, filters, routes and sysctl
// changes. It needs no agent, and fails while one runs. Missing state is not an error.
func Cleanup(pinPath, stateDir string, log *slog.Logger) error {
	lock, err := pin.LockDir(pinPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		defer lock.Close()
	}
	var errs []error
	links, err := filepath.Glob(filepath.Join(pinPath, "*", "links", "*"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
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
	errs = append(errs, closeProbes())
	if err := os.RemoveAll(pinPath); err != nil && !errors.Is(err, unix.EBUSY) { // a container's mount stays, empty
		errs = append(errs, fmt.Errorf("remove the pinned maps: %w", err))
	}
	sys, err := sysctl.Open(stateDir, nil)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, sys.Restore())...)
}

// Remains reports whether an agent runs, or has left programs and maps, which continue to forward until Cleanup.
func Remains(pinPath string) (bool, error) {
	has, err := pin.HasPins(pinPath)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return has, err
}

// detachOrphans detaches our links that have no pin, or whose pin is hidden by another mount.
func detachOrphans(nic netlink.Link) error {
	index := nic.Attrs().Index
	ids, _ := xdpLinks(nic)
	for _, d := range []direction{inward, outward} {
		more, err := tcxLinks(index, d.attach)
		if err != nil {
			break // this kernel has no tcx
		}
		ids = append(ids, more...)
	}
	for _, id := range ids {
		l, err := link.NewFromID(id)
		if err != nil {
			continue // it no longer exists, or this process may not open it
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

// attachedPrograms are the names of our programs on interfaces.
var attachedPrograms = []string{"sy_xdp", "sy_tc_in", "sy_tc_out"}
