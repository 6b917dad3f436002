package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// InterfaceStatus is how programs are attached to an interface.
type InterfaceStatus struct {
	Name string `json:"interface"`
	Mode Mode   `json:"mode"` // xdp, xdp-generic or tc; "" while there is no such interface
	Hook string `json:"hook"` // tcx or clsact
}

// attachments maintains the programs on the uplinks.
type attachments struct {
	o       Options
	objects *syObjects
	pins    *pins
	sysctls *sysctls
	open    *transaction // nil after Open

	mu     sync.Mutex                 // guards status
	status map[string]InterfaceStatus // by name
	index  map[string]int             // by name; of Run's goroutine and Open
}

// attachAll attaches the programs to all uplinks in Open. What is most likely to fail comes first: while it does, the
// programs of an earlier agent are all in force.
func (a *attachments) attachAll() error {
	if err := a.forward("lo"); err != nil {
		return err
	}
	var nics []netlink.Link
	for _, name := range a.o.Interfaces {
		nic, err := a.prepare(name)
		if err != nil {
			return err
		}
		nics = append(nics, nic)
	}
	for _, nic := range nics {
		if err := a.exchange(nic); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes an interface ready to forward.
func (a *attachments) prepare(name string) (netlink.Link, error) {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	if a.o.Delivers { // the stack forwards to the pods
		err = a.forward(name)
	}
	return nic, err
}

// forward switches forwarding on for packets that arrive on an interface.
func (a *attachments) forward(name string) error {
	err := a.sysctls.forward(name)
	if errors.Is(err, unix.EROFS) { // in a container; packets that are not forwarded are counted as no_forwarding
		a.o.Log.Warn("forwarding not switched on", "interface", name, "err", err,
			"fix", "sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
		return nil
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// exchange attaches the programs to one interface, in place of those that an earlier agent pinned.
func (a *attachments) exchange(nic netlink.Link) error {
	name := nic.Attrs().Name
	hook, err := a.attachTC(nic, inward, outward)
	if err != nil {
		return fmt.Errorf("attach tc to %s: %w", name, err)
	}
	mode, err := a.attachXDP(nic)
	if err != nil {
		return fmt.Errorf("attach XDP to %s: %w", name, err)
	}
	a.index[name] = nic.Attrs().Index
	a.mu.Lock()
	a.status[name] = InterfaceStatus{name, mode, hook}
	a.mu.Unlock()
	a.o.Log.Info("interface attached", "interface", name, "mode", mode, "hook", hook)
	return a.o.inject("attach " + name)
}

// prune removes the links of interfaces that are not uplinks.
func (a *attachments) prune() error {
	entries, err := os.ReadDir(filepath.Join(a.pins.dir, "links"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, e := range entries {
		wanted := slices.ContainsFunc(a.o.Interfaces, func(name string) bool {
			return strings.HasPrefix(e.Name(), pinName(name, ""))
		})
		if !wanted {
			errs = append(errs, a.unpin(e.Name()))
		}
	}
	return errors.Join(errs...)
}
