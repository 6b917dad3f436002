package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// Ready limits how long a test waits for its prerequisites: an agent that responds, a session, a route. It asserts
// nothing. After an outage, a client of the API server may wait for a minute before it watches again.
const Ready = 2 * time.Minute

// pollInterval is the time between two calls of the function that Until polls.
const pollInterval = 10 * time.Millisecond

// permanent is an error that waiting will not change.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent marks an error that waiting will not change: Until then returns at once.
func Permanent(err error) error { return permanent{err} }

// TimeFactor multiplies time limits on slow machines, such as an emulated one. It is STEELYARD_TIME_FACTOR, by default
// 1.
var TimeFactor = timeFactor()

func timeFactor() time.Duration {
	n, err := strconv.Atoi(os.Getenv("STEELYARD_TIME_FACTOR"))
	if err != nil || n < 1 {
		return 1
	}
	return time.Duration(n)
}

// Until calls f every 10 ms until it returns nil, and returns how long that took. If f takes longer than that, Until
// pauses for as long as f took. When within, multiplied by TimeFactor, has passed or ctx has ended, it returns an error
// with what and f's last error.
func Until(ctx context.Context, within time.Duration, what string, f func() error) (time.Duration, error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, TimeFactor*within)
	defer cancel()
	for {
		called := time.Now()
		err := f()
		took := time.Since(start)
		if err == nil {
			return took, nil
		}
		if errors.As(err, new(permanent)) {
			return took, fmt.Errorf("wait until %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return took, fmt.Errorf("waited %v until %s: %w", took.Round(time.Millisecond), what, err)
		case <-time.After(max(pollInterval, time.Since(called))):
		}
	}
}
