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

func TestBehind(t *testing.T) {
	since := time.Unix(1, 0)
	for _, want := range []error{nil, errors.New("no answer")} {
		got, err := behind(behindFunc(func(ctx context.Context) (time.Time, error) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > engineTimeout || time.Until(d) < engineTimeout/2 {
				t.Errorf("deadline %s, %t; want %s from now", d, ok, engineTimeout)
			}
			return since, want
		}))
		if !errors.Is(err, want) || !got.Equal(since) {
			t.Errorf("%s, %v; want %s, %v", got, err, since, want)
		}
	}
}
