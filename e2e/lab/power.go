package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
)

// PowerOff simulates a power failure: all links of the host go down, its processes are killed, and its memory (/run,
// BPF pins) is lost. Servers in this process keep their sockets, but receive nothing.
func (h *Host) PowerOff() error {
	names, err := h.Interfaces()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := h.SetDown(n); err != nil {
			return err
		}
	}
	for _, p := range h.running() {
		p.Kill()
	}
	return h.Do(func() error { return errors.Join(empty("/run"), empty("/sys/fs/bpf")) })
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".debug") {
			continue // maps.debug and progs.debug of a bpffs cannot be removed
		}
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// PowerOn sets the links up and restores the routes that AddRoute added. It starts no processes.
func (h *Host) PowerOn() error {
	names, err := h.Interfaces()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := h.SetUp(n); err != nil {
			return err
		}
	}
	h.mu.Lock()
	routes := append([]netlink.Route(nil), h.routes...)
	h.mu.Unlock()
	for _, r := range routes {
		if err := h.nl.RouteReplace(&r); err != nil {
			return fmt.Errorf("host %s: restore route %s: %w", h, r, err)
		}
	}
	return nil
}
