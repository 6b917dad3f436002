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

type statusFunc func(context.Context) (lb.Status, error)

func (f statusFunc) Status(ctx context.Context) (lb.Status, error) { return f(ctx) }

func TestBehind(t *testing.T) {
	since := time.Unix(1, 0)
	for _, want := range []error{nil, errors.New("no answer")} {
		got, err := behind(statusFunc(func(ctx context.Context) (lb.Status, error) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > engineTimeout || time.Until(d) < engineTimeout/2 {
				t.Errorf("deadline %s, %t; want %s from now", d, ok, engineTimeout)
			}
			return lb.Status{Behind: since}, want
		}))
		if !errors.Is(err, want) || !got.Equal(since) {
			t.Errorf("%s, %v; want %s, %v", got, err, since, want)
		}
	}
}

func TestSettled(t *testing.T) {
	n := 0
	yes := settled(t.Context(), statusFunc(func(context.Context) (lb.Status, error) {
		n++
		if n == 2 {
			return lb.Status{Settled: true}, errors.New("no answer")
		}
		return lb.Status{Settled: n == 4}, nil
	}))
	if !yes || n != 4 {
		t.Errorf("settled %t after %d requests; want true after 4", yes, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if settled(ctx, statusFunc(func(context.Context) (lb.Status, error) { return lb.Status{}, nil })) {
		t.Error("settled after the end of the context")
	}
}
