package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Interfaces that were attached because of routes are released after no route has led there for releaseAfter.
const (
	// releaseAfter exceeds the time for which routes are missing while a routing daemon or a link restarts.
	releaseAfter = 10 * time.Minute
	releaseEvery = time.Minute
)

// permanent reports whether an interface keeps the programs even if no route leads there.
func (a *attachments) permanent(name string) bool {
	return !a.o.FollowRoutes && slices.Contains(a.o.Interfaces, name) || slices.Contains(a.o.Keep, name)
}

// need records that routes lead to the interfaces of these indexes; a.mu is held.
func (a *attachments) need(indexes []int, now time.Time) {
	for _, i := range indexes {
		if l, ok := a.links[i]; ok {
			a.needed[l.name] = now
		}
	}
	for _, name := range a.names {
		if a.needed[name].IsZero() {
			a.needed[name] = now
		}
	}
}

// unneeded returns the interfaces to which no route has led for releaseAfter, or none if no other interface would be
// left.
func (a *attachments) unneeded(now time.Time) (names []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	others := false
	for _, name := range a.names {
		if at := a.needed[name]; at.IsZero() || now.Sub(at) < releaseAfter {
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
func (a *attachments) release(name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.detach(name)
	err = errors.Join(err, a.sysctls.RestoreIf(func(path string) bool {
		return filepath.Base(filepath.Dir(path)) == name
	}))
	a.forget(name)
	a.o.Log.Info("interface released, because no route leads there", "interface", name)
	return err
}

// detach removes the programs from the interface that had this name when they were attached; a.mu is held.
func (a *attachments) detach(name string) error {
	var errs []error
	for _, kind := range pinKinds {
		errs = append(errs, a.unpin(pinName(name, kind)))
	}
	if index := a.index[name]; index != 0 {
		errs = append(errs, a.removeUplink(index))
		if nic, err := netlink.LinkByIndex(index); err == nil {
			errs = append(errs, removeClsact(nic))
		}
	}
	return errors.Join(errs...)
}

// forget removes an interface from a.names, and its state; a.mu is held.
func (a *attachments) forget(name string) {
	a.names = slices.DeleteFunc(a.names, func(n string) bool { return n == name })
	delete(a.index, name)
	delete(a.status, name)
	delete(a.needed, name)
	delete(a.foreign, name)
}

// releaseUnneeded releases the interfaces that are no longer needed, until ctx ends.
func (d *Datapath) releaseUnneeded(ctx context.Context) error {
	tick := time.NewTicker(releaseEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			d.releaseAt(ctx, time.Now())
		}
	}
}

// releaseAt releases the interfaces that are unneeded at now. An interface stays while a flow uses one of its addresses
// as source, because the server replies to that address wherever our route to the server leads now.
func (d *Datapath) releaseAt(ctx context.Context, now time.Time) {
	for _, name := range d.uplinks.unneeded(now) {
		used, err := d.flowsFrom(ctx, name)
		if err == nil && !used {
			err = d.uplinks.release(name)
		}
		if err != nil {
			d.log.Warn("interface not released", "interface", name, "err", err)
		}
	}
}

// flowsFrom reports whether a flow uses an address of the interface as source.
func (d *Datapath) flowsFrom(ctx context.Context, name string) (found bool, err error) {
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
	for _, a := range list {
		addr, _ := netip.AddrFromSlice(a.IP)
		ours[addr.Unmap()] = true
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err = d.gc.walk(ctx, time.Millisecond, func(_ bpf.FlowTable, k bpf.ServerKey, _ bpf.ServerFlow) {
		if ours[bpf.FromAddr(k.To)] {
			found = true
			stop()
		}
	})
	return found, err
}
