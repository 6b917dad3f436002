package agent

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The states of backends outlive the agent: after a restart, a failing probe does not decide alone.
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
		if got := state(ctx, c); got != "healthy" {
			t.Errorf("after the restart the backend is %s; want healthy", got)
		}
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
		if !ok || !got.At.Equal(want.At) || got.State != want.State || got.Reason != want.Reason ||
			got.Weight != want.Weight || got.Key != want.Key {
			t.Errorf("%+v, %t; want %+v", got, ok, want)
		}
	}
	if h, ok := v.health(failed); ok { // it may have recovered since
		t.Errorf("%+v is unhealthy from the start", h)
	}
	if _, ok := v.health(lb.CheckKey{Service: "web"}); ok {
		t.Error("a result of a check that had none")
	}

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
		if v := openVerdictStore(dir, discard, p); len(v.earlier) > 0 {
			t.Errorf("%s: results %v", name, v.earlier)
		}
	}

	// A folder that cannot be written is a problem in the status, until it can be.
	blocked := filepath.Join(dir, "file")
	must.Do(t, os.WriteFile(blocked, nil, 0o600))
	must.Do(t, openVerdictStore(blocked, discard, p).run(ended, list))
	got := lbtest.Texts(p.findings())
	if len(got) != 1 || !strings.Contains(got[0], "health check results not stored") {
		t.Errorf("problems %q", got)
	}
	if err := openVerdictStore(dir, discard, p).run(ended, list); err != nil || len(lbtest.Texts(p.findings())) > 0 {
		t.Errorf("problems %q, %v", lbtest.Texts(p.findings()), err)
	}
}
