package verify

import (
	"context"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// collect is how long changes, which come in bursts, are collected.
const collect = 20 * time.Millisecond

// Run follows the kernel's notifications about links, addresses, routes and settings, and regularly verifies that
// packets are forwarded, until ctx ends.
func (v *Verifier) Run(ctx context.Context) error {
	guard := func(f func()) bool { return v.o.Boundary.Do(lb.PartNetlink, "datapath", f) }
	w, err := route.OpenWatcher(&v.Overruns, guard)
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

// postpone leaves changes for a later round. The caller holds v.Mu.
func (v *Verifier) postpone(found route.Changes, err error) {
	v.missed.Add(found)
	v.warned.notRun = err.Error()
	v.warned.blind.observe(v.warned.notRun, time.Now())
}

// takePostponed returns the postponed changes, and forgets them.
func (v *Verifier) takePostponed() route.Changes {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	missed := v.missed
	v.missed = route.Changes{}
	return missed
}
