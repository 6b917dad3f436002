package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// reload succeeds only if the agent activates the file, and otherwise prints every error.
func TestReload(t *testing.T) {
	for _, tt := range []struct {
		name     string
		now      admin.Reloaded
		refused  error
		code     int
		out, err string
	}{
		{"in force", admin.Reloaded{Config: "/etc/x.toml"}, nil, 0, "reloaded: /etc/x.toml\n", ""},
		{"warnings", admin.Reloaded{Config: "/etc/x.toml", Warnings: []string{"w"}, NeedRestart: []string{"bgp"}},
			nil, 0, "reloaded: /etc/x.toml\n",
			"warning: w\nwarning: [bgp] has changed; the change takes effect at the next start\n"},
		{
			"changes", admin.Reloaded{Config: "/etc/x.toml", Changes: []lb.Change{
				{Op: lb.Removed, Object: "service web", Connections: 2},
				{Op: lb.Changed, Object: "pool \x1bp", Text: "x"},
			}}, nil, 0, "- service web; ends 2 connections\n~ pool \ufffdp: x\nreloaded: /etc/x.toml\n", "",
		},
		{"refused", admin.Reloaded{}, errors.New("x.toml:1: first\nx.toml:2: second"), 1, "",
			"x.toml:1: first\nx.toml:2: second\nrejected; the running configuration stays active\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			socket := serve(t, lb.Status{}, func(o *admin.Options) {
				o.Reload = func(string) (admin.Reloaded, error) { return tt.now, tt.refused }
			})
			code, out, errOut := steelyard(t, "reload", "--socket", socket)
			must.True(t, code == tt.code && out == tt.out && errOut == tt.err,
				"code %d, stdout %q, stderr %q; want %+v", code, out, errOut, tt)
			t.Setenv("STEELYARD_SOCKET", socket)
			code, out, _ = steelyard(t, "reload")
			must.True(t, code == tt.code && out == tt.out, "with STEELYARD_SOCKET: code %d, stdout %q", code, out)
		})
	}
}

// config show prints the file unchanged, including unprintable characters.
func TestConfigShow(t *testing.T) {
	const text = "# caf\u00e9 \u009b\n[log]\n\tlevel = \"info\"\n\n"
	socket := serve(t, lb.Status{}, func(o *admin.Options) { o.Text = func() string { return text } })
	code, out, errOut := steelyard(t, "config", "show", "--socket", socket)
	must.True(t, code == 0 && out == text, "code %d, stdout %q, stderr %q; want %q", code, out, errOut, text)
	code, _, errOut = steelyard(t, "config")
	must.True(t, code == 2 && strings.Contains(errOut, "steelyard config show"), "config: code %d, %s", code, errOut)
}

// diff prints what the agent's file would change, or a named file, which it sends to the agent.
func TestDiff(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	must.Do(t, os.WriteFile("x.toml", []byte("text"), 0o600))
	var sent string
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Diff = func(name string, text []byte) (admin.Reloaded, error) {
			sent = name + " " + string(text)
			if name == "" {
				return admin.Reloaded{NeedRestart: []string{"node"}}, nil
			}
			return admin.Reloaded{Config: name, Changes: []lb.Change{{Op: lb.Added, Object: "service web"}}}, nil
		}
	})
	for _, tt := range []struct {
		args           []string
		out, err, sent string
	}{
		{nil, "no difference\n", "warning: [node] has changed; the change takes effect at the next start\n", " "},
		{[]string{"x.toml"}, "+ service web\n", "", dir + "/x.toml text"},
		{[]string{"-o", "json", "x.toml"}, "{\n  \"config\": \"" + dir + "/x.toml\",\n  \"changes\": [\n    {\n" +
			"      \"op\": \"+\",\n      \"object\": \"service web\"\n    }\n  ]\n}\n", "", dir + "/x.toml text"},
	} {
		code, out, errOut := steelyard(t, append([]string{"diff", "--socket", socket}, tt.args...)...)
		must.True(t, code == 0 && out == tt.out && errOut == tt.err && sent == tt.sent,
			"%v: code %d, stdout %q, stderr %q, sent %q; want %+v", tt.args, code, out, errOut, sent, tt)
	}
	code, _, errOut := steelyard(t, "diff", "--socket", socket, "missing")
	must.True(t, code == 1 && strings.Contains(errOut, "missing: no such file"),
		"a missing file: code %d, %s", code, errOut)
}

// restart reports a configuration that would be rejected, and waits until the new agent is ready.
func TestRestart(t *testing.T) {
	var started atomic.Int64
	serve := func(restart func() error) string {
		socket := filepath.Join(t.TempDir(), "s")
		s := admin.New(admin.Options{
			Socket: socket, Restart: restart, Log: discard, Metrics: http.NotFoundHandler(),
			Status: func(context.Context) (lb.Status, error) { return lb.Status{Settled: started.Load() == 2}, nil },
			Peers:  func() []lb.PeerStatus { return nil },
			Info: func() admin.Info {
				return admin.Info{Version: fmt.Sprint("v", started.Load()), Started: time.Unix(started.Load(), 0)}
			},
		})
		l := must.Get(net.Listen("unix", socket))(t)
		h := &http.Server{Handler: s.Handler(true)}
		go h.Serve(l)
		t.Cleanup(func() { h.Close() })
		return socket
	}
	socket := serve(func() error { return errors.New("x.toml:1: first") })
	code, _, errOut := steelyard(t, "restart", "--socket", socket)
	must.True(t, code == 1 && errOut == "x.toml:1: first\nrejected; the running agent continues\n",
		"code %d, stderr %q", code, errOut)
	socket = serve(func() error {
		time.AfterFunc(150*time.Millisecond, func() { started.Store(1) })
		time.AfterFunc(300*time.Millisecond, func() { started.Store(2) })
		return nil
	})
	code, out, errOut := steelyard(t, "restart", "--socket", socket)
	must.True(t, code == 0 && out == "restarted: version v2\n", "code %d, stdout %q, stderr %q", code, out, errOut)
}

// An agent of the first release does not know the request.
func TestRestartOfAnEarlierRelease(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l := must.Get(net.Listen("unix", socket))(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"version": "v0.1"}`)
	})
	h := &http.Server{Handler: mux}
	go h.Serve(l)
	t.Cleanup(func() { h.Close() })
	code, _, errOut := steelyard(t, "restart", "--socket", socket)
	const want = "the running agent (v0.1) is from an earlier release that cannot replace itself: kill it"
	must.True(t, code == 1 && strings.Contains(errOut, want), "code %d, stderr %q; want %q", code, errOut, want)
}

// serve runs an API that answers with st, and returns its socket. change sets other options.
func serve(t *testing.T, st lb.Status, change ...func(*admin.Options)) string {
	socket := filepath.Join(t.TempDir(), "s")
	o := admin.Options{
		Socket:   socket,
		Status:   func(context.Context) (lb.Status, error) { return st, nil },
		StatusOf: func(context.Context, netip.Addr) (lb.Status, error) { return st, nil },
		Members: func() []lb.MemberStatus {
			at := netip.MustParseAddr("192.0.2.12")
			return []lb.MemberStatus{
				{Member: at, Name: "lb2", State: lb.MemberUp, Ahead: -61.25, Within: 0.002},
				{Member: at.Next(), Name: "lb3", State: lb.MemberUp, Ahead: 0.01, Within: 0.002},
				{Member: at.Next().Next(), Name: "192.0.2.14", State: lb.MemberDown},
			}
		},
		Peers: func() []lb.PeerStatus {
			p := lb.PeerStatus{Peer: addr("192.0.2.1"), ASN: 64500, State: "active", LastError: "connection refused"}
			return []lb.PeerStatus{p}
		},
		Sent: func(peer netip.Addr) ([]lb.SentRoute, bool) {
			med := uint32(0)
			return []lb.SentRoute{{
				Prefix: netip.MustParsePrefix("203.0.113.10/32"), NextHop: addr("192.0.2.2"),
				ASPath: []uint32{64512, 64512}, MED: &med, Communities: []string{"no-export"},
				LargeCommunities: []string{"64512:1:2"}, Bandwidth: 375e6,
			}}, peer == addr("192.0.2.1")
		},
		Drain: func(_ context.Context, what lb.DrainTarget, on bool) (lb.Drains, error) {
			return lb.Drains{}.With(what, on), nil
		},
		Explain: func(q lb.Question) (lb.Explanation, error) {
			return lb.Explanation{
				Client: q.Client, Address: q.To.Addr(), Port: q.To.Port(), Protocol: q.Protocol,
				Action: "drop", Reason: "no_backend", Steps: []string{"first", "then"},
			}, nil
		},
		Flows: func(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			f := lb.FlowStatus{
				Scope: lb.ScopeInside, Service: "web", Client: netip.MustParseAddrPort("198.51.100.11:40000"),
				Address: addr("203.0.113.10"), Port: 80, Protocol: lb.TCP,
				Backend: netip.MustParseAddrPort("10.0.0.21:8080"), Forward: lb.MethodNAT,
				State: lb.FlowEstablished, Idle: 2.5, Age: 62.5, Handshake: 0.00082,
				FromClient: lb.FlowFigures{Packets: 12, Bytes: 640, Retransmissions: 1},
				FromServer: lb.FlowFigures{Packets: 10, Bytes: 3e6},
			}
			if !want.Match(f) {
				return nil, false, nil
			}
			return []lb.FlowStatus{f}, want.Limit == 1, nil
		},
		Info: func() admin.Info { return admin.Info{Node: "lb1"} }, Metrics: http.NotFoundHandler(), Log: discard,
	}
	for _, f := range change {
		f(&o)
	}
	s := admin.New(o)
	l, err := net.Listen("unix", socket) // here, not in Server.Run: clients can connect from now on
	must.Do(t, err)
	server := &http.Server{Handler: s.Handler(true)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return socket
}
