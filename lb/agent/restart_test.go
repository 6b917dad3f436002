package agent

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A restart refuses what check refuses, with the same text, including what a starting agent would only wait for. A
// reload warns about the interfaces, which it does not change.
func TestRestartRefusesWhatCheckRefuses(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	a := &Agent{reloader: l, restarts: make(chan struct{}, 1)}
	const uplink, missing = "[datapath]\ninterfaces = [\"lo\"]\n", "there is no interface none-0; name an interface of"
	service := strings.TrimPrefix(webTOML, "\n[l2]\n")
	for _, tt := range []struct {
		text, want string
		reloads    bool
	}{
		{"[l2]\n[datapath]\ninterfaces = [\"none-0\"]\n", "datapath.interfaces[0]: " + missing, true},
		{uplink + "[l2]\ninterfaces = [\"lo\", \"none-0\"]\n", "l2.interfaces[1]: " + missing, true},
		{
			uplink + "[node]\nrouter_id = \"192.0.2.11\"\n" +
				"[bgp]\nasn = 64512\npeers = [{ address = \"127.0.0.1\", asn = 64500 }]\n",
			"127.0.0.1 is the address of lo", false,
		},
	} {
		writeConfig(t, l.file, tt.text+service)
		_, refused := Check(l.file, false)
		must.Fail(t, refused, tt.want)
		if err := a.restart(); err == nil || err.Error() != refused.Error() || len(a.restarts) > 0 {
			t.Errorf("restart: %v; want that of check: %v", err, refused)
		}
		done, err := l.reload("")
		warned := strings.Contains(strings.Join(done.Warnings, "\n"), tt.want)
		must.True(t, (err == nil) == tt.reloads && warned == tt.reloads,
			"reload: %+v, %v; want a warning %s: %t", done, err, tt.want, tt.reloads)
	}
	writeConfig(t, l.file, uplink+webTOML)
	if err := a.restart(); err != nil || len(a.restarts) != 1 {
		t.Errorf("a valid file: %v", err)
	}
}

// A SIGTERM during a restart ends the agent: no new one follows.
func TestStopDuringARestart(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	h := labtest.Host(t, labtest.New(t), "lb")
	agent := labtest.Agent(t, h, self, lab.AgentConfig{Name: "lb1", Mode: "tc", Interfaces: []string{"lo"}})
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return h.Dial(ctx, "unix", lab.AgentSocketPath)
		},
	}}
	resp, err := client.Post("http://agent/v1/restart", "", nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	resp.Body.Close()
	process := agent.Process()
	// The end of the first agent takes withdrawGrace at least.
	labtest.Until(t, stepTimeout, "it restarts", func() error {
		log := process.Log.Tail(100)
		return labtest.ErrorIf(!strings.Contains(log, "agent restarting"), "%s", log)
	})
	must.Do(t, process.Signal(syscall.SIGTERM))
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	if err := process.Wait(ctx); err != nil {
		t.Errorf("%v\n%s", err, process.Log.Tail(20))
	}
	if log := process.Log.Tail(100); strings.Count(log, "agent started") != 1 {
		t.Errorf("a new agent followed:\n%s", log)
	}
}

// The status says when the file on disk is not the one in force, unless it was rejected, and what is in force is kept.
func TestFileIsNotInForce(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	other := strings.Replace(webTOML, "web", "mail", 1)
	for _, tt := range []struct {
		name, text    string // "": the file is removed
		reload        bool
		want, inForce string // part of the finding; "": none
	}{
		{"at the start", webTOML, false, "", webTOML},
		{"edited", other, false, "has changed since it was loaded", webTOML},
		{"reloaded", other, true, "", other},
		{"removed", "", false, "cannot be read: no such file", other},
		{"rejected", "[no]", true, "", other},
		{"edited after it was rejected", webTOML, false, "has changed since it was loaded", other},
		{"as in force after it was rejected", other, false, "", other},
		{"removed and rejected", "", true, "", other},
	} {
		if tt.text != "" {
			writeConfig(t, l.file, tt.text)
		} else if err := os.Remove(l.file); err != nil {
			t.Fatal(err)
		}
		if tt.reload {
			_, _ = l.reload("") // its error is the matter of other tests
		}
		found := l.findings()
		if len(found) > 1 || (len(found) == 0) != (tt.want == "") ||
			len(found) == 1 && (found[0].Code != "file-changed" || !strings.Contains(found[0].Text, tt.want)) {
			t.Errorf("%s: %+v; want %q", tt.name, found, tt.want)
		}
		last, _, err := l.history.Last()
		if l.text() != tt.inForce || last != tt.inForce || err != nil {
			t.Errorf("%s: in force is %q, kept is %q, %v; want %q", tt.name, l.text(), last, err, tt.inForce)
		}
	}
}
