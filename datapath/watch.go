package datapath

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// watch follows the kernel's links, addresses and routes.
func (d *Datapath) watch(ctx context.Context) error {
	links := make(chan netlink.LinkUpdate, 64)
	addrs, routes := make(chan netlink.AddrUpdate, 64), make(chan netlink.RouteUpdate, 64)
	done := make(chan struct{})
	defer close(done)
	onError := func(err error) { d.log.Debug("netlink", "err", err) }
	err := errors.Join(
		netlink.LinkSubscribeWithOptions(links, done,
			netlink.LinkSubscribeOptions{ListExisting: true, ErrorCallback: onError}),
		netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{ErrorCallback: onError}),
		netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{ErrorCallback: onError}))
	if err != nil {
		return fmt.Errorf("watch the network: %w", err)
	}
	// Routes change in bursts; one refresh after a burst is enough.
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case u := <-links:
			if u.Link != nil {
				d.uplinks.linkChanged(u)
			}
		case <-addrs:
			quiet.Reset(100 * time.Millisecond)
		case <-routes:
			quiet.Reset(100 * time.Millisecond)
		case <-quiet.C:
			d.services.refreshSources()
			if err := d.tunnels.refresh(); err != nil {
				d.log.Error("addresses of this node not refreshed", "err", err)
			}
		}
	}
}

// linkChanged attaches to an uplink that was created again, and records that one was deleted.
func (a *attachments) linkChanged(u netlink.LinkUpdate) {
	name := u.Attrs().Name
	index, ours := a.index[name]
	switch {
	case !ours:
	case u.Header.Type == unix.RTM_DELLINK && index == u.Attrs().Index:
		a.index[name] = 0
		a.mu.Lock()
		a.status[name] = InterfaceStatus{Name: name}
		a.mu.Unlock()
		a.o.Log.Warn("interface deleted", "interface", name)
	case u.Header.Type == unix.RTM_NEWLINK && index == u.Attrs().Index:
		if err := a.macChanged(u.Link); err != nil {
			a.o.Log.Error("MAC address not followed", "interface", name, "err", err)
		}
	case u.Header.Type == unix.RTM_NEWLINK:
		nic, err := a.prepare(name)
		if err == nil {
			err = a.exchange(nic)
		}
		if err != nil {
			a.o.Log.Error("interface not attached", "interface", name, "err", err)
		}
	}
}
