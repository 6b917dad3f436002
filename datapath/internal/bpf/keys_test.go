package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Times since an event are right at the boundaries of the clocks: when a clock wraps, when half of its range has
// passed, and when the event came while the tables were read.
func TestTimesSince(t *testing.T) {
	day := 24 * time.Hour
	for _, uptime := range []time.Duration{time.Hour, 104 * day, 105 * day, 208 * day, 209 * day, 4000 * day} {
		for _, past := range []time.Duration{-time.Minute, 0, time.Second, 104 * day, 105 * day, 208 * day} {
			row := fmt.Sprintf("uptime %s, %s ago", uptime, past)
			idle, age := Idle(uptime, FlowClock(uptime-past)), Age(uptime, AgeClock(uptime-past))
			must.True(t, (idle-past).Abs() <= 1<<flowClockShift, "%s: idle for %s", row, idle)
			must.True(t, (age-past).Abs() <= 1<<ageClockShift, "%s: age %s", row, age)
		}
	}
	old := 9 * 365 * day
	age := Age(old+day, AgeClock(day))
	must.True(t, (age-old).Abs() <= 1<<ageClockShift, "age %s; want %s", age, old)
}
