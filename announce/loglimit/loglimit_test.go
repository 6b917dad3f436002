package loglimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestLimit(t *testing.T) {
	var l Limit
	now := time.Unix(1e9, 0)
	allowed := func(n int) (count int, left uint64) {
		for i := range n {
			if more, ok := l.Allow(now, fmt.Sprint(i)); ok {
				count++
				left += more
			}
		}
		return count, left
	}
	if n, left := allowed(100); n != Burst || left != 0 {
		t.Errorf("%d of 100 lines at once, %d left out before them; want %d, 0", n, left, Burst)
	}
	now = now.Add(Interval)
	n, left := allowed(2)
	must.True(t, n == 1 && left == 90, "%d lines after %v, %d left out; want 1, 90", n, Interval, left)
	_, again := l.Allow(now, "1")
	must.True(t, !again, "the line again is allowed")
	now = now.Add(time.Hour)
	if n, left := allowed(100); n != Burst || left != 1 {
		t.Errorf("%d lines after an hour, %d left out; want %d, 1", n, left, Burst)
	}
}
