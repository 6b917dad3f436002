package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/systemd"
)

const webTOML = `
[l2]
[[service]]
name = "web"
address = "203.0.113.10"
ports = ["80:8080"]
backends = ["10.0.0.21"]
check = "none"
`

// writeConfig writes a configuration file and returns its path.
func writeConfig(t *testing.T, path, text string) string {
	t.Helper()
	if path == "" {
		path = filepath.Join(t.TempDir(), "steelyard.toml")
	}
	must.Do(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// sink records the names of the services of a source.
type sink struct {
	mu    sync.Mutex // guards names
	names map[string]bool
}

func (s *sink) Put(x *lb.Service)    { s.mu.Lock(); defer s.mu.Unlock(); s.names[x.Name] = true }
func (s *sink) Delete(name string)   { s.mu.Lock(); defer s.mu.Unlock(); delete(s.names, name) }
func (s *sink) Complete(string)      {}
func (s *sink) has(name string) bool { s.mu.Lock(); defer s.mu.Unlock(); return s.names[name] }

// newTestReloader returns a reloader of a file with webTOML, and its sink.
func newTestReloader(t *testing.T, level *slog.LevelVar, log *slog.Logger) (*reloader, *sink) {
	t.Helper()
	services, s := file.New(nil, nil), &sink{names: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { services.Run(ctx, s); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	o := Options{
		ConfigFile: writeConfig(t, "", webTOML), Config: parse(t, webTOML), Version: "v", Log: log, Level: level,
		KeepDir: t.TempDir(),
	}
	must.Do(t, services.Use(o.Config))
	return newReloader(o, services, newReadiness(systemd.New(discard))), s
}

// eventually fails the test when f stays false for stepTimeout.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(stepTimeout); !f(); time.Sleep(5 * time.Millisecond) {
		must.Need(t, !time.Now().After(deadline), "not within %s: %s", stepTimeout, what)
	}
}

// A change of [bgp] is applied, but its removal only at the next start.
func TestReloadConfiguresBGP(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	var asn []uint32
	l.configure = func(c *config.Config) error { asn = append(asn, c.BGP.ASN); return nil }
	for _, text := range []string{"[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.1\", asn = 64500 }]\n", ""} {
		writeConfig(t, l.file, text+webTOML)
		must.Get(l.reload(""))(t)
	}
	must.Row(t, "configured with", []uint32{64512}, asn)
}

func TestReloadApplies(t *testing.T) {
	var text bytes.Buffer
	level := new(slog.LevelVar)
	l, services := newTestReloader(t, level, slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: level})))
	start := l.state.Load()
	next := strings.Replace(webTOML, `"web"`, `"mail"`, 1) + "[log]\nlevel = \"debug\"\n[node]\nname = \"other\"\n"
	writeConfig(t, l.file, next)
	done := must.Get(l.reload(""))(t)
	must.True(t, done.Config == l.file && done.Loaded.After(start.at) &&
		slices.Equal(done.NeedRestart, []string{"node"}), "answer %+v", done)
	eventually(t, "mail instead of web", func() bool { return services.has("mail") && !services.has("web") })
	must.True(t, level.Level() == slog.LevelDebug, "level %s; want DEBUG", level)
	st := l.state.Load()
	must.True(t, st.refused == "" && st.at.Equal(done.Loaded), "state %+v", st)
	for _, want := range []string{
		`msg="configuration reloaded"`, `msg="changed section takes effect at the next start" section=node`,
	} {
		must.True(t, strings.Contains(text.String(), want), "the log has no %s:\n%s", want, &text)
	}
}

// A reload takes the services whose text has not changed from the running configuration.
func TestReloadKeepsUnchangedServices(t *testing.T) {
	t.Parallel()
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	for i := range 3 {
		before := l.loaded
		text := webTOML + fmt.Sprintf("[[service]]\nname = \"n%d\"\naddress = \"203.0.113.11\"\nports = [\"80\"]\n"+
			"backends = [\"10.0.0.22\"]\ncheck = \"none\"\n", i)
		writeConfig(t, l.file, text)
		must.Get(l.reload(""))(t)
		must.True(t, len(l.loaded.Services) == 2 &&
			&l.loaded.Services[0].Ports[0] == &before.Services[0].Ports[0], "reload %d decoded an unchanged service", i)
	}
}

// Tables in the kernel keep their size over a restart, and the answer and the status say so.
func TestReloadOfMaxFlows(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	for _, tt := range []struct {
		text string
		want bool
	}{{"[datapath]\nmax_flows = 99\n", true}, {"[datapath]\nmax_flows = 262144\n", false}} {
		writeConfig(t, l.file, webTOML+tt.text)
		done := must.Get(l.reload(""))(t)
		got, status := strings.Join(done.Warnings, "; "), strings.Join(l.state.Load().warnings, "; ")
		must.True(t, strings.Contains(got, sizeKept) == tt.want && status == got,
			"%s: warnings %q, in the status %q; want %q: %t", tt.text, got, status, sizeKept, tt.want)
	}
}

// A refused configuration changes nothing, and the state says why until one is accepted.
func TestReloadRefuses(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"not valid", strings.Replace(webTOML, "ports", "prots", 1), "prots"},
		{"every error", "[nonsense]\n[rubbish]\n", "rubbish: no such section"},
		{"no address left", "[l2]\n[[pool]]\nname=\"p\"\naddresses=[\"203.0.113.1/32\"]\n" +
			strings.ReplaceAll(strings.TrimPrefix(webTOML, "\n[l2]\n"), `address = "203.0.113.10"`, `pool = "p"`) +
			strings.NewReplacer(
				"\n[l2]\n", "", `address = "203.0.113.10"`, `pool = "p"`, `"web"`, `"two"`,
			).Replace(webTOML),
			`service "web"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			level := new(slog.LevelVar)
			l, services := newTestReloader(t, level, discard)
			eventually(t, "web", func() bool { return services.has("web") })
			start := l.state.Load()
			writeConfig(t, l.file, tt.text+"\n[log]\nlevel = \"debug\"\n")
			_, err := l.reload("")
			must.Need(t, err != nil && strings.Contains(err.Error(), tt.want), "error %v; want %q in it", err, tt.want)
			st := l.state.Load()
			same := st.at.Equal(start.at) && level.Level() == slog.LevelInfo && services.has("web")
			must.True(t, st.refused == err.Error() && same,
				"state %+v, level %s; want the configuration of the start in force", st, level)
			writeConfig(t, l.file, webTOML)
			must.Get(l.reload(""))(t)
			must.Row(t, "refused, after a valid file", "", l.state.Load().refused)
		})
	}
}

// An empty file, as an editor leaves it on a full disk, does not remove the services. A file with a comment does.
func TestReloadRefusesEmptyFile(t *testing.T) {
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	eventually(t, "web", func() bool { return services.has("web") })
	a := &Agent{reloader: l, restarts: make(chan struct{}, 1)}
	want := l.file + ": the file is empty; "
	for _, text := range []string{"", " \r\n\t\n", "\ufeff"} {
		writeConfig(t, l.file, text)
		_, err := l.reload("")
		must.True(t, err != nil && strings.HasPrefix(err.Error(), want) && l.state.Load().refused == err.Error(),
			"%q: error %v, state %+v", text, err, l.state.Load())
		if err := a.restart(); err == nil || len(a.restarts) > 0 { // for want, or because there is no default route
			t.Errorf("%q: restart: %v", text, err)
		}
	}
	must.True(t, services.has("web"), "the services are gone")
	writeConfig(t, l.file, "# none\n")
	must.Get(l.reload(""))(t)
	eventually(t, "no service", func() bool { return !services.has("web") })
	writeConfig(t, l.file, "")
	o := Options{
		ConfigFile: l.file, Config: parse(t, ""), Log: discard, Level: new(slog.LevelVar), KeepDir: t.TempDir(),
	}
	started := newReloader(o, file.New(nil, nil), newReadiness(systemd.New(discard)))
	_, err := started.reload("")
	must.True(t, err == nil, "an agent that started with an empty file: %v", err)
}

// Only sections that the agent reads only at startup need a restart.
func TestNeedRestart(t *testing.T) {
	base := "[kubernetes]\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/30\"]\n"
	bgp := "[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.254\", asn = 64500 }]\n"
	for _, tt := range []struct {
		name, from, to string
		want           []string
	}{
		{"nothing", base + bgp, base + bgp, nil},
		{"node", base, base + "[node]\nname = \"x\"\n", []string{"node"}},
		{"datapath", base, base + "[datapath]\nmax_flows = 99\n", []string{"datapath"}},
		{"bgp", base, base + bgp, []string{"bgp"}},
		{"bgp peer", base + bgp, base + strings.Replace(bgp, "64500", "64501", 1), nil},
		{"no bgp", base + bgp, base, []string{"bgp"}},
		{"l2", base, strings.Replace(base, "[l2]", "[l2]\ninterfaces = [\"eth9\"]", 1), []string{"l2"}},
		{"admin", base, base + "[admin]\nlisten = \"127.0.0.1:9\"\n", []string{"admin"}},
		{"admin access", base, base + "[admin]\nallow = [\"192.0.2.0/24\"]\n", nil},
		{"kubernetes", base, strings.Replace(base, "[kubernetes]", "[kubernetes]\nallocate = false", 1),
			[]string{"kubernetes"}},
		{"probe", base, base + "[probe]\nfall = 9\n", []string{"probe"}},
		{"pool of the cluster", base, strings.Replace(base, "/30", "/29", 1),
			[]string{"pool, for Services of the cluster"}},
		{"log, service", base, base + "[log]\nlevel = \"debug\"\n" +
			strings.NewReplacer("\n[l2]", "", "113.10", "113.1").Replace(webTOML), nil},
		{"pool without a cluster", strings.TrimPrefix(base, "[kubernetes]\n"),
			strings.TrimPrefix(strings.Replace(base, "/30", "/29", 1), "[kubernetes]\n"), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := needRestart(parse(t, tt.from), parse(t, tt.to))
			must.Equal(t, tt.want, got)
		})
	}
}

// A reload activates the cluster's pools, and a restart is needed only when none is left.
func TestPoolsAreReloaded(t *testing.T) {
	base := "[kubernetes]\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/30\"]\n"
	for _, tt := range []struct {
		name, from, to string
		want           string // the pools that are set, and what needs a restart
	}{
		{"equal", base, base, "[] []"},
		{"larger", base, strings.Replace(base, "/30", "/29", 1), "[{203.0.113.0 203.0.113.7}] []"},
		{"none before", "[kubernetes]\n[l2]\n", base, "[{203.0.113.0 203.0.113.3}] []"},
		{"none left", base, "[kubernetes]\n[l2]\n", "[] [pool, for Services of the cluster]"},
	} {
		var set []lb.AddrRange
		l := &reloader{running: parse(t, tt.from), setPools: func(pools []kube.Pool) { set = pools[0].Ranges }}
		next := parse(t, tt.to)
		must.Row(t, tt.name, nil, l.usePools(next))
		must.Row(t, tt.name, tt.want, fmt.Sprint(set, " ", needRestart(l.running, next)))
	}
}

// notifications returns the receiving end of systemd's notification socket, line by line.
func notifications(t *testing.T) <-chan string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c := must.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	lines := make(chan string, 100)
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			line, _, _ := strings.Cut(string(b[:n]), "\n")
			lines <- line
		}
	}()
	return lines
}

// next fails the test unless these are the next notifications.
func next(t *testing.T, lines <-chan string, want ...string) {
	t.Helper()
	for _, w := range want {
		select {
		case got := <-lines:
			if got != w {
				t.Errorf("systemd received %s; want %s", got, w)
			}
		case <-time.After(stepTimeout):
			t.Fatalf("systemd received nothing within %s; want %s", stepTimeout, w)
		}
	}
}

// A reload before the start is complete sends nothing, because READY=1 would end the start.
func TestReadiness(t *testing.T) {
	lines := notifications(t)
	r := newReadiness(systemd.New(discard))
	calls := 0
	r.reloading(func() { calls++ })
	r.set()
	next(t, lines, "READY=1")
	r.reloading(func() { calls++; next(t, lines, "RELOADING=1") })
	next(t, lines, "READY=1")
	must.Row(t, "reloads", 2, calls)
}

func TestCompleteOptions(t *testing.T) {
	path := writeConfig(t, "", webTOML)
	o, err := Options{ConfigFile: path, Log: discard}.complete()
	must.True(t, err == nil && len(o.Config.Services) == 1 && o.Level != nil, "%+v, %v", o, err)
	must.True(t, o.PinPath == "/sys/fs/bpf/steelyard" && o.StateDir == "/run/steelyard",
		"pin path %s, state directory %s", o.PinPath, o.StateDir)
	o, err = Options{Config: &config.Config{}, PinPath: "/p", StateDir: "/s", Log: discard}.complete()
	must.True(t, err == nil && o.PinPath == "/p" && o.StateDir == "/s", "%+v, %v", o, err)
}

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
		must.True(t, want.Service == "web" && want.State == lb.FlowEstablished, "asked for the flows %+v", want)
		return make([]lb.FlowStatus, 41), false, nil
	}
	text := bgpTOML + strings.Replace(webTOML, "web", "mail", 1) + "[log]\nlevel = \"warn\"\n"
	want := []string{
		"+ [bgp]", "~ [log]", "+ peer 192.0.2.1", "+ pool p", "+ service mail: 203.0.113.10; 80/tcp; 1 backend",
		"- service web: 203.0.113.10; 80/tcp; 1 backend; ends 41 connections",
	}
	then, err := l.diff(l.file, []byte(text))
	if got := lines(then.Changes); err != nil || !slices.Equal(got, want) || !then.Loaded.IsZero() {
		t.Errorf("diff of the text: %v, %q; want %q", err, got, want)
	}
	must.Equal(t, []string{"bgp"}, then.NeedRestart)
	if then, err := l.diff("", nil); err != nil || len(then.Changes) > 0 || !services.has("web") {
		t.Errorf("diff of the file: %v, %q; want nothing", err, lines(then.Changes))
	}
	writeConfig(t, l.file, text)
	done, err := l.reload("")
	got := lines(done.Changes)
	must.True(t, err == nil && slices.Equal(got, want), "reload: %v, %q; want %q", err, got, want)
	then, err = l.diff("", nil)
	must.True(t, err == nil && len(then.Changes) == 0, "diff after the reload: %v, %q", err, lines(then.Changes))
	then, err = l.diff("/x.toml", []byte("[nodes]"))
	must.True(t, err != nil, "a bad text has the difference %q", lines(then.Changes))
}

// A reload that is refused after its plan was made changes no service.
func TestRefusedReloadChangesNoService(t *testing.T) {
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	eventually(t, "web", func() bool { return services.has("web") })
	l.setMembers = func(_, _ *config.Config) error { return errors.New("no") }
	writeConfig(t, l.file, strings.Replace(webTOML, "web", "mail", 1))
	_, err := l.reload("")
	must.Need(t, err != nil, "the reload is not refused")
	if then, err := l.diff("", nil); err != nil || len(then.Changes) != 2 || !services.has("web") {
		t.Errorf("diff: %v, %q; want mail to replace web", err, lines(then.Changes))
	}
}
