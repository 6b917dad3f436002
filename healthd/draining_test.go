package healthd

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// A backend that says that it takes no new flows drains: after Fall such results, and until Fall failures or Rise
// successes.
func TestDrainingBackend(t *testing.T) {
	down, drains := errors.New("no response"), drainingError{errors.New("HTTP 503")}
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		p.Put("web", []lb.Check{check(1, spec())}) // Rise 2, Fall 3
		var want []string
		for i, step := range []struct {
			err  error
			n    int // probes
			want string
		}{
			{nil, 1, "healthy: fine"},
			{drains, 2, ""},
			{nil, 1, ""},
			{drains, 1, ""},
			{down, 1, ""},
			{drains, 1, "draining: HTTP 503"}, // three in a row were no success
			{down, 2, ""},
			{drains, 1, ""},
			{nil, 1, ""},
			{down, 2, ""},
			{down, 1, "unhealthy: no response"},
			{drains, 1, ""},
			{drains, 1, "draining: HTTP 503"},
			{nil, 1, ""},
			{nil, 1, "healthy: fine"},
		} {
			f.set(step.err)
			time.Sleep(time.Duration(step.n) * time.Second)
			if step.want != "" {
				want = append(want, step.want)
			}
			if got := reports(); !slices.Equal(got, want) {
				t.Fatalf("step %d: reports %q; want %q", i, got, want)
			}
		}
	})
}
