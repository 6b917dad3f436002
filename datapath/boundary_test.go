package datapath

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// A table that cannot be computed refuses its frontend before anything of it is written; others are put.
func TestPanicOfATable(t *testing.T) {
	on := true
	b := &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(part lb.Part, object string) {
		if part == lb.PartTable && strings.HasPrefix(object, "bad ") && on {
			panic("injected")
		}
	}}
	fx := newFixture(t, hookTC, false, func(o *Options) { o.Boundary = b })
	var delta lb.Delta
	for _, s := range []*lb.Service{pairs("bad", "203.0.113.21", 1, 2), pairs("good", "203.0.113.22", 2, 2)} {
		delta.Put = append(delta.Put, lb.Build(s, nil, lb.Drains{}).Frontends...)
	}
	failed := onHost{fx}.Apply(t.Context(), delta)
	if err := failed[delta.Put[0].Frontend]; len(failed) != 1 || !errors.Is(err, lb.ErrRefused) {
		t.Errorf("failed %v; want the one with the panic", failed)
	}
	if held, err := fx.d.Held(); err != nil || len(held) != 2 {
		t.Errorf("held %v, %v; want those of the other service", held, err)
	}
	on = false
	if failed := (onHost{fx}).Apply(t.Context(), delta); len(failed) > 0 || len(b.Troubles()) > 0 {
		t.Errorf("failed %v, troubles %q without the panic", failed, b.Troubles())
	}
}
