package agent

import (
	"context"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// engineTimeout is the time in which a working engine answers; the watchdog and the health ports use it.
const engineTimeout = 5 * time.Second

// statusOf is the part of lb.Engine that this file needs.
type statusOf interface {
	Status(context.Context) (lb.Status, error)
}

// behind returns since when the kernel lacks a part of the plan; zero: it lacks nothing. An error: the engine does not
// answer.
func behind(e statusOf) (time.Time, error) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	st, err := e.Status(ctx)
	return st.Behind, err
}

// settled waits until every source is complete and every service has a plan, and reports false when ctx ends first.
func settled(ctx context.Context, e statusOf) bool {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if st, err := e.Status(ctx); err == nil && st.Settled {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}
