// Package loglimit bounds the log about a neighbour: one that changes its state all the time must not fill the disk.
package loglimit

import "time"

// Burst lines are allowed at once, and then one in Interval.
const (
	Burst    = 10
	Interval = time.Minute
)

// Limit is the limit of one neighbour. The zero value has allowed no line. It is not safe for concurrent use.
type Limit struct {
	full time.Time // when Burst lines are allowed again
	left uint64    // lines that were not allowed since the last one that was
	last string    // the last of them
}

// Allow reports whether a line may be logged now, and how many were not since the last one. The same line again is not
// another one.
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
