package cli

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// firstLine ends a context with the first line that has this text.
type firstLine struct {
	strings.Builder
	text string
	end  func()
}

func (f *firstLine) Write(p []byte) (int, error) {
	if strings.Contains(string(p), f.text) {
		f.end()
	}
	return f.Builder.Write(p)
}

// events prints the history, follows it, and reads the files without an agent. A drain is in it, with the user.
func TestEvents(t *testing.T) {
	dir := t.TempDir()
	h := must.Get(events.Open(dir))(t)
	log := slog.New(h.Handler(slog.NewTextHandler(io.Discard, nil)))
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Events, o.Log = h.After, log.With("component", "admin")
	})
	log.Warn("backend unhealthy", "component", "health", "service", "web", "reason", "HTTP 503, want 200-399\x1b[2J")
	const line = `  warn   health      backend unhealthy  reason="HTTP 503, want 200-399�[2J"  service=web` + "\n"
	for _, args := range [][]string{nil, {"--since", "1h"}, {"--service", "web"}, {"--kind", "health"}} {
		code, out, errOut := steelyard(t, append([]string{"events", "--socket", socket}, args...)...)
		must.True(t, code == 0 && strings.HasSuffix(out, line) && strings.Count(out, "\n") == 1,
			"%v: %d %q %q", args, code, out, errOut)
	}
	if _, out, errOut := steelyard(t, "events", "--socket", socket, "--service", "dns"); out+errOut != "" {
		t.Errorf("another service: %q %q", out, errOut)
	}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	out := &firstLine{text: "asked to drain", end: end}
	go func() {
		var drained any
		admin.NewClient(socket).Post(ctx, "/v1/drain?service=web", &drained) // the result does not matter
	}()
	must.Equal(t, 0, Main(ctx, []string{"events", "--socket", socket, "-f"}, out, io.Discard, programs))
	if got := out.String(); !strings.Contains(got, line) || !strings.Contains(got, "service=web  user=") {
		t.Errorf("-f: %q", got)
	}
	must.Do(t, h.Flush())
	alone := programs
	alone.Events = func(f events.Filter) ([]events.Event, error) { return events.Read(dir, f) }
	var stored strings.Builder
	args := []string{"events", "--socket", "/nowhere.sock", "--kind", "health"}
	code := Main(t.Context(), args, &stored, io.Discard, alone)
	must.True(t, code == 0 && strings.HasSuffix(stored.String(), line),
		"without an agent: %d %q", code, stored.String())
}
