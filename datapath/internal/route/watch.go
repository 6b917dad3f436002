package route

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Changes says what may have changed in this node's network.
type Changes struct{ Links, Routes bool }

func (c *Changes) Add(more Changes) {
	c.Links, c.Routes = c.Links || more.Links, c.Routes || more.Routes
}

// watchGroups lists the notifications to subscribe to: links, addresses, routes and their next hops, rules, and
// interface settings.
var watchGroups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_NEXTHOP,
}

// watchBuffer is the size of the receive buffer in bytes. A routing daemon that installs many routes causes bursts.
const watchBuffer = 4 << 20

// Watcher receives the kernel's notifications about the network. It keeps no state from them, because whoever receives
// a change rereads what it needs. So it can replace notifications that the kernel dropped with a report that everything
// may have changed.
type Watcher struct {
	socket   *nl.NetlinkSocket
	Found    chan Changes        // what may have changed since the last receive; capacity 1
	overruns *atomic.Uint64      // how often the kernel dropped notifications
	guard    func(f func()) bool // called around each notification
}

// OpenWatcher subscribes to the kernel's notifications. The watcher counts overruns, and calls guard around each
// notification. guard reports whether f returned.
func OpenWatcher(overruns *atomic.Uint64, guard func(f func()) bool) (*Watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, watchGroups...)
	if err != nil {
		return nil, fmt.Errorf("watch the network: %w", err)
	}
	if err := socket.SetReceiveBufferSize(watchBuffer, true); err != nil { // lacks CAP_NET_ADMIN on the host
		err = socket.SetReceiveBufferSize(watchBuffer, false)
		if err != nil {
			socket.Close()
			return nil, fmt.Errorf("watch the network: %w", err)
		}
	}
	return &Watcher{socket, make(chan Changes, 1), overruns, guard}, nil
}

// Run receives until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, w.socket.Close)
	defer stop()
	for {
		var found Changes
		var err error
		if !w.guard(func() { found, err = w.receive() }) {
			found = Changes{Links: true, Routes: true}
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			w.overruns.Add(1)
			found = Changes{Links: true, Routes: true}
		case errors.Is(err, os.ErrClosed):
			return fmt.Errorf("watch the network: %w", err)
		case err != nil: // a message that cannot be parsed may be any change
			found = Changes{Links: true, Routes: true}
			time.Sleep(10 * time.Millisecond)
		}
		w.report(found)
	}
}

// receive waits for notifications, and returns what has changed.
func (w *Watcher) receive() (found Changes, err error) {
	messages, _, err := w.socket.Receive()
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			found.Links = true
		default:
			found.Routes = true
		}
	}
	return found, err
}

// report merges found into the changes that were not received yet.
func (w *Watcher) report(found Changes) {
	for {
		select {
		case w.Found <- found:
			return
		case earlier := <-w.Found:
			found.Add(earlier)
		}
	}
}

// Tick is the interval between checks of the network when no change is reported.
const Tick = 250 * time.Millisecond

// Shortage returns an error if this process lacks the descriptors or memory to read the state of the network. In that
// case a verification would report faults that do not exist, so the previous results stay.
func Shortage() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("read the network state: %w", err)
	}
	return unix.Close(fd)
}
