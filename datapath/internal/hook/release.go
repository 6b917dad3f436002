package hook

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
)

// Interfaces that were attached because of a route are released ReleaseAfter after their last route.
const (
	// ReleaseAfter is longer than the time for which routes are missing while a routing daemon or a link restarts.
	ReleaseAfter = 10 * time.Minute
	releaseEvery = time.Minute
)

// permanent reports whether an interface keeps the programs even if no route uses it.
func (a *Hooks) permanent(name string) bool {
	return !a.o.FollowRoutes && slices.Contains(a.o.Interfaces, name) || slices.Contains(a.o.Keep, name)
}

// need records that routes use the interfaces with these indexes. The caller holds a.Mu.
func (a *Hooks) need(indexes []int, now time.Time) {
	for name, i := range a.index {
		if slices.Contains(indexes, i) {
			a.Needed[name] = now
		}
	}
	for _, name := range a.names {
		if a.Needed[name].IsZero() {
			a.Needed[name] = now
		}
	}
}

// unneeded returns the interfaces that no route has used for ReleaseAfter, or none if no other interface would remain.
func (a *Hooks) unneeded(now time.Time) (names []string) {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	others := false
	for _, name := range a.names {
		if at := a.Needed[name]; at.IsZero() || now.Sub(at) < ReleaseAfter {
			others = others || a.status[name].Mode != ""
		} else if !a.permanent(name) {
			names = append(names, name)
		}
	}
	if !others {
		return nil
	}
	return names
}

// release removes the programs from an interface.
func (a *Hooks) release(name string) error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	err := a.detach(name)
	err = errors.Join(err, a.Sysctls.RestoreIf(func(path string) bool {
		return filepath.Base(filepath.Dir(path)) == name
	}))
	a.forget(name)
	a.Log.Info("programs detached because no route uses the interface", "interface", name)
	return err
}

// detach removes the programs from the interface that had this name when they were attached. The caller holds a.Mu.
func (a *Hooks) detach(name string) error {
	var errs []error
	for _, kind := range pinKinds {
		errs = append(errs, a.unpin(PinName(name, kind)))
	}
	if index := a.index[name]; index != 0 {
		errs = append(errs, a.removeUplink(index))
		if nic, err := netlink.LinkByIndex(index); err == nil {
			errs = append(errs, removeClsact(nic))
		}
	}
	return errors.Join(errs...)
}

// forget removes an interface and its state. The caller holds a.Mu.
func (a *Hooks) forget(name string) {
	a.names = slices.DeleteFunc(a.names, func(n string) bool { return n == name })
	delete(a.index, name)
	delete(a.status, name)
	delete(a.Needed, name)
	delete(a.Foreign, name)
}

// Run releases unneeded interfaces until ctx ends.
func (a *Hooks) Run(ctx context.Context) error {
	tick := time.NewTicker(releaseEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			a.ReleaseAt(ctx, time.Now())
		}
	}
}

// ReleaseAt releases the interfaces that are unneeded at now. An interface stays while a flow uses one of its addresses
// as source, because the server replies to that address even if our route to the server has moved.
func (a *Hooks) ReleaseAt(ctx context.Context, now time.Time) {
	for _, name := range a.unneeded(now) {
		used, err := a.flowsFrom(ctx, name)
		if err == nil && !used {
			err = a.release(name)
		}
		if err != nil {
			a.Log.Warn("programs not detached from an unused interface", "interface", name, "err", err)
		}
	}
}

// flowsFrom reports whether a flow uses one of the interface's addresses as source.
func (a *Hooks) flowsFrom(ctx context.Context, name string) (bool, error) {
	nic, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("interface %s: %w", name, err)
	}
	list, err := netlink.AddrList(nic, netlink.FAMILY_ALL)
	if err != nil {
		return false, fmt.Errorf("list the addresses of %s: %w", name, err)
	}
	ours := map[netip.Addr]bool{}
	for _, x := range list {
		addr, _ := netip.AddrFromSlice(x.IP)
		ours[addr.Unmap()] = true
	}
	return a.Flows.From(ctx, ours)
}

// existing returns an interface that should have the programs. It finds a renamed one by its index. Its programs stay
// attached, so no packet is lost, and existing renames their pins, the state and the options.
func (a *Hooks) existing(name string) (netlink.Link, error) {
	nic, err := a.kernel.Handle().LinkByName(name)
	if !errors.As(err, new(netlink.LinkNotFoundError)) || a.index[name] == 0 {
		return nic, err
	}
	renamed, byIndex := netlink.LinkByIndex(a.index[name])
	if byIndex != nil || slices.Contains(a.names, renamed.Attrs().Name) {
		return nil, err
	}
	now := renamed.Attrs().Name
	for _, kind := range pinKinds {
		if err := a.renamePin(PinName(name, kind), PinName(now, kind)); err != nil {
			return nil, fmt.Errorf("renamed to %s: %w", now, err)
		}
	}
	a.names[slices.Index(a.names, name)] = now
	a.o.Interfaces, a.o.Keep = replaced(a.o.Interfaces, name, now), replaced(a.o.Keep, name, now)
	s := a.status[name]
	s.Name = now
	a.status[now], a.index[now], a.Needed[now] = s, a.index[name], a.Needed[name]
	delete(a.status, name)
	delete(a.index, name)
	delete(a.Needed, name)
	delete(a.Foreign, name)
	a.Log.Warn("interface renamed; it forwards under its new name", "interface", name, "name", now,
		"fix", "replace the old name in the configuration")
	return renamed, nil
}

func replaced(names []string, old, now string) []string {
	names = slices.Clone(names)
	if i := slices.Index(names, old); i >= 0 {
		names[i] = now
	}
	return names
}

// renamePin renames the pin of a link, if there is one.
func (a *Hooks) renamePin(old, now string) error {
	if err := os.Rename(a.Pins.Link(old), a.Pins.Link(now)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if l := a.Held[old]; l != nil {
		delete(a.Held, old)
		a.Held[now] = l
	}
	return nil
}
