package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The states of backends outlive the agent: after a restart, a single failed probe does not decide.
func TestVerdictsOutliveTheAgent(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	socket, dir := filepath.Join(t.TempDir(), "s"), t.TempDir()
	text := fmt.Sprintf("[admin]\nsocket = %q\n", socket) + fmt.Sprintf(`
[[service]]
name = "web"
address = "203.0.113.10"
ports = ["80:%d"]
backends = ["10.0.0.21"]
check = { type = "tcp", interval = "1h", fall = 3 }
`, netip.MustParseAddrPort(l.Addr().String()).Port())
	run := func(f func(ctx context.Context, c *admin.Client)) {
		t.Helper()
		a, _, err := newInMemory(t, text, func(o *Options) {
			o.StateDir, o.Config.Services[0].Backends[0].Addr = dir, netip.MustParseAddr("127.0.0.1")
		})
		must.Do(t, err)
		stop := must.Run(t, a.Run)
		f(t.Context(), admin.NewClient(socket))
		stop()
	}
	state := func(ctx context.Context, c *admin.Client) string {
		var b []lb.BackendStatus
		if c.Get(ctx, "/v1/backends", &b) != nil || len(b) != 1 {
			return ""
		}
		return b[0].State.String()
	}
	run(func(ctx context.Context, c *admin.Client) {
		eventually(t, "healthy", func() bool { return state(ctx, c) == "healthy" })
	})
	l.Close()
	run(func(ctx context.Context, c *admin.Client) {
		var i admin.Info
		eventually(t, "settled", func() bool { return c.Get(ctx, "/v1/status", &i) == nil && i.Settled })
		must.Row(t, "after the restart the backend is", "healthy", state(ctx, c))
	})
}

// verdictsOf implements verdicts.
type verdictsOf []lb.Health

func (v verdictsOf) Health() []lb.Health { return v }
func (v verdictsOf) Changes() uint64     { return 1 }

func TestVerdictStore(t *testing.T) {
	dir := t.TempDir()
	key := lb.CheckKey{Service: "web", Backend: netip.MustParseAddrPort("10.0.0.1:0")}
	withPort := key
	withPort.Port = lb.Port{Port: 443, Target: 8443, Protocol: lb.TCP}
	at := time.Now().Round(0)
	list := verdictsOf{
		{Key: key, State: lb.StateHealthy, Reason: "HTTP 200", Weight: 3, At: at},
		{Key: withPort, State: lb.StateHealthy, Reason: "connected", Weight: -1, At: at},
	}
	failed := lb.CheckKey{Service: "web", Backend: netip.MustParseAddrPort("10.0.0.2:0")}
	saved := append(list, lb.Health{Key: failed, State: lb.StateUnhealthy, Reason: "connection refused", At: at})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	p := newProblems(discard)
	must.Do(t, openVerdictStore(dir, discard, p).run(ended, saved))
	v := openVerdictStore(dir, discard, p)
	for _, want := range list {
		got, ok := v.health(want.Key)
		must.True(t, ok && got.At.Equal(want.At) && got.State == want.State && got.Reason == want.Reason &&
			got.Weight == want.Weight && got.Key == want.Key, "%+v, %t; want %+v", got, ok, want)
	}
	if h, ok := v.health(failed); ok { // it may have recovered since
		t.Errorf("%+v is unhealthy from the start", h)
	}
	_, ok := v.health(lb.CheckKey{Service: "web"})
	must.True(t, !ok, "a result of a check that had none")

	// An old, damaged or missing file has no results.
	old := savedVerdicts{Written: time.Now().Add(-verdictsMaxAge - time.Second)}
	old.Verdicts = []savedVerdict{{Service: key.Service, Backend: key.Backend, State: lb.StateHealthy}}
	for name, spoil := range map[string]func() error{
		"old":     func() error { return v.file.Save(old) },
		"damaged": func() error { return os.WriteFile(v.file.Path(), []byte("{"), 0o600) },
		"missing": func() error { return os.Remove(v.file.Path()) },
	} {
		if err := spoil(); err != nil && name != "missing" {
			t.Fatal(err)
		}
		v := openVerdictStore(dir, discard, p)
		must.True(t, len(v.earlier) == 0, "%s: results %v", name, v.earlier)
	}

	// A directory that cannot be written is a problem in the status, until it can be.
	blocked := filepath.Join(dir, "file")
	must.Do(t, os.WriteFile(blocked, nil, 0o600))
	must.Do(t, openVerdictStore(blocked, discard, p).run(ended, list))
	got := lbtest.Texts(p.findings())
	must.True(t, len(got) == 1 && strings.Contains(got[0], "health check results not stored"), "problems %q", got)
	err := openVerdictStore(dir, discard, p).run(ended, list)
	must.True(t, err == nil && len(lbtest.Texts(p.findings())) == 0, "problems %q, %v", lbtest.Texts(p.findings()), err)
}

// fakeEngine has one service, web.
type fakeEngine struct {
	drains []lb.Drains
	gone   bool // it no longer has the service
	err    error
}

func (e *fakeEngine) Status(context.Context) (lb.Status, error) {
	if e.gone {
		return lb.Status{}, e.err
	}
	return lb.Status{
		Services: []lb.ServiceStatus{{Service: "web"}},
		Backends: []lb.BackendStatus{{Service: "web", Address: netip.MustParseAddr("192.0.2.1"), Port: 8080},
			{Service: "web", Address: netip.MustParseAddr("192.0.2.3")}},
	}, e.err
}

func (e *fakeEngine) Drain(d lb.Drains) { e.drains = append(e.drains, d) }

func TestDrainStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state") // does not exist before the first drain
	e := new(fakeEngine)
	store, err := openDrainStore(dir, e, newProblems(discard))
	must.Need(t, err == nil && len(e.drains) == 0, "without a file: %v, engine %v", err, e.drains)
	for _, tt := range []struct {
		service string
		on      bool
		want    lb.Drains
	}{
		{"web", true, lb.Drains{Services: []string{"web"}}},
		{"", true, lb.Drains{Node: true, Services: []string{"web"}}},
		{"web", false, lb.Drains{Node: true, Services: []string{}}},
	} {
		got, err := store.set(t.Context(), lb.DrainTarget{Service: tt.service}, tt.on)
		d := cmp.Diff(tt.want, got)
		must.True(t, d == "" && err == nil, "%q %t: %v, -want +got:\n%s", tt.service, tt.on, err, d)
		must.Row(t, fmt.Sprintf("%q %t: the engine has", tt.service, tt.on), tt.want, e.drains[len(e.drains)-1])
		// A later agent starts with the same drains.
		next := new(fakeEngine)
		_, err = openDrainStore(dir, next, newProblems(discard))
		must.True(t, err == nil && len(next.drains) == 1 && cmp.Diff(tt.want, next.drains[0]) == "",
			"%q %t: a later agent: %v, %v", tt.service, tt.on, err, next.drains)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 || files[0].Name() != "drained.json" {
		t.Errorf("files: %v, %v; want drained.json alone", files, err)
	}
}

// A weight is stored like a drain. The weight of a server that is gone can be unset.
func TestWeightIsStored(t *testing.T) {
	dir, e := t.TempDir(), new(fakeEngine)
	store := must.Get(openDrainStore(dir, e, newProblems(discard)))(t)
	server := lb.DrainTarget{Service: "web", Address: netip.MustParseAddr("192.0.2.1")}
	other := lb.DrainTarget{Service: "web", Address: netip.MustParseAddr("192.0.2.2")}
	_, err := store.setWeight(t.Context(), other, 3)
	must.Fail(t, err, "there is no backend 192.0.2.2 of web")
	must.Get(store.setWeight(t.Context(), server, 3))(t)
	next := new(fakeEngine)
	must.Get(openDrainStore(dir, next, newProblems(discard)))(t)
	must.Equal(t, []string{"3 for 192.0.2.1 of web"}, next.drains[0].WeightNames())
	e.gone = true
	now := must.Get(store.setWeight(t.Context(), server, -1))(t)
	must.True(t, len(now.Weights) == 0 && len(e.drains[len(e.drains)-1].Weights) == 0, "%+v, engine %+v", now, e.drains)
}

// A server is drained until its entry in the configuration changes. One that is gone can be undrained.
func TestServerIsDrained(t *testing.T) {
	dir, e := t.TempDir(), new(fakeEngine)
	store := must.Get(openDrainStore(dir, e, newProblems(discard)))(t)
	at := func(service, address string) lb.DrainTarget {
		return lb.DrainTarget{Service: service, Address: netip.MustParseAddr(address)}
	}
	for target, want := range map[lb.DrainTarget]string{
		at("web", "192.0.2.2"):        `there is no backend 192.0.2.2 of web; see "steelyard backends"`,
		at("default/web", "10.0.0.1"): "Kubernetes decides which pods get connections; name a server of a [[service]]",
	} {
		_, err := store.set(t.Context(), target, true)
		must.Row(t, target.String(), want, fmt.Sprint(err))
	}
	must.Get(store.set(t.Context(), at("web", "192.0.2.1"), true))(t)
	must.Get(store.set(t.Context(), at("web", "192.0.2.3"), true))(t)
	e.gone = true
	now := must.Get(store.set(t.Context(), at("web", "192.0.2.1"), false))(t)
	must.Equal(t, []string{"192.0.2.3 of web"}, now.Names())
	next := new(fakeEngine)
	must.Get(openDrainStore(dir, next, newProblems(discard)))(t)
	must.Equal(t, now.Names(), next.drains[0].Names())
	changes := []lb.Change{{Op: lb.Changed, Object: "backend 192.0.2.3 of web"}}
	must.Equal(t, "~ backend 192.0.2.3 of web: no longer drained by the operator", store.ended(changes)[0].String())
	must.Equal(t, now.Names(), store.now().Names())
	store.after(changes)
	must.Equal(t, 0, len(e.drains[len(e.drains)-1].Names()))
}

// A drain that is refused changes neither the file nor the engine.
func TestDrainStoreRefuses(t *testing.T) {
	dir := t.TempDir()
	e := new(fakeEngine)
	store := must.Get(openDrainStore(dir, e, newProblems(discard)))(t)
	refused := func(what, want string) {
		t.Helper()
		got, err := store.set(t.Context(), lb.DrainTarget{Service: strings.Fields(what)[0]}, true)
		changed := len(got.Services) > 0 || got.Node || len(e.drains) > 0
		must.True(t, err != nil && strings.HasPrefix(err.Error(), want) && !changed,
			"%s: %v, %v, engine %v; want error %s…", what, got, err, e.drains, want)
	}
	const noMail = `there is no service "mail"; see "steelyard services"`
	refused("mail", noMail)
	_, err := store.set(t.Context(), lb.DrainTarget{Service: "mail"}, false)
	must.True(t, err != nil && err.Error() == noMail, "undrained: %v; want %s", err, noMail)
	store.waiting = func() []lb.ServiceStatus { return []lb.ServiceStatus{{Service: "default/new"}} }
	refused("default/new", `service "default/new" has no address yet, so there is nothing to drain`)
	refused("new", `there is no service "new"; did you mean "default/new"?`)
	e.err = errors.New("no answer")
	refused("web", "no answer")
	e.err = nil
	files, err := os.ReadDir(dir)
	must.True(t, err == nil && len(files) == 0, "files: %v, %v; want none", files, err)
	// A drained service that was deleted since can be undrained.
	store.current = lb.Drains{Services: []string{"deleted"}}
	got, err := store.set(t.Context(), lb.DrainTarget{Service: "deleted"}, false)
	must.True(t, err == nil && len(got.Services) == 0, "%v, %v; want no drains", got, err)
}

// A drain that cannot be stored is active, is a problem in the status, and is stored once that is possible.
func TestDrainThatCannotBeStored(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "drained.json")
	e, p := new(fakeEngine), newProblems(discard)
	store := must.Get(openDrainStore(dir, e, p))(t)
	store.kept.interval = 5 * time.Millisecond
	go store.kept.run(t.Context())
	must.Do(t, os.Mkdir(path, 0o700))
	want := lb.Drains{Services: []string{"web"}}
	got, err := store.set(t.Context(), lb.DrainTarget{Service: "web"}, true)
	must.Need(t, err == nil && cmp.Diff(want, got) == "" && len(e.drains) == 1 && cmp.Diff(want, e.drains[0]) == "",
		"%v, %v, engine %v; want %v in force", got, err, e.drains, want)
	problem := []string{
		"drains not stored; a restart of the agent undoes the last change: write " + path + ": file exists",
	}
	must.Equal(t, problem, lbtest.Texts(p.findings()))
	_, err = openDrainStore(dir, e, p)
	must.Fail(t, err, "read the drains from "+dir)
	must.Do(t, os.Remove(path))
	eventually(t, "no problem", func() bool { return len(lbtest.Texts(p.findings())) == 0 })
	next := new(fakeEngine)
	_, err = openDrainStore(dir, next, p)
	must.True(t, err == nil && len(next.drains) == 1 && cmp.Diff(want, next.drains[0]) == "",
		"a later agent: %v, %v; want %v", err, next.drains, want)
}
