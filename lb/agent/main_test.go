package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	stdlog "log"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestMain lets the test program be an agent as well: the lab starts it in a host with the arguments "run -c FILE". It
// sets client-go's logger before any use, as Main does.
func TestMain(m *testing.M) {
	klog.SetSlogLogger(discard)
	setKlog = func(*slog.Logger) {}
	if len(os.Args) != 4 || os.Args[1] != "run" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := Main(ctx, os.Args[3], "test", os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// stepTimeout bounds each step of a test. A start takes a second, and more than ten on a busy machine.
const stepTimeout = time.Minute

// waitStatus waits until the status of an agent is as wanted, and returns it.
func waitStatus(t *testing.T, agent *lab.Agent, what string, want func(admin.Info) bool) (i admin.Info) {
	t.Helper()
	labtest.Until(t, what, func() error {
		i = admin.Info{}
		err := agent.Get(t.Context(), "/v1/status", &i)
		return errors.Join(err, labtest.ErrorIf(!want(i), "%+v", i))
	})
	return i
}

// An agent in a host of the lab announces its service, keeps drains in its state directory over a restart, refuses an
// invalid file, and withdraws when it ends.
func TestAgentInALab(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	site := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 1})
	b := site.Balancers[0]
	agent := labtest.Agent(t, b.Host, self, lab.AgentConfig{
		Name: "lb1", Interfaces: []string{"eth0"}, Mode: "tc", L2: []string{"eth0"},
		Services: []lab.AgentService{{
			Name: "web", Addresses: []netip.Addr{ip("203.0.113.10"), ip("2001:db8:1::10")},
			Ports: []string{"80:8080"}, Backends: lab.Backends(site.Servers...),
			Check: lab.AgentCheck{Type: "none"},
		}},
	})
	waitStatus(t, agent, "the addresses are announced", func(i admin.Info) bool {
		named := i.Node == "lb1" && i.Version == "test" && i.Config == lab.AgentConfigPath
		return named && i.Settled && i.Announced == 2
	})
	drains := must.Get(json.Marshal(map[string]any{"node": true, "services": nil}))(t)
	must.Do(t, agent.Terminate(t.Context(), stepTimeout))
	must.Do(t, b.Host.WriteFile("/run/steelyard/drained.json", string(drains), 0o600))
	must.Do(t, agent.Start())
	waitStatus(t, agent, "the drained addresses are not announced", func(i admin.Info) bool {
		return i.Settled && i.Announced == 0
	})
	must.Do(t, agent.Configure("[nonsense]\n"))
	must.Do(t, agent.Reload())
	waitStatus(t, agent, "the wrong file is refused", func(i admin.Info) bool {
		return strings.Contains(i.LoadError, "nonsense")
	})
	must.Do(t, agent.Terminate(t.Context(), stepTimeout))
}

// A SIGHUP while the agent starts does not end it. It reads its configuration once more after the start. The file is a
// named pipe, which shows when it is read.
func TestHangupBeforeTheStart(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	h := labtest.Host(t, labtest.New(t), "lb")
	file := filepath.Join(t.TempDir(), "steelyard.toml")
	must.Do(t, syscall.Mkfifo(file, 0o600))
	p := must.Get(h.Start(lab.Command{Path: self, Args: []string{"run", "-c", file}}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the agent:\n%s", p.Log.FailureTail(60))
		}
	})
	text := lab.AgentConfig{Name: "lb1", Address: ip("192.0.2.1"), Interfaces: []string{"lo"}, Mode: "tc"}.TOML()
	for _, logged := range []string{"agent started", "configuration reloaded"} {
		labtest.Until(t, "the agent reads its file", func() error {
			if !p.Running() {
				return lab.Permanent(fmt.Errorf("it exited: %w", p.Wait(t.Context())))
			}
			f, err := os.OpenFile(file, os.O_WRONLY|syscall.O_NONBLOCK, 0) // ENXIO without a reader
			if err != nil {
				return err
			}
			defer f.Close()
			if logged == "agent started" {
				if err := p.Signal(syscall.SIGHUP); err != nil {
					return lab.Permanent(err)
				}
			}
			_, err = f.WriteString(text)
			return err
		})
		labtest.Until(t, logged, func() error {
			return labtest.ErrorIf(!p.Log.Contains(logged), "not yet")
		})
	}
}

// Without a default route and without interfaces in the file, the agent waits, says so, and starts when the route
// exists. A reload can also end the wait.
func TestWaitsForTheNetwork(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	l := labtest.New(t)
	h, peer := labtest.Host(t, l, "lb"), labtest.Host(t, l, "peer")
	must.Do(t, l.Link(lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}},
		lab.End{Host: peer, Name: "eth0"}, lab.LinkOptions{}))
	cfg := lab.AgentConfig{Name: "lb1", Mode: "tc"}
	agent, err := lab.StartAgent(h, lab.AgentOptions{Binary: self, Config: cfg.TOML()}) // it will not be ready
	must.Do(t, err)
	waits := func(i admin.Info) bool {
		return i.Verdict == admin.Down && strings.Contains(i.Reasons[0], "waiting for the network: find the uplink")
	}
	works := func(i admin.Info) bool {
		return i.Verdict == admin.OK && i.Settled && len(i.Interfaces) == 1 && i.Interfaces[0].Name == "eth0" &&
			!strings.Contains(strings.Join(i.Warnings, "\n"), "find the uplink")
	}
	waitStatus(t, agent, "it waits", waits)
	must.Do(t, h.Do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: ip("192.0.2.254").AsSlice()}) }))
	waitStatus(t, agent, "it works with the route", works)
	must.Do(t, agent.Terminate(t.Context(), stepTimeout))
	must.Do(t, h.Do(func() error { return netlink.RouteDel(&netlink.Route{Gw: ip("192.0.2.254").AsSlice()}) }))
	must.Do(t, agent.Start())
	waitStatus(t, agent, "it waits again", waits)
	cfg.Interfaces = []string{"eth0"}
	must.Do(t, agent.Configure(cfg.TOML()))
	must.Do(t, agent.Reload())
	waitStatus(t, agent, "it works with the interface of the file", works)
	must.Do(t, agent.Terminate(t.Context(), stepTimeout))
}

// An agent refuses a configuration that it cannot apply before it changes anything, and names every problem.
func TestMainRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"not valid", "[nonsense]\n[rubbish]\n", []string{"nonsense: no such section", "rubbish: no such section"}},
		{"no kubeconfig", "[datapath]\ninterfaces = [\"lo\"]\n[kubernetes]\nkubeconfig = \"/no/such\"\n",
			[]string{":4: kubernetes.kubeconfig: ", "/no/such: no such file or directory"}},
		{"no pod", "[datapath]\ninterfaces = [\"lo\"]\n[kubernetes]\n", []string{":3: kubernetes.kubeconfig: missing"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			path := writeConfig(t, "", tt.text)
			err := Main(t.Context(), path, "v", &log)
			for _, want := range tt.want {
				must.True(t, err != nil && strings.Contains(err.Error(), want), "Main: %v; want %q", err, want)
			}
			_, checked := Check(path, false)
			must.True(t, checked != nil && checked.Error() == err.Error(), "Check: %v; want the same", checked)
			_, direct := New(Options{ConfigFile: path, Log: discard})
			must.True(t, direct != nil && direct.Error() == err.Error(), "New: %v; want the same", direct)
		})
	}
}

func TestLogger(t *testing.T) {
	for format, want := range map[string]string{"json": `"level":"WARN","msg":"m"}`, "text": "level=WARN msg=m"} {
		var out bytes.Buffer
		level := new(slog.LevelVar)
		log, queue := openLog(&out, config.Log{Level: slog.LevelWarn, Format: format}, level)
		log.Info("hidden")
		log.Warn("m")
		queue.Flush()
		got := out.String()
		must.True(t, strings.Count(got, "\n") == 1 && strings.Contains(got, want), "%s: %s", format, got)
		level.Set(slog.LevelInfo)
		log.Info("shown")
		queue.Flush()
		must.True(t, strings.Contains(out.String(), "shown"), "%s: the level does not follow", format)
		level.Set(slog.LevelDebug)
		stdlog.Print("of net/http")
		queue.Flush()
		if got := out.String(); !strings.Contains(got, "DEBUG") || !strings.Contains(got, "of net/http") {
			t.Errorf("%s: %s; want the line of net/http", format, got)
		}
	}
}

// New returns the error of the datapath, which validates its options before it changes anything.
func TestNewReturnsTheErrorOfTheDatapath(t *testing.T) {
	cfg := parse(t, "[datapath]\ninterfaces = [\"lo\"]\n")
	cfg.Datapath.MaxFlows = 0
	a, err := New(Options{Config: cfg, Log: discard, PinPath: t.TempDir(), StateDir: t.TempDir()})
	must.True(t, a == nil && err != nil && strings.Contains(err.Error(), "max_flows is 0"),
		"agent %v, error %v", a, err)
}
