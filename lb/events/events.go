// Package events keeps the history of a node for "steelyard events": each record of its log from level INFO up,
// whatever the level of the log itself. It is a package of its own because three parts need it: the log fills it, the
// API reads it, and the command line reads its files while no agent runs.
package events

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Event is one record. The field names are a contract (docs/api.md).
type Event struct {
	Time   time.Time         `json:"time"`
	Level  string            `json:"level"` // info, warn or error
	Kind   string            `json:"kind"`  // the component of the agent, such as health or bgp
	Text   string            `json:"text"`
	Fields map[string]string `json:"fields,omitempty"` // such as service, vip or reason
}

// Filter selects events. A zero field selects all.
type Filter struct {
	Since         time.Time
	Kind, Service string
}

// match reports whether f selects e. An event about an address has all services of the address.
func (f Filter) match(e Event) bool {
	return !e.Time.Before(f.Since) && (f.Kind == "" || f.Kind == e.Kind) && (f.Service == "" ||
		f.Service == e.Fields["service"] || slices.Contains(strings.Fields(e.Fields["services"]), f.Service))
}

// Handler returns a handler that adds records to the history and passes them on to next.
func (h *History) Handler(next slog.Handler) slog.Handler { return handler{next: next, to: h} }

type handler struct {
	next  slog.Handler
	to    *History
	attrs []slog.Attr
}

// Enabled implements slog.Handler.
func (h handler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || h.next.Enabled(ctx, l)
}

// Handle implements slog.Handler.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		e := Event{
			Time: r.Time, Level: strings.ToLower(r.Level.String()), Kind: "agent", Text: printable.Cut(r.Message),
			Fields: map[string]string{},
		}
		add := func(a slog.Attr) bool {
			value := printable.Cut(a.Value.Resolve().String())
			if a.Key == "component" {
				e.Kind = value
			} else {
				e.Fields[a.Key] = value
			}
			return true
		}
		for _, a := range h.attrs {
			add(a)
		}
		r.Attrs(add)
		h.to.add(e)
	}
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.next, h.attrs = h.next.WithAttrs(attrs), slices.Concat(h.attrs, attrs)
	return h
}

// WithGroup implements slog.Handler. The history does not keep groups.
func (h handler) WithGroup(name string) slog.Handler {
	h.next = h.next.WithGroup(name)
	return h
}

// decode returns the events of these lines that f selects. It leaves out lines that are not events.
func decode(lines [][]byte, f Filter) []Event {
	all := []Event{}
	for _, line := range lines {
		var e Event
		if json.Unmarshal(line, &e) == nil && f.match(e) {
			all = append(all, e)
		}
	}
	return all
}
