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
// nothing. After an outage, an API client may wait one minute before it watches again.
const Ready = 2 * time.Minute

// pollInterval is the time between calls of the function that Until polls.
const pollInterval = 10 * time.Millisecond

// permanent is an error that waiting cannot resolve.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent marks an error that waiting cannot resolve, so Until returns immediately.
func Permanent(err error) error { return permanent{err} }

// TimeFactor multiplies time limits on slow machines, such as emulated ones. It is STEELYARD_TIME_FACTOR, or 1 by
// default.
var TimeFactor = timeFactor()

func timeFactor() time.Duration {
	n, err := strconv.Atoi(os.Getenv("STEELYARD_TIME_FACTOR"))
	if err != nil || n < 1 {
		return 1
	}
	return time.Duration(n)
}

// Until calls f every 10 ms until it returns nil, and returns how long this took. If f takes longer, Until pauses for
// as long as f took. Once within, multiplied by TimeFactor, has passed or ctx has ended, it returns an error with what
// and f's last error.
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
