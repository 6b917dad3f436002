package agent

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

func TestHealthRelay(t *testing.T) {
	var r healthRelay
	var got []string
	report := func(service string) { r.report(lb.Health{Key: lb.CheckKey{Service: service}}) }
	report("a")
	report("b")
	r.deliverTo(func(h lb.Health) { got = append(got, h.Key.Service) })
	report("c")
	if want := []string{"a", "b", "c"}; !slices.Equal(got, want) {
		t.Errorf("delivered %q; want %q, each once and in order", got, want)
	}
}

type behindFunc func(context.Context) (time.Time, error)

func (f behindFunc) Behind(ctx context.Context) (time.Time, error) { return f(ctx) }

func TestCheckEngine(t *testing.T) {
	for _, want := range []error{nil, errors.New("no answer")} {
		err := checkEngine(behindFunc(func(ctx context.Context) (time.Time, error) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > engineTimeout || time.Until(d) < engineTimeout/2 {
				t.Errorf("deadline %s, %t; want %s from now", d, ok, engineTimeout)
			}
			return time.Time{}, want
		}))
		if !errors.Is(err, want) {
			t.Errorf("%v; want %v", err, want)
		}
	}
}

type publishes struct{ state lb.Progress }

func (p publishes) Progress() lb.Progress { return p.state }
func (publishes) InForce(s string) bool   { return s == "default/web" }

// Health requests are answered from what the engine publishes. It does not respond when an event has waited too long.
func TestEngineHealth(t *testing.T) {
	since := time.Unix(1, 0)
	for _, tt := range []struct {
		waiting time.Duration
		want    error
	}{{0, nil}, {engineTimeout / 2, nil}, {engineTimeout + time.Second, errEngine}} {
		p := publishes{lb.Progress{Behind: since, Applied: tt.waiting == 0}}
		if tt.waiting > 0 {
			p.state.Waiting = time.Now().Add(-tt.waiting)
		}
		h := engineHealth{p}
		got, err := h.behind()
		if !got.Equal(since) || !errors.Is(err, tt.want) || h.applied() != p.state.Applied {
			t.Errorf("an event waits for %s: behind %s, %v, applied %t", tt.waiting, got, err, h.applied())
		}
		if !h.inForce("default/web") || h.inForce("default/db") {
			t.Error("in force is wrong")
		}
	}
}
