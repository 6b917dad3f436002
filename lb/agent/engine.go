package agent

import (
	"context"
	"time"
)

// engineTimeout is the time in which a working engine responds; the watchdog and the health ports use it.
const engineTimeout = 5 * time.Second

// behindOf is the part of lb.Engine that this file needs.
type behindOf interface {
	Behind(context.Context) (time.Time, error)
}

// behind returns since when a part of the plan is not in the kernel; zero: all of it is. An error means that the engine
// does not respond.
func behind(e behindOf) (time.Time, error) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	return e.Behind(ctx)
}
