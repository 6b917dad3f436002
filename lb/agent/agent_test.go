package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The defaults of config and datapath agree.
func TestDefaultsAgree(t *testing.T) {
	must.Equal(t, datapath.DefaultTimeouts, datapath.Timeouts(config.Default().Datapath.Timeouts))
}

// An agent in a cluster follows a mounted configuration.
func TestMountedConfigurationIsATask(t *testing.T) {
	text := fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n", apiServer(t, keysInCluster(keysOf(7, "A"))))
	for _, mounted := range []string{"", "..1"} {
		a, _, err := newInMemory(t, text, func(o *Options) { o.mounted = mounted })
		must.Do(t, err)
		t.Cleanup(a.close)
		follows := slices.ContainsFunc(a.tasks, func(x task) bool { return x.name == "mounted configuration" })
		must.True(t, follows == (mounted != ""), "mounted %q: followed: %t", mounted, follows)
	}
}

// refusing is an announcer whose neighbours accept no route, for this reason.
type refusing string

func (refusing) Set(context.Context, []lb.Announcement) error { return nil }
func (refusing) Carried(netip.Addr) bool                      { return false }
func (r refusing) NotAccepted(netip.Addr) string              { return string(r) }

// The reason of a route that nobody receives names what the neighbours do not accept, if that is known.
func TestNotReceived(t *testing.T) {
	for text, want := range map[refusing]string{
		"":                   "no BGP peer has it: no session that carries it is established",
		"192.0.2.1: no IPv6": "no BGP peer has it: 192.0.2.1: no IPv6",
	} {
		r := lb.RouteStatus{Address: netip.MustParseAddr("2001:db8::10")}
		must.Equal(t, want, notReceived(r, map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: text}))
	}
}

// Memory is released when the datapath has all services, not before, and again when they are stored.
func TestMemoryIsReleasedAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, took := time.Now(), 20*time.Second
		behind := func() time.Time {
			if time.Since(start) < took {
				return start
			}
			return time.Time{}
		}
		var released []time.Duration
		releaseAfterStart(t.Context(), behind, func() { released = append(released, time.Since(start)) })
		must.Equal(t, []time.Duration{took, took + storeDelay}, released)
	})
}

// reader is the reader of a log that can stop reading, read again, and end.
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
	labtest.Until(t, "the log says what it lacks", func() error {
		log.mu.Lock()
		defer log.mu.Unlock()
		if !strings.Contains(log.text.String(), " lines of the log were lost") {
			return errors.New("no line about lost lines")
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
	if err == nil || !strings.Contains(err.Error(), errEnded.Error()) { // the lab's error after an exit status of 0
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

// mount writes a configuration as the kubelet writes a ConfigMap: into a new directory, to which the link ..data is
// switched.
func mount(t *testing.T, dir, version, text string) string {
	t.Helper()
	link, file := filepath.Join(dir, "..data"), filepath.Join(dir, "steelyard.toml")
	err := os.Mkdir(filepath.Join(dir, version), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, version, "steelyard.toml"), []byte(text), 0o600)
	}
	if err == nil {
		err = os.Symlink(version, link+"_tmp")
	}
	if err == nil {
		err = os.Rename(link+"_tmp", link)
	}
	if _, missing := os.Lstat(file); err == nil && missing != nil {
		err = os.Symlink("..data/steelyard.toml", file)
	}
	must.Do(t, err)
	return file
}

// A changed ConfigMap takes effect without a restart. An invalid one changes nothing, and an Event on the pod says why.
func TestMountedConfigurationIsFollowed(t *testing.T) {
	t.Parallel()
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	dir := t.TempDir()
	must.Equal(t, "", mountedVersion(l.file)) // other files are read only on request
	l.file = mount(t, dir, "..1", webTOML)
	client := fake.NewClientset()
	m := &mounted{l.file, mountedVersion(l.file), l.follow, kube.Self{
		Client: client, Node: "n1", Namespace: "ns", Pod: "steelyard-x", UID: "uid-1",
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	events := func() (all []string) {
		list := must.Get(client.CoreV1().Events("ns").List(t.Context(), meta.ListOptions{}))(t)
		for _, e := range list.Items {
			on := e.InvolvedObject
			all = append(all, fmt.Sprintf("%s %s on %s %s/%s %s: %s", e.Type, e.Reason, on.Kind, on.Namespace, on.Name,
				on.UID, e.Message))
		}
		return all
	}
	has := func(prefix, text string) func() bool {
		return func() bool {
			return slices.ContainsFunc(events(), func(e string) bool {
				return strings.HasPrefix(e, prefix+" on Pod ns/steelyard-x uid-1: ") && strings.Contains(e, text)
			})
		}
	}
	mount(t, dir, "..2", strings.Replace(webTOML, `"web"`, `"mail"`, 1))
	eventually(t, "mail instead of web", func() bool { return services.has("mail") && !services.has("web") })
	eventually(t, "an Event", has(core.EventTypeNormal+" ConfigurationReloaded", l.file))
	mount(t, dir, "..3", strings.Replace(webTOML, "ports", "prots", 1))
	eventually(t, "an Event with the error", has(core.EventTypeWarning+" ConfigurationRejected", "prots"))
	must.True(t, services.has("mail"), "the service of the configuration before is not in force")
	mount(t, dir, "..4", webTOML+"[node]\nname = \"other\"\n")
	eventually(t, "an Event with the section", has(core.EventTypeWarning+" ConfigurationNeedsRestart", "(node)"))
	eventually(t, "web again", func() bool { return services.has("web") })
}

// In the pod of an allocator, status says who assigns addresses, and whether the API server answers.
func TestAllocatorHasStatus(t *testing.T) {
	const leases = "/apis/coordination.k8s.io/v1/namespaces/steelyard/leases"
	lease := coordination.Lease{TypeMeta: meta.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}}
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds = new("other"), new(int32(3600))
	gone := httptest.NewServer(nil)
	gone.Close()
	api := apiServer(t, map[string]any{leases: nil, leases + "/steelyard": lease})
	for kubeconfig, want := range map[string]string{api: "OK other", kubeconfigOf(t, gone.URL): "DEGRADED "} {
		socket := filepath.Join(t.TempDir(), "s")
		t.Setenv("STEELYARD_SOCKET", socket)
		file := writeConfig(t, "", fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n", kubeconfig))
		c := admin.NewClient(socket)
		stop := must.Run(t, func(ctx context.Context) error { return Allocate(ctx, file, "v", io.Discard) })
		eventually(t, want, func() bool {
			var i admin.Info
			err := c.Get(t.Context(), "/v1/status", &i)
			return err == nil && i.Cluster.Away.IsZero() == (i.Verdict == admin.OK) && i.Allocator.Name != "" &&
				fmt.Sprintf("%s %s", i.Verdict, i.Cluster.Leader) == want
		})
		must.Fail(t, c.Get(t.Context(), "/v1/services", new(any)), "this is an allocator")
		stop()
	}
}
