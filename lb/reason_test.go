package lb

import (
	"log/slog"
	"testing"
	"time"
)

// Reasons may change with every probe ("HTTP 503, request 4711"). A plan depends on states and weights only.
func TestReasonBuildsNoPlan(t *testing.T) {
	e := &Engine{o: EngineOptions{Log: slog.New(slog.DiscardHandler)}, stale: map[string]time.Time{}}
	e.services = map[string]*entry{"web": {health: map[CheckKey]Health{}}}
	h := Health{Key: CheckKey{Service: "web"}, State: StateUnhealthy, Weight: -1, Reason: "first"}
	for i, step := range []struct {
		change func()
		stale  int
	}{
		{func() {}, 1},
		{func() { h.Reason = "second" }, 0},
		{func() { h.Weight = 3 }, 1},
		{func() { h.State = StateHealthy }, 1},
	} {
		clear(e.stale)
		step.change()
		e.healthChanged(h, testStart)
		if len(e.stale) != step.stale || e.services["web"].health[h.Key].Reason != h.Reason {
			t.Errorf("step %d: %d stale plans, reason %q; want %d, %q", i, len(e.stale),
				e.services["web"].health[h.Key].Reason, step.stale, h.Reason)
		}
	}
}
