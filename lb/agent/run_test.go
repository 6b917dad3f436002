package agent

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

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
	o := Options{
		ConfigFile: writeConfig(t, "", webTOML), Config: parse(t, webTOML), Log: discard, KeepDir: t.TempDir(),
	}
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
	if d := ended.Sub(stopped); d < withdrawGrace || !sourceEnded {
		t.Errorf("the tasks ended after %s, source ended: %t; want at least %s, true", d, sourceEnded, withdrawGrace)
	}
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

func TestAlive(t *testing.T) {
	f := newFixture(t)
	stop := f.start(t)
	must.Do(t, f.checkEngine())
	must.Do(t, stop())
}
