// Package netwatch tells when the network of this machine may have changed. It stands by itself so that the datapath,
// the announcer by ARP and NDP, and the agent treat lost notifications alike: as a change of everything.
package netwatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Message is a notification of rtnetlink(7); Header.Type is RTM_NEWLINK and so on.
type Message = syscall.NetlinkMessage

// bufferSize is the size of the receive buffer in bytes. A routing daemon that installs many routes causes bursts.
const bufferSize = 4 << 20

// retryAfter is the time until Watch tries again to open a socket.
const retryAfter = time.Second

// Watcher is a subscription to notifications.
type Watcher struct{ socket *nl.NetlinkSocket }

// Open subscribes to groups (RTNLGRP_LINK, …) of the calling thread's network namespace.
func Open(groups ...uint) (*Watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, fmt.Errorf("watch the network: %w", err)
	}
	if socket.SetReceiveBufferSize(bufferSize, true) != nil { // lacks CAP_NET_ADMIN on the host
		if err := socket.SetReceiveBufferSize(bufferSize, false); err != nil {
			socket.Close()
			return nil, fmt.Errorf("watch the network: %w", err)
		}
	}
	return &Watcher{socket}, nil
}

// Run calls changed with each notification until ctx ends, and closes the subscription. If notifications were lost, it
// calls changed with nil and the cause (ENOBUFS after an overrun): anything may have changed.
func (w *Watcher) Run(ctx context.Context, changed func(m *Message, lost error)) error {
	defer w.socket.Close()
	defer context.AfterFunc(ctx, w.socket.Close)()
	for {
		messages, _, err := w.socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, os.ErrClosed):
			return fmt.Errorf("watch the network: %w", err)
		case err != nil:
			changed(nil, err)
			if !errors.Is(err, unix.ENOBUFS) {
				time.Sleep(10 * time.Millisecond)
			}
		}
		for i := range messages {
			changed(&messages[i], nil)
		}
	}
}

// Watch opens a Watcher and runs it until ctx ends. Once it is open, Watch calls changed with nil and nil, because
// anything may have changed before. While none can be opened, it calls changed with nil and the cause each second.
func Watch(ctx context.Context, changed func(m *Message, lost error), groups ...uint) {
	for ctx.Err() == nil {
		w, err := Open(groups...)
		if err == nil {
			changed(nil, nil)
			err = w.Run(ctx, changed)
		}
		if err == nil {
			return
		}
		changed(nil, err)
		select {
		case <-ctx.Done():
		case <-time.After(retryAfter):
		}
	}
}
