package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// changes are what may have changed in the network of this node.
type changes struct{ links, routes bool }

func (c *changes) add(more changes) {
	c.links, c.routes = c.links || more.links, c.routes || more.routes
}

// watchGroups are what the kernel reports: links, addresses, routes and their next hops, rules, and the settings of
// interfaces.
var watchGroups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_NEXTHOP,
}

// watchBuffer is the receive buffer in bytes. A routing daemon that installs a table of routes sends bursts.
const watchBuffer = 4 << 20

// watcher receives the notifications of the kernel about the network. It keeps no state of them: a change makes its
// receiver read again what it needs. So a notification that the kernel had to drop is replaced by one about everything.
type watcher struct {
	socket   *nl.NetlinkSocket
	found    chan changes   // capacity 1
	overruns *atomic.Uint64 // how often the kernel dropped notifications
	boundary *lb.Boundary   // around each notification
}

func openWatcher(overruns *atomic.Uint64, boundary *lb.Boundary) (*watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, watchGroups...)
	if err != nil {
		return nil, fmt.Errorf("watch the network: %w", err)
	}
	if err := socket.SetReceiveBufferSize(watchBuffer, true); err != nil { // without CAP_NET_ADMIN over the host
		err = socket.SetReceiveBufferSize(watchBuffer, false)
		if err != nil {
			socket.Close()
			return nil, fmt.Errorf("watch the network: %w", err)
		}
	}
	return &watcher{socket, make(chan changes, 1), overruns, boundary}, nil
}

// run receives until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, w.socket.Close)
	defer stop()
	for {
		var found changes
		var err error
		if !w.boundary.Do(lb.PartNetlink, "datapath", func() { found, err = w.receive() }) {
			found = changes{links: true, routes: true}
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			w.overruns.Add(1)
			found = changes{links: true, routes: true}
		case errors.Is(err, os.ErrClosed):
			return fmt.Errorf("watch the network: %w", err)
		case err != nil: // a message that is not understood stands for any change
			found = changes{links: true, routes: true}
			time.Sleep(10 * time.Millisecond)
		}
		w.report(found)
	}
}

// receive waits for notifications, and returns what has changed.
func (w *watcher) receive() (found changes, err error) {
	messages, _, err := w.socket.Receive()
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			found.links = true
		default:
			found.routes = true
		}
	}
	return found, err
}

// report adds to what the receiver has not taken yet.
func (w *watcher) report(found changes) {
	for {
		select {
		case w.found <- found:
			return
		case earlier := <-w.found:
			found.add(earlier)
		}
	}
}

// Times of watch: changes are collected for a moment, because they come in bursts.
const (
	collect     = 20 * time.Millisecond
	verifyEvery = 250 * time.Millisecond
)

// watch follows the kernel's links, addresses, routes and settings, and verifies regularly that packets are forwarded.
func (d *Datapath) watch(ctx context.Context) error {
	w, err := openWatcher(&d.overruns, d.o.Boundary)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	received := make(chan error, 1)
	go func() { received <- w.run(ctx) }()
	defer func() { cancel(); <-received }()
	all := changes{links: true, routes: true}
	pending, due := all, time.NewTimer(0)
	defer due.Stop()
	tick := time.NewTicker(verifyEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-received:
			received <- nil
			return err
		case found := <-w.found:
			if pending == (changes{}) {
				due.Reset(max(collect, d.verifier.pause()))
			}
			pending.add(found)
		case <-due.C:
			found := pending
			pending = changes{}
			d.verifier.changed(found)
		case <-tick.C:
			d.verifier.tick()
		}
	}
}
