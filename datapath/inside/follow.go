package inside

import (
	"context"
	"errors"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/netwatch"
)

// repairEvery is the time between two Syncs, which undo what other programs did to the filters.
const repairEvery = 30 * time.Second

// notice is what the kernel says about an interface. Without one, anything may have changed.
type notice struct {
	link netlink.Link
	gone bool
}

// Run follows the interfaces until ctx ends. It works on the calling goroutine, so that a test can run it on a thread
// in another network namespace.
func (d *devices) Run(ctx context.Context) error {
	w, err := netwatch.Open(unix.RTNLGRP_LINK)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	notices, ended := make(chan notice), make(chan error, 1)
	go func() {
		ended <- w.Run(ctx, func(m *netwatch.Message, _ error) {
			if n, ok := parse(m); ok {
				select {
				case notices <- n:
				case <-ctx.Done():
				}
			}
		})
	}()
	repair := time.NewTicker(repairEvery)
	defer repair.Stop()
	err = d.Sync()
	for {
		if errors.Is(err, errReplaced) {
			return err
		}
		if err != nil {
			d.o.log.Error("programs of the service proxy not attached", "err", err)
		}
		select {
		case err := <-ended:
			return err
		case n := <-notices:
			if err = d.handle(n); err != nil {
				repair.Reset(time.Second)
			}
		case <-repair.C:
			repair.Reset(repairEvery)
			err = d.Sync()
		}
	}
}

// parse returns the notice in a message, unless it has none. Messages of the family AF_BRIDGE are about ports: the
// kernel says RTM_DELLINK when a port leaves its bridge.
func parse(m *netwatch.Message) (n notice, ok bool) {
	if m == nil {
		return n, true
	}
	header := unix.NlMsghdr(m.Header)
	if len(m.Data) < unix.SizeofIfInfomsg || m.Data[0] == unix.AF_BRIDGE ||
		header.Type != unix.RTM_NEWLINK && header.Type != unix.RTM_DELLINK {
		return n, false
	}
	l, err := netlink.LinkDeserialize(&header, m.Data)
	if err != nil {
		return n, true
	}
	return notice{l, header.Type == unix.RTM_DELLINK}, true
}

func (d *devices) handle(n notice) error {
	if n.link == nil {
		return d.Sync()
	}
	changed, err := d.handleLink(n)
	if changed {
		d.hasChanged()
	}
	return err
}

func (d *devices) handleLink(n notice) (changed bool, err error) {
	unlock, err := d.begin()
	if err != nil {
		return false, err
	}
	defer unlock()
	a := n.link.Attrs()
	if n.gone {
		_, known := d.states[a.Index]
		delete(d.masters, a.Index)
		return known, d.forget(a.Index)
	}
	if isMaster(n.link) {
		d.masters[a.Index] = n.link
	}
	if a.MasterIndex != 0 && d.masters[a.MasterIndex] == nil {
		if m, err := netlink.LinkByIndex(a.MasterIndex); err == nil && isMaster(m) {
			d.masters[a.MasterIndex] = m
		}
	}
	return d.take(n.link, false)
}

func (d *devices) hasChanged() {
	if d.o.changed != nil {
		d.o.changed()
	}
}
