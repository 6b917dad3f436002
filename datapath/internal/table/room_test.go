package table

import (
	"errors"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The last tenth of a table is for services with fewer entries than the average, and for those that do not grow.
func TestRoom(t *testing.T) {
	services := map[string]lb.Places{"large": {Backends: 700}, "small": {Backends: 5}}
	for _, tt := range []struct {
		name    string
		used    int
		service string
		needs   int
		fits    bool
	}{
		{"nine tenths are for all", 705, "new", 195, true},
		{"not more", 705, "new", 196, true}, // fewer than the average of 352
		{"a large one does not fit", 705, "large", 1000, false},
		{"a new one above the average", 705, "new", 353, false},
		{"a new one above the average that fits", 500, "new", 353, true},
		{"the last tenth, above the average", 905, "new", 460, false},
		{"the last tenth, below the average", 905, "new", 95, true},
		{"nothing is left", 905, "new", 96, false},
		{"the same as before", 1000, "large", 700, true},
		{"fewer than before", 1000, "large", 10, true},
		{"a small one grows in the last tenth", 905, "small", 20, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &room{
				tables: []sharedTable{{"backends", 1000, tt.used, func(n lb.Places) int { return n.Backends }}},
				count:  func() map[string]lb.Places { return services },
			}
			err := r.admit(&lb.FrontendPlan{Service: tt.service, Needs: lb.Places{Backends: tt.needs}}, nil)
			fits := err == nil
			must.True(t, fits == tt.fits, "fits %t; want %t: %v", fits, tt.fits, err)
			must.True(t, err == nil || errors.Is(err, lb.ErrRefused), "error %v; want one of the service", err)
		})
	}
}
