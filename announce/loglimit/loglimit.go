// Package loglimit limits the log lines about a neighbour, so that a neighbour that keeps changing state cannot fill
// the disk.
package loglimit

import "time"

// Allow permits Burst lines immediately, then one per Interval.
const (
	Burst    = 10
	Interval = time.Minute
)

// Limit limits the lines about one neighbour. The zero value allows a full Burst. It is not safe for concurrent use.
type Limit struct {
	full time.Time // when a full Burst is allowed again
	left uint64    // lines suppressed since the last allowed line
	last string    // the last suppressed line
}

// Allow reports whether a line may be logged now, and how many were suppressed since the last one. Consecutive
// repetitions of a suppressed line count once.
func (l *Limit) Allow(now time.Time, line string) (left uint64, ok bool) {
	full := l.full
	if full.Before(now) {
		full = now
	}
	full = full.Add(Interval)
	if full.Sub(now) > Burst*Interval {
		if l.left == 0 || l.last != line {
			l.left++
			l.last = line
		}
		return 0, false
	}
	if left = l.left; left > 0 && l.last == line {
		left--
	}
	l.full, l.left = full, 0
	return left, true
}
