package lb

import (
	"context"
	"fmt"
	"time"
)

// leaving implements graceful shutdown of routes (RFC 8326). Before a planned withdrawal (a drain, or the end of the
// engine), a route is announced with a lower preference for some time, so that routers choose others. A withdrawal for
// another reason, such as failed backends, does not wait.
type leaving struct {
	grace func(by []AnnouncerKind) time.Duration // EngineOptions.Grace
	ends  map[vipKey]time.Time                   // when an announced, drained VIP is withdrawn
	all   time.Time                              // when the engine withdraws every route; zero while it is not ending
}

// next returns when the next VIP is withdrawn, or zero if none is waiting.
func (l *leaving) next() time.Time {
	next := l.all
	for _, t := range l.ends {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	return next
}

// remains reports whether a drained VIP stays announced for now.
func (r *routes) remains(addr vipKey, now time.Time) bool {
	l := &r.leaving
	end, begun := l.ends[addr]
	a, wanted := r.want[addr]
	if !begun && wanted {
		end = now.Add(l.grace(a.By))
	}
	if !now.Before(end) {
		delete(l.ends, addr)
		return false
	}
	l.ends[addr] = end
	return true
}

// leave begins to withdraw all routes. It reports whether any must stay announced for some time.
func (r *routes) leave(now time.Time) bool {
	longest := time.Duration(0)
	for _, a := range r.last {
		longest = max(longest, r.leaving.grace(a.By))
	}
	if longest == 0 {
		return false
	}
	r.leaving.all, r.dirty = now.Add(longest), true
	return true
}

// left reports whether the grace period that leave started is over.
func (r *routes) left(now time.Time) bool {
	return !r.leaving.all.IsZero() && !now.Before(r.leaving.all)
}

// expire makes update check the VIPs whose grace period is over.
func (r *routes) expire(now time.Time) {
	for addr, end := range r.leaving.ends {
		if !now.Before(end) {
			r.vips.latency.at = now
			r.vips.changed(addr)
		}
	}
}

func (e *Engine) withdraw(ctx context.Context) error {
	if !e.routes.started {
		return nil // nothing was announced
	}
	ctx, cancel := context.WithTimeout(ctx, e.o.Withdraw)
	defer cancel()
	if err := e.o.Announcer.Set(ctx, nil); err != nil {
		return fmt.Errorf("withdraw every route: %w", err)
	}
	e.o.Log.Info("announcements stopped")
	return nil
}
