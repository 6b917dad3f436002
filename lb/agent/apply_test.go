package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// mail replaces the only service of webTOML.
var mailTOML = strings.Replace(webTOML, `"web"`, `"mail"`, 1)

// applied is a reloader for tests of applyText, with a drained backend whose entry mailTOML removes.
func applied(t *testing.T) (*reloader, *sink) {
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	e := &fakeEngine{}
	l.drains = must.Get(openDrainStore(t.TempDir(), e, newProblems(discard)))(t)
	l.drains.use(lb.Drains{Backends: []lb.DrainTarget{{Service: "web", Address: ip("10.0.0.21")}}})
	eventually(t, "web", func() bool { return services.has("web") })
	return l, services
}

// holds checks which configuration is active, on the disk, and last in the history, and whether the drain is active.
func (l *reloader) holds(t *testing.T, when, active, onDisk string, drained bool) {
	t.Helper()
	file := string(must.Get(os.ReadFile(l.file))(t))
	last, _, err := l.history.Last()
	must.Do(t, err)
	must.True(t, l.text() == active && file == onDisk && last == onDisk, "%s: active\n%s\nfile\n%s\nhistory\n%s", when,
		l.text(), file, last)
	eventually(t, when+": drains", func() bool { return len(l.drains.now().Backends) > 0 == drained })
}

// Without a time, a configuration replaces the file at once, with its mode and where a symbolic link leads.
func TestApplyReplacesTheFile(t *testing.T) {
	l, services := applied(t)
	target := l.file
	must.Do(t, os.Chmod(target, 0o640))
	l.file = filepath.Join(t.TempDir(), "link.toml")
	must.Do(t, os.Symlink(target, l.file))
	done := must.Get(l.applyText("new.toml", []byte(mailTOML), "", 0))(t)
	must.True(t, len(done.Changes) == 3 && done.ConfirmUntil.IsZero(), "%+v", done)
	eventually(t, "mail instead of web", func() bool { return services.has("mail") && !services.has("web") })
	l.holds(t, "applied", mailTOML, mailTOML, false)
	mode := must.Get(os.Lstat(target))(t).Mode()
	link := must.Get(os.Readlink(l.file))(t)
	must.True(t, mode == 0o640 && link == target, "mode %s, link to %s", mode, link)
	_, err := l.confirm()
	must.Fail(t, err, "no configuration waits to be confirmed")
}

// A configuration that is not confirmed ends, and leaves file, history and drains alone.
func TestApplyGoesBack(t *testing.T) {
	l, services := applied(t)
	done := must.Get(l.applyText("new.toml", []byte(mailTOML), "", time.Second))(t)
	l.holds(t, "tried", mailTOML, webTOML, true)
	must.True(t, time.Until(done.ConfirmUntil) > 0, "until %s", done.ConfirmUntil)
	f := l.findings()
	must.True(t, len(f) == 1 && f[0].Code == "unconfirmed", "findings %v", f)
	_, err := l.applyText("other.toml", []byte(webTOML), "", time.Second)
	must.Fail(t, err, "another configuration waits")
	eventually(t, "it goes back", func() bool { return l.text() == webTOML && services.has("web") })
	must.True(t, !services.has("mail"), "mail is still active")
	l.holds(t, "back", webTOML, webTOML, true)
	must.True(t, len(l.findings()) == 0, "findings %v", l.findings())
}

// A confirmed configuration stays, and ends the drains of changed entries.
func TestApplyConfirmed(t *testing.T) {
	l, _ := applied(t)
	must.Get(l.applyText("new.toml", []byte(mailTOML), "", time.Second))(t)
	done := must.Get(l.confirm())(t)
	must.True(t, len(done.Changes) == 1 && strings.Contains(done.Changes[0].Text, "no longer drained"), "%+v", done)
	time.Sleep(1500 * time.Millisecond)
	l.holds(t, "confirmed", mailTOML, mailTOML, false)
}

// A reload goes back at once. The guard does not refuse it.
func TestReloadEndsATrial(t *testing.T) {
	l, _ := applied(t)
	more := webTOML
	for _, n := range "1234" {
		next := strings.NewReplacer("\n[l2]\n", "", "web", "web"+string(n), "113.10", "113.2"+string(n))
		more += next.Replace(webTOML)
	}
	must.Get(l.applyText("new.toml", []byte(more), "", time.Minute))(t)
	must.Get(l.diff("", nil))(t)
	must.Get(l.reload(""))(t)
	l.holds(t, "reloaded", webTOML, webTOML, true)
}

// What is refused changes nothing; errors name the operator's file.
func TestApplyRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, text, onDisk, want string
		prepare                  func(t *testing.T, l *reloader)
	}{
		{"an error", webTOML + "[nonsense]\n", webTOML, "new.toml:9: nonsense: no such section", nil},
		{"an edited file", mailTOML, mailTOML, "was edited after it was loaded", func(t *testing.T, l *reloader) {
			writeConfig(t, l.file, mailTOML)
		}},
	} {
		for _, within := range []time.Duration{0, time.Minute} {
			t.Run(tt.name, func(t *testing.T) {
				l, services := applied(t)
				if tt.prepare != nil {
					tt.prepare(t, l)
				}
				_, err := l.applyText("new.toml", []byte(tt.text), "", within)
				must.Fail(t, err, tt.want)
				file := string(must.Get(os.ReadFile(l.file))(t))
				now := l.state.Load()
				must.True(t, services.has("web") && now.text == webTOML && file == tt.onDisk && now.refused == "",
					"state %+v", now)
			})
		}
	}
}
