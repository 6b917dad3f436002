package healthd

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// A probe that panics leaves its backend as it was; others are probed, and it is when the panic is gone.
func TestPanicOfAProbe(t *testing.T) {
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		var on atomic.Bool
		bad := "web " + check(1, spec()).Key.BackendName()
		p.o.Boundary = &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(part lb.Part, object string) {
			if part == lb.PartProbe && object == bad && on.Load() {
				panic("injected")
			}
		}}
		p.Put("web", []lb.Check{check(1, spec()), check(2, spec())})
		time.Sleep(5 * time.Second)
		on.Store(true)
		f.set(errors.New("odd"))
		time.Sleep(10 * time.Second)
		if got := reports(); !slices.Equal(got, []string{"healthy: fine", "healthy: fine", "unhealthy: odd"}) {
			t.Errorf("reports %q; want one unhealthy backend", got)
		}
		if got := p.o.Boundary.Troubles(); len(got) != 1 || !strings.HasPrefix(got[0], "probe "+bad) {
			t.Errorf("troubles %q", got)
		}
		on.Store(false)
		time.Sleep(10 * time.Second)
		if got := reports(); len(got) != 4 || got[3] != "unhealthy: odd" {
			t.Errorf("reports %q; want both unhealthy", got)
		}
	})
}
