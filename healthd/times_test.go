package healthd

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The last duration and the 95th percentile of the last 60.
func TestTimes(t *testing.T) {
	t.Parallel()
	var x times
	must.Equal(t, lb.ProbeTimes{}, x.summary())
	x.add(3 * time.Second)
	must.Equal(t, lb.ProbeTimes{Last: 3, P95: 3}, x.summary())
	for i := range 60 { // the first one is forgotten
		x.add(time.Duration(i+1) * time.Millisecond)
	}
	must.Equal(t, lb.ProbeTimes{Last: 0.060, P95: 0.057}, x.summary())
	x.add(2 * time.Hour) // more than 32 bits of microseconds
	must.True(t, x.summary().Last > 4000, "%+v", x.summary())
}
