package l2

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// A process that does not run for suspendLimit, because it was stopped or the machine was suspended, may have lost its
// VIPs to another node. It probes for them before it replies again, because its sockets contain requests from that
// time. The limit is shorter than the fastest takeover.
const (
	suspendLimit = 300 * time.Millisecond
	clockTick    = 50 * time.Millisecond
	// suspensionReported is how long Findings reports a suspension.
	suspensionReported = time.Minute
)

// boottime returns the time since boot, including suspended time. Tests replace it.
var boottime = func() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// wasSuspended reports whether watchClock has not run for too long. Call it before handling each reply and conflict.
func (a *Announcer) wasSuspended() bool {
	last := a.seen.Load()
	return last != 0 && boottime()-time.Duration(last) > suspendLimit
}

// watchClock turns owned VIPs into claims after the process was suspended.
func (a *Announcer) watchClock(ctx context.Context) {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	defer a.seen.Store(0)
	for {
		if a.wasSuspended() && !a.o.Claim {
			a.o.Log.Warn("process was suspended; probing addresses before answering for them again")
			now := time.Now()
			a.suspended.Store(&now)
			a.reclaim()
		}
		a.seen.Store(int64(boottime()))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Findings reports that the process was suspended recently. It is only a warning, because the process runs again.
func (a *Announcer) Findings() []lb.Finding {
	end := a.suspended.Load()
	if end == nil || time.Since(*end) >= suspensionReported {
		return nil
	}
	return []lb.Finding{lb.FoundChecksInconclusive.About("",
		"this node lacks CPU time or was suspended: it did not answer ARP and NDP until %s, then probed its addresses",
		end.Format(time.RFC3339)).As(lb.SeverityWarning)}
}

func (a *Announcer) linksChanged() {
	select {
	case a.macs <- struct{}{}:
	default:
	}
}

// tellMACs publishes this node's MAC addresses and whether it can serve VIPs.
func (a *Announcer) tellMACs(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.macs:
		}
		var macs []string
		for _, r := range a.responders {
			if s := r.opened(); s != nil {
				macs = append(macs, s.ifi.HardwareAddr.String())
			}
		}
		slices.Sort(macs)
		a.mu.Lock()
		a.publishing = true
		a.wake()
		a.mu.Unlock()
		a.o.Members.SetMACs(slices.Compact(macs)) // may block on the members
	}
}
