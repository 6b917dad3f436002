package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// apply sends the file with its options. Without a terminal, it does not wait.
func TestApply(t *testing.T) {
	name := filepath.Join(t.TempDir(), "new.toml")
	must.Do(t, os.WriteFile(name, []byte("text"), 0o600))
	until := time.Date(2026, 8, 1, 12, 30, 0, 0, time.Local)
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Apply = func(file string, text []byte, force string, within time.Duration) (admin.Reloaded, error) {
			now := admin.Reloaded{Config: "/etc/x.toml", Changes: []lb.Change{{Op: lb.Added, Object: "service web"}}}
			switch {
			case file != name || string(text) != "text":
				return now, errors.New("not what was sent: " + file)
			case force == "word":
				return now, errors.New("line 1\nline 2")
			case within > 0:
				must.Row(t, "within", time.Minute, within)
				now.ConfirmUntil = until
			}
			return now, nil
		}
		o.Confirm = func() (admin.Reloaded, error) {
			return admin.Reloaded{Config: "/etc/x.toml", Changes: []lb.Change{{Op: lb.Changed, Object: "a drain"}}}, nil
		}
	})
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"apply", name}, 0, "+ service web\napplied: /etc/x.toml\n"},
		{[]string{"apply", name, "--confirm", "60s"}, 0,
			"+ service web\napplied until 12:30:00; \"steelyard confirm\" keeps it\n"},
		{[]string{"apply", name, "--force", "word"}, 1,
			"line 1\nline 2\nrejected; the running configuration stays active\n"},
		{[]string{"apply", name, "--confirm", "60"}, 2, "want a time from 1s to 1h"},
		{[]string{"apply", name, "--confirm", "2h"}, 2, "want a time from 1s to 1h"},
		{[]string{"apply"}, 2, "apply takes 1 argument, got 0"},
		{[]string{"confirm"}, 0, "~ a drain\nconfirmed: /etc/x.toml\n"},
	} {
		t.Setenv("STEELYARD_SOCKET", socket)
		code, out, errOut := steelyard(t, tt.args...)
		must.True(t, code == tt.code && strings.Contains(out+errOut, tt.want), "%v: code %d, %q, %q; want %d, %q",
			tt.args, code, out, errOut, tt.code, tt.want)
	}
}

// A command that waits confirms at Enter, goes back at Ctrl-C, and says what became of the configuration otherwise.
func TestAwaitConfirm(t *testing.T) {
	loaded := time.Now()
	tried := admin.Reloaded{Loaded: loaded, ConfirmUntil: loaded.Add(time.Minute)}
	for _, tt := range []struct {
		name        string
		enter, stop bool
		now         admin.Info
		asked, want string // requests, and the output or error
	}{
		{"Enter", true, false, admin.Info{ConfirmUntil: tried.ConfirmUntil}, "confirm", "confirmed: x\n"},
		{"Ctrl-C", false, true, admin.Info{ConfirmUntil: tried.ConfirmUntil}, "reload",
			"the previous configuration is active again"},
		{"confirmed elsewhere", false, false, admin.Info{Loaded: loaded, Config: "x"}, "", "confirmed: x\n"},
		{"not confirmed", false, false, admin.Info{Loaded: loaded.Add(time.Second)}, "", "not confirmed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var asked, out strings.Builder
			socket := serve(t, lb.Status{}, func(o *admin.Options) {
				o.Confirm = func() (admin.Reloaded, error) {
					asked.WriteString("confirm")
					return admin.Reloaded{Config: "x"}, nil
				}
				o.Reload = func(string) (admin.Reloaded, error) {
					asked.WriteString("reload")
					return admin.Reloaded{}, nil
				}
				o.Info = func() admin.Info { return tt.now }
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if tt.stop {
				cancel()
			}
			keep := make(chan struct{}, 1)
			if tt.enter {
				keep <- struct{}{}
			}
			e := &env{out: &out, err: io.Discard}
			if err := e.awaitConfirm(ctx, admin.NewClient(socket), tried, keep); err != nil {
				out.WriteString(err.Error())
			}
			must.True(t, asked.String() == tt.asked && strings.HasPrefix(out.String(), tt.want),
				"asked to %q, output %q", &asked, &out)
		})
	}
}
