package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// lines returns changes as they are printed.
func lines(changes []lb.Change) (all []string) {
	for _, c := range changes {
		all = append(all, c.String())
	}
	return all
}

const bgpTOML = `
[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500 }]
[[pool]]
name = "p"
addresses = ["203.0.113.0/28"]
`

// diff says what a reload would change; the reload says the same, and afterwards there is no difference.
func TestDiffIsWhatReloadChanges(t *testing.T) {
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	eventually(t, "web", func() bool { return services.has("web") })
	l.flows = func(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
		if want.Service != "web" || want.State != lb.FlowEstablished {
			t.Errorf("asked for the flows %+v", want)
		}
		return make([]lb.FlowStatus, 41), false, nil
	}
	text := bgpTOML + strings.Replace(webTOML, "web", "mail", 1) + "[log]\nlevel = \"warn\"\n"
	want := []string{
		"+ [bgp]", "~ [log]", "+ peer 192.0.2.1", "+ pool p", "+ service mail: 203.0.113.10; 80/tcp; 1 backend",
		"- service web: 203.0.113.10; 80/tcp; 1 backend; ends 41 connections",
	}
	then, err := l.diff(l.file, []byte(text))
	if got := lines(then.Changes); err != nil || !slices.Equal(got, want) || !then.Loaded.IsZero() {
		t.Errorf("diff of a text: %v, %q; want %q", err, got, want)
	}
	must.Equal(t, []string{"bgp"}, then.NeedRestart)
	if then, err := l.diff("", nil); err != nil || len(then.Changes) > 0 || !services.has("web") {
		t.Errorf("diff of the file: %v, %q; want nothing", err, lines(then.Changes))
	}
	writeConfig(t, l.file, text)
	done, err := l.reload("")
	if got := lines(done.Changes); err != nil || !slices.Equal(got, want) {
		t.Errorf("reload: %v, %q; want %q", err, got, want)
	}
	if then, err := l.diff("", nil); err != nil || len(then.Changes) > 0 {
		t.Errorf("diff after the reload: %v, %q", err, lines(then.Changes))
	}
	if then, err := l.diff("/x.toml", []byte("[nodes]")); err == nil {
		t.Errorf("a bad text has the difference %q", lines(then.Changes))
	}
}

// A reload that is refused after its plan was made changes no service.
func TestRefusedReloadChangesNoService(t *testing.T) {
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	eventually(t, "web", func() bool { return services.has("web") })
	l.setMembers = func(_, _ *config.Config) error { return errors.New("no") }
	writeConfig(t, l.file, strings.Replace(webTOML, "web", "mail", 1))
	if _, err := l.reload(""); err == nil {
		t.Fatal("the reload is not refused")
	}
	if then, err := l.diff("", nil); err != nil || len(then.Changes) != 2 || !services.has("web") {
		t.Errorf("diff: %v, %q; want that mail replaces web", err, lines(then.Changes))
	}
}
