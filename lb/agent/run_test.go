package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/systemd"
)

// fixture is an agent whose datapath and announcer are in memory.
type fixture struct {
	*Agent
	announced func() int // addresses
	log       *recorded
}

// recorded is a list of what happened, in order.
type recorded struct {
	mu   sync.Mutex // guards list
	list []string
}

func (e *recorded) add(s string) { e.mu.Lock(); defer e.mu.Unlock(); e.list = append(e.list, s) }

func (e *recorded) Close() error { e.add("datapath closed"); return nil }

func (e *recorded) all() []string { e.mu.Lock(); defer e.mu.Unlock(); return slices.Clone(e.list) }

func newFixture(t *testing.T) *fixture {
	t.Helper()
	memory := lbtest.New()
	engine := must.Get(lb.NewEngine(lb.EngineOptions{
		Datapath: memory, Announcer: memory, Prober: memory, Sources: []string{file.Name},
		Settle: settleTimeout, Retry: retryDelay, Withdraw: withdrawTimeout, Log: discard,
	}))(t)
	o := Options{ConfigFile: writeConfig(t, "", webTOML), Config: parse(t, webTOML), Log: discard, KeepDir: t.TempDir()}
	o = must.Get(o.complete())(t)
	services := file.New(nil, nil)
	must.Do(t, services.Use(o.Config))
	f := &fixture{log: new(recorded), announced: func() int { return len(memory.Announced()) }}
	f.Agent = &Agent{
		log: discard, hangup: o.hangup, engine: engine, datapath: f.log, problems: newProblems(discard),
		reloader: newReloader(o, services, newReadiness(systemd.New(discard))),
		sources:  []task{sourceTask("services of the file", services, engine)},
	}
	return f
}

// start runs the agent and returns a function that ends it and returns the error of Run.
func (f *fixture) start(t *testing.T) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	return func() error { cancel(); return <-done }
}

// The tasks, among them the BGP sessions, run until the routes are withdrawn and for a grace time after that; the
// sources end before. The datapath is closed last.
func TestRunWithdrawsFirst(t *testing.T) {
	lines := notifications(t)
	f := newFixture(t)
	var left int
	var ended time.Time
	sourceEnded := false
	f.tasks = append(f.tasks, task{"observer", func(ctx context.Context) error {
		<-ctx.Done()
		left, ended = f.announced(), time.Now()
		f.log.add("tasks ended")
		return nil
	}})
	f.sources = append(f.sources, task{"source", func(ctx context.Context) error {
		<-ctx.Done()
		sourceEnded = true
		return nil
	}})
	stop := f.start(t)
	next(t, lines, "READY=1")
	eventually(t, "an announced address", func() bool { return f.announced() == 1 })
	stopped := time.Now()
	must.Do(t, stop())
	next(t, lines, "STOPPING=1")
	must.Equal(t, 0, left)
	must.True(t, ended.Sub(stopped) >= withdrawGrace, "the tasks ended after %s", ended.Sub(stopped))
	must.True(t, sourceEnded, "the source has not ended")
	must.Equal(t, []string{"tasks ended", "datapath closed"}, f.log.all())
}

// A task that fails is a problem in the status and runs again; the addresses stay announced.
func TestRunContinuesWithoutAFailedTask(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	fail, runs := make(chan struct{}), make(chan struct{}, 10)
	broken := errors.New("broken")
	f.tasks = append(f.tasks, task{"mail", func(context.Context) error { runs <- struct{}{}; <-fail; return broken }})
	stop := f.start(t)
	eventually(t, "an announced address", func() bool { return f.announced() == 1 })
	close(fail)
	<-runs
	<-runs // the second run
	n, p := f.announced(), lbtest.Texts(f.problems.findings())
	must.True(t, n == 1 && slices.Equal(p, []string{"mail: broken"}), "%d addresses announced, problems %q", n, p)
	must.Do(t, stop())
	must.Equal(t, 0, f.announced())
}

func TestRunReloadsAtSIGHUP(t *testing.T) {
	ignored := make(chan os.Signal, 1) // without a receiver SIGHUP would end the test
	signal.Notify(ignored, syscall.SIGHUP)
	defer signal.Stop(ignored)
	lines := notifications(t)
	f := newFixture(t)
	stop := f.start(t)
	next(t, lines, "READY=1")
	start := f.reloader.state.Load()
	writeConfig(t, f.reloader.file, "[nonsense]\n")
	eventually(t, "a reload", func() bool {
		must.Do(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
		return f.reloader.state.Load() != start
	})
	next(t, lines, "RELOADING=1", "READY=1")
	must.True(t, f.reloader.state.Load().refused != "", "the file is not refused")
	must.Do(t, stop())
}

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
		{uplink + "[node]\nrouter_id = \"192.0.2.11\"\n" +
			"[bgp]\nasn = 64512\npeers = [{ address = \"127.0.0.1\", asn = 64500 }]\n",
			"127.0.0.1 is the address of lo", false},
	} {
		writeConfig(t, l.file, tt.text+service)
		_, refused := Check(l.file, false)
		must.Fail(t, refused, tt.want)
		if err := a.restart(); err == nil || err.Error() != refused.Error() || len(a.restarts) > 0 {
			t.Errorf("restart: %v; want check's error: %v", err, refused)
		}
		done, err := l.reload("")
		warned := strings.Contains(strings.Join(done.Warnings, "\n"), tt.want)
		must.True(t, (err == nil) == tt.reloads && warned == tt.reloads,
			"reload: %+v, %v; want a warning %s: %t", done, err, tt.want, tt.reloads)
	}
	writeConfig(t, l.file, uplink+webTOML)
	err := a.restart()
	must.True(t, err == nil && len(a.restarts) == 1, "a valid file: %v", err)
}

// A SIGTERM during a restart ends the agent, and no new one follows.
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
	must.Need(t, err == nil && resp.StatusCode == http.StatusOK, "%v, %v", resp, err)
	resp.Body.Close()
	process := agent.Process()
	// The end of the first agent takes withdrawGrace at least.
	labtest.Until(t, "it restarts", func() error {
		log := process.Log.Tail(100)
		return labtest.ErrorIf(!strings.Contains(log, "agent restarting"), "%s", log)
	})
	must.Do(t, process.Signal(syscall.SIGTERM))
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	err = process.Wait(ctx)
	must.True(t, err == nil, "%v\n%s", err, process.Log.Tail(20))
	log := process.Log.Tail(100)
	must.True(t, strings.Count(log, "agent started") == 1, "a new agent followed:\n%s", log)
}

// The status says when the file on disk is not the active one, unless it was rejected. The active text is stored.
func TestFileIsNotInForce(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	other := strings.Replace(webTOML, "web", "mail", 1)
	for _, tt := range []struct {
		name, text    string // "" if the file is removed
		reload        bool
		want, inForce string // part of the finding, or ""
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
			_, _ = l.reload("") // other tests check its error
		}
		found := l.findings()
		if len(found) > 1 || (len(found) == 0) != (tt.want == "") ||
			len(found) == 1 && (found[0].Code != "file-changed" || !strings.Contains(found[0].Text, tt.want)) {
			t.Errorf("%s: %+v; want %q", tt.name, found, tt.want)
		}
		last, _, err := l.history.Last()
		must.True(t, l.text() == tt.inForce && last == tt.inForce && err == nil,
			"%s: in force is %q, kept is %q, %v; want %q", tt.name, l.text(), last, err, tt.inForce)
	}
}
