package agent

import (
	"context"
	"time"
)

// engineTimeout is the time in which a working engine answers; the watchdog and the health ports use it.
const engineTimeout = 5 * time.Second

// behindOf is the part of lb.Engine that this file needs.
type behindOf interface {
	Behind(context.Context) (time.Time, error)
}

// behind returns since when the kernel lacks a part of the plan; zero: it lacks nothing. An error: the engine does not
// answer.
func behind(e behindOf) (time.Time, error) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	return e.Behind(ctx)
}
