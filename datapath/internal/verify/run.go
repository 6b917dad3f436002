package verify

import (
	"context"
	"errors"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/lb"
	"golang.org/x/sys/unix"
)

// collect is how long changes, which come in bursts, are collected.
const collect = 20 * time.Millisecond

// Run follows the kernel's notifications about links, addresses, routes and settings, and regularly verifies that
// packets are forwarded, until ctx ends.
func (v *Verifier) Run(ctx context.Context) error {
	w, err := netwatch.Open(route.Groups...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	changes, received := make(chan route.Changes, 1), make(chan error, 1)
	go func() {
		received <- w.Run(ctx, func(m *netwatch.Message, lost error) {
			if errors.Is(lost, unix.ENOBUFS) {
				v.Overruns.Add(1)
			}
			found := route.ChangesOf(nil)
			v.o.Boundary.Do(lb.PartNetlink, "datapath", func() { found = route.ChangesOf(m) })
			report(changes, found)
		})
	}()
	defer func() { cancel(); <-received }()
	pending, due := route.ChangesOf(nil), time.NewTimer(0)
	defer due.Stop()
	tick := time.NewTicker(route.Tick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-received:
			received <- nil
			return err
		case found := <-changes:
			if pending == (route.Changes{}) {
				due.Reset(max(collect, v.Pause()))
			}
			pending.Add(found)
		case <-due.C:
			found := pending
			pending = route.Changes{}
			v.Changed(found)
		case <-tick.C:
			v.Tick()
		}
	}
}

// report merges found into the changes that were not received yet. c has room for one.
func report(c chan route.Changes, found route.Changes) {
	for {
		select {
		case c <- found:
			return
		case earlier := <-c:
			found.Add(earlier)
		}
	}
}

// postpone leaves changes for a later round. The caller holds v.Mu.
func (v *Verifier) postpone(found route.Changes, err error) {
	v.missed.Add(found)
	v.warned.notRun = err.Error()
	v.warned.blind.observe(v.warned.notRun, time.Now())
}
