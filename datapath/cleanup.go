package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
)

// Cleanup removes all state from the kernel: links with their programs, maps with all flows, filters, routes, and
// changes of sysctls. It needs no agent, and fails while one runs. Missing state is no error.
func Cleanup(pinPath, stateDir string, log *slog.Logger) error {
	lock, err := lockDir(pinPath)
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
		if err := unpin(path); err != nil {
			log.Warn("link not detached; its pin is removed", "link", path, "err", err)
			errs = append(errs, os.Remove(path))
		}
	}
	nics, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	for _, nic := range nics {
		errs = append(errs, removeClsact(nic))
	}
	errs = append(errs, closeProbes())
	if err := os.RemoveAll(pinPath); err != nil {
		errs = append(errs, fmt.Errorf("remove the pinned maps: %w", err))
	}
	sys, err := openSysctls(stateDir)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, sys.restore())...)
}
