package machine

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/lb"
)

// Times of Watch: how long changes are collected, and how often the network is read even if nothing was reported.
const (
	collectTime  = 50 * time.Millisecond
	pollInterval = 30 * time.Second
)

// Watch calls changed with the network whenever it differs from the previous one, until ctx ends. A failure is logged
// and retried. b surrounds each reading.
func Watch(
	ctx context.Context, last *Network, b *lb.Boundary, log *slog.Logger, changed func(*Network),
) {
	hint := make(chan struct{}, 1)
	go netwatch.Watch(ctx, func(m *netwatch.Message, _ error) {
		if m == nil || matters(m) {
			select {
			case hint <- struct{}{}:
			default:
			}
		}
	}, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	for ctx.Err() == nil {
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
		case <-hint:
			sleep(ctx, collectTime)
		case <-time.After(pollInterval):
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// matters reports whether a notification is about an address, or about a route of the main table.
func matters(m *netwatch.Message) bool {
	route := m.Header.Type == unix.RTM_NEWROUTE || m.Header.Type == unix.RTM_DELROUTE
	const table = 4 // offset in struct rtmsg
	return !route || len(m.Data) > table && m.Data[table] == unix.RT_TABLE_MAIN
}
