package labtest

import "time"

// lateness measures how late this process's goroutines are scheduled, until stop is called. stop returns the longest
// delay. Exceeding a time limit by less than this delay says nothing about the program under test.
func lateness() (stop func() (most time.Duration)) {
	const pause = 10 * time.Millisecond
	done, ended := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			start := time.Now()
			select {
			case <-done:
				ended <- most
				return
			case <-time.After(pause):
				most = max(most, time.Since(start)-pause)
			}
		}
	}()
	return func() time.Duration {
		close(done)
		return <-ended
	}
}
