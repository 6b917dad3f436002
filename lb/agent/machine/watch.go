package machine

import (
	"context"
	"log/slog"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Times of Watch: how long changes are collected, and how often the network is read even if nothing was reported.
const (
	collectTime  = 50 * time.Millisecond
	pollInterval = 30 * time.Second
)

// watchBuffer is the size of netlink's receive buffers. An overrun ends the subscription, which is then renewed.
const watchBuffer = 4 << 20

// Watch calls changed with the network whenever it differs from the previous one, until ctx ends. A failure is logged
// and retried. b surrounds each reading.
func Watch(
	ctx context.Context, last *Network, b *lb.Boundary, log *slog.Logger, changed func(*Network),
) {
	for ctx.Err() == nil {
		hint, done := make(chan struct{}, 1), make(chan struct{})
		err := subscribe(hint, done)
		if err != nil {
			log.Warn("address changes are found only by polling", "err", err)
		}
		for again := true; again; {
			n, err := last, error(nil)
			b.Do(lb.PartNetlink, "addresses", func() { n, err = Read() })
			if err != nil {
				log.Warn("addresses of this machine not read", "err", err)
			} else if !n.Equal(last) {
				last = n
				changed(n)
			}
			select {
			case <-ctx.Done():
				again = false
			case _, again = <-hint: // closed after a netlink error
				sleep(ctx, collectTime)
			case <-time.After(pollInterval):
			}
		}
		close(done)
		sleep(ctx, time.Second)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// subscribe sends to hint when addresses or routes change, until done is closed. It closes hint if it fails.
func subscribe(hint, done chan struct{}) error {
	addrs, routes := make(chan netlink.AddrUpdate, 64), make(chan netlink.RouteUpdate, 64)
	err := netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{
		ReceiveBufferSize: watchBuffer, ReceiveBufferForceSize: true, ErrorCallback: func(error) {},
	})
	if err != nil {
		return err
	}
	err = netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{
		ReceiveBufferSize: watchBuffer, ReceiveBufferForceSize: true, ErrorCallback: func(error) {},
	})
	if err != nil {
		return err
	}
	go func() {
		defer close(hint)
		for addrs != nil && routes != nil { // each is closed when its socket has failed, or after done
			ok, matters := true, true
			select {
			case _, ok = <-addrs:
			case r, open := <-routes:
				ok, matters = open, r.Table == unix.RT_TABLE_MAIN
			}
			if !ok {
				break
			}
			if !matters {
				continue
			}
			select {
			case hint <- struct{}{}:
			default:
			}
		}
	}()
	return nil
}
