package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// reader is the reader of a log, which stops reading, reads again, and ends.
type reader struct {
	mu    sync.Mutex // held while it does not read; guards all below
	text  strings.Builder
	ended bool
}

var errEnded = errors.New("the reader ended")

func (r *reader) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, errEnded
	}
	return r.text.Write(p)
}

// While nobody reads the log, the agent withdraws the address of a dead server and reports that lines are lost; later
// the log says so as well. The agent continues when the reader ends.
func TestLogThatNobodyReads(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	site := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 1})
	server := labtest.TCPEcho(t, site.Servers[0], 8080)
	cfg := lab.AgentConfig{
		Name: "lb1", Interfaces: []string{"eth0"}, Mode: "tc", L2: []string{"eth0"},
		Services: []lab.AgentService{{
			Name: "web", Addresses: []netip.Addr{ip("203.0.113.10"), ip("2001:db8:1::10")},
			Ports:    []string{"80:8080"},
			Backends: lab.Backends(site.Servers...),
			Check:    lab.AgentCheck{Type: "tcp", Interval: 200 * time.Millisecond},
		}},
	}
	log := new(reader)
	agent := must.Get(lab.StartAgent(site.Balancers[0].Host,
		lab.AgentOptions{Binary: self, Config: cfg.TOML(), Output: log}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log:\n%s", agent.Process().Log.FailureTail(60))
		}
	})
	i := waitStatus(t, agent, "the address is announced", func(i admin.Info) bool { return i.Announced == 2 })

	log.mu.Lock()
	reading := sync.OnceFunc(log.mu.Unlock)
	defer reading()
	lost := func() bool { return strings.Contains(strings.Join(i.Reasons, "\n"), " lines of the log were lost") }
	var wrong strings.Builder
	for n := range 1000 {
		fmt.Fprintf(&wrong, "[nonsense%d]\n", n)
	}
	for n := 0; !lost(); n++ { // each adds a line of some 100 kB to the log
		mark := fmt.Sprintf("rubbish%d", n)
		must.Do(t, agent.Configure(cfg.TOML()+"["+mark+"]\n"+wrong.String()))
		must.Do(t, agent.Reload())
		i = waitStatus(t, agent, "the wrong file is refused", func(i admin.Info) bool {
			return strings.Contains(i.LoadError, mark)
		})
	}
	must.Do(t, server.Stop())
	waitStatus(t, agent, "the address is withdrawn", func(i admin.Info) bool { return i.Settled && i.Announced == 0 })

	reading()
	labtest.Until(t, stepTimeout, "the log says what it lacks", func() error {
		log.mu.Lock()
		defer log.mu.Unlock()
		if !strings.Contains(log.text.String(), " lines of the log were lost") {
			return errors.New("it does not")
		}
		log.ended = true
		return nil
	})
	for n := range 3 {
		mark := fmt.Sprintf("waste%d", n)
		must.Do(t, agent.Configure("["+mark+"]\n"))
		must.Do(t, agent.Reload())
		waitStatus(t, agent, "it lives on", func(i admin.Info) bool { return strings.Contains(i.LoadError, mark) })
	}
	err := agent.Terminate(t.Context(), stepTimeout)
	if err == nil || !strings.Contains(err.Error(), errEnded.Error()) { // which the lab finds after an exit status of 0
		t.Fatal(err)
	}
}

// Lines for the journal begin with their priority, and no other lines do.
func TestJournalPriorities(t *testing.T) {
	for _, journal := range []bool{true, false} {
		f := must.Get(os.Create(filepath.Join(t.TempDir(), "log")))(t)
		defer f.Close()
		var st syscall.Stat_t
		must.Do(t, syscall.Fstat(int(f.Fd()), &st))
		if journal {
			t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
		} else {
			t.Setenv("JOURNAL_STREAM", "1:1")
		}
		log, queue := openLog(f, config.Log{Level: slog.LevelDebug, Format: "text"}, new(slog.LevelVar))
		log = component(log, "x")
		log.Debug("a")
		log.Info("b")
		log.Warn("c")
		log.WithGroup("g").Error("d")
		queue.Flush()
		text := must.Get(os.ReadFile(f.Name()))(t)
		for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
			want := "time="
			if journal {
				want = []string{"<7>", "<6>", "<4>", "<3>"}[i] + want
			}
			must.True(t, strings.HasPrefix(line, want) && strings.Contains(line, "component=x"),
				"journal %t: %q; want it to begin with %s", journal, line, want)
		}
	}
}
