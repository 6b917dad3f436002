package netwatch

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// After an overrun of its socket, a Watcher reports that notifications were lost, and goes on.
func TestWatcherSurvivesAnOverrun(t *testing.T) {
	t.Parallel()
	h := labtest.Host(t, labtest.New(t), "h")
	var w *Watcher
	do := func(f func() error) {
		t.Helper()
		must.Do(t, h.Do(f))
	}
	change := func(n int) func() error {
		return func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			for i := range n {
				to := &net.IPNet{IP: net.IPv4(10, byte(i/256), byte(i), 0), Mask: net.CIDRMask(24, 32)}
				r := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: to}
				if err := netlink.RouteAdd(r); err != nil {
					return err
				}
				if err := netlink.RouteDel(r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	do(func() (err error) {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			return err
		}
		w, err = Open(unix.RTNLGRP_IPV4_ROUTE)
		if err == nil {
			err = w.socket.SetReceiveBufferSize(1, true)
		}
		return err
	})
	started := make(chan bool, 1)
	must.Run(t, func(ctx context.Context) error {
		Watch(ctx, func(m *Message, lost error) { started <- m == nil && lost == nil }, unix.RTNLGRP_NEXTHOP)
		return nil
	})
	must.True(t, <-started, "Watch does not report that anything may have changed before")
	do(change(200)) // nobody is receiving
	var changes, overruns atomic.Int64
	must.Run(t, func(ctx context.Context) error {
		return w.Run(ctx, func(m *Message, lost error) {
			if m == nil && errors.Is(lost, unix.ENOBUFS) {
				overruns.Add(1)
			} else if m != nil {
				changes.Add(1)
			}
		})
	})
	labtest.Until(t, "the overrun is reported", func() error {
		return labtest.ErrorIf(overruns.Load() == 0, "it is not")
	})
	before := int64(-1)
	labtest.Until(t, "the socket is empty", func() error {
		last := before
		before = changes.Load()
		return labtest.ErrorIf(last != before, "%d more", before-last)
	})
	do(change(1))
	labtest.Until(t, "the next changes are reported", func() error {
		return labtest.ErrorIf(changes.Load() != before+2, "%d changes", changes.Load()-before)
	})
}
