package lab

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// pollEvery is the time between two looks at something that is waited for.
const pollEvery = 10 * time.Millisecond

// hopeless is an error that waiting will not change.
type hopeless struct{ error }

func (h hopeless) Unwrap() error { return h.error }

// Hopeless marks an error as one that waiting will not change: Until then returns at once.
func Hopeless(err error) error { return hopeless{err} }

// Until asks again and again, every 10 ms, until f returns nil, and returns how long that took. When within has passed
// or ctx has ended, it returns an error that says what was waited for and what f last said.
func Until(ctx context.Context, within time.Duration, what string, f func() error) (time.Duration, error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := f()
		took := time.Since(start)
		if err == nil {
			return took, nil
		}
		if errors.As(err, new(hopeless)) {
			return took, fmt.Errorf("wait until %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return took, fmt.Errorf("waited %v until %s: %w", took.Round(time.Millisecond), what, err)
		case <-tick.C:
		}
	}
}
