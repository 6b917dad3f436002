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

// Changes says what may have changed in the network of this node.
type Changes struct{ Links, Routes bool }

// Add adds more changes.
func (c *Changes) Add(more Changes) {
	c.Links, c.Routes = c.Links || more.Links, c.Routes || more.Routes
}

// watchGroups are the subscribed notifications: links, addresses, routes and their next hops, rules, and interface
// settings.
var watchGroups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_NEXTHOP,
}

// watchBuffer is the receive buffer in bytes. A routing daemon that installs a table of routes sends bursts.
const watchBuffer = 4 << 20

// Watcher receives the kernel's notifications about the network. It keeps no state from them: a change makes its
// receiver reread what it needs. So a report that everything may have changed replaces notifications that the kernel
// had to drop.
type Watcher struct {
	socket   *nl.NetlinkSocket
	Found    chan Changes        // what may have changed since the last receive; capacity 1
	overruns *atomic.Uint64      // how often the kernel dropped notifications
	guard    func(f func()) bool // around each notification
}

// OpenWatcher subscribes to the kernel's notifications. The watcher counts overruns, and calls guard around each
// notification; guard reports whether f returned.
func OpenWatcher(overruns *atomic.Uint64, guard func(f func()) bool) (*Watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, watchGroups...)
	if err != nil {
		return nil, fmt.Errorf("watch the network: %w", err)
	}
	if err := socket.SetReceiveBufferSize(watchBuffer, true); err != nil { // without CAP_NET_ADMIN on the host
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
		case err != nil: // a message that is not understood may be any change
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

// report merges found into the changes that the receiver has not taken yet.
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

// Tick is the interval at which the network is checked while no change is reported.
const Tick = 250 * time.Millisecond

// Shortage returns why this process cannot look at the network now, for lack of descriptors or memory. A verification
// would then report faults that the network does not have, so the results stay as they were.
func Shortage() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("look at the network: %w", err)
	}
	return unix.Close(fd)
}
