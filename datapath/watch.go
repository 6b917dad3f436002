package datapath

import (
	"context"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// collect is how long changes are collected, as they come in bursts.
const collect = 20 * time.Millisecond

// watch follows the kernel's links, addresses, routes and settings, and verifies regularly that packets are forwarded.
func (d *Datapath) watch(ctx context.Context) error {
	guard := func(f func()) bool { return d.o.Boundary.Do(lb.PartNetlink, "datapath", f) }
	w, err := route.OpenWatcher(&d.overruns, guard)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	received := make(chan error, 1)
	go func() { received <- w.Run(ctx) }()
	defer func() { cancel(); <-received }()
	all := route.Changes{Links: true, Routes: true}
	pending, due := all, time.NewTimer(0)
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
		case found := <-w.Found:
			if pending == (route.Changes{}) {
				due.Reset(max(collect, d.verifier.pause()))
			}
			pending.Add(found)
		case <-due.C:
			found := pending
			pending = route.Changes{}
			d.verifier.changed(found)
		case <-tick.C:
			d.verifier.tick()
		}
	}
}
