package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// With --check the exit code is the verdict's, even with --ready, and an agent that is not ready fails.
func TestStatusCheckAndReady(t *testing.T) {
	down := []lb.RouteStatus{{Address: addr("203.0.113.10"), Reason: "no backend"}}
	up := []lb.PeerStatus{{Peer: addr("192.0.2.1"), State: "established"}}
	lost := []lb.PeerStatus{{Peer: addr("192.0.2.1"), State: "active"}}
	for _, tt := range []struct {
		name  string
		st    lb.Status
		peers []lb.PeerStatus
		code  int
		err   string
	}{
		{"OK and ready", lb.Status{Settled: true}, up, 0, ""},
		{"ready, but down", lb.Status{Settled: true, Routes: down}, up, 2, ""},
		{"not ready", lb.Status{}, up, 1, "steelyard: not ready: the first health checks"},
		{"down and not ready", lb.Status{Settled: true, Routes: down}, lost, 2,
			"steelyard: not ready: 0 of 1 BGP sessions"},
	} {
		socket := serve(t, tt.st, func(o *admin.Options) { o.Peers = func() []lb.PeerStatus { return tt.peers } })
		for _, args := range [][]string{{"--check", "--ready"}, {"--ready", "--check"}} {
			code, _, errOut := steelyard(t, append([]string{"status", "--socket", socket}, args...)...)
			must.True(t, code == tt.code && strings.HasPrefix(errOut, tt.err) && (tt.err == "") == (errOut == ""),
				"%s: code %d, stderr %q; want %d, %q", tt.name, code, errOut, tt.code, tt.err)
		}
	}
}

// Without an agent, the table is the verdict alone.
func TestStatusWithoutAgent(t *testing.T) {
	for _, tt := range []struct {
		args, out string
		code      int
	}{
		{"", "DOWN: no agent listens on /nowhere.sock; ", 1},
		{"--check", "DOWN: no agent listens on /nowhere.sock; ", 2},
		{"--check --ready", "DOWN: no agent listens on /nowhere.sock; ", 2},
		{"--ready", "DOWN: no agent listens on /nowhere.sock; ", 1},
		{"-o json", "", 1}, {"-o json --check", "", 2}, {"-o yaml", "", 2},
	} {
		code, out, errOut := steelyard(t, append([]string{"status", "--socket", "/nowhere.sock"},
			strings.Fields(tt.args)...)...)
		if code != tt.code || !strings.HasPrefix(out, tt.out) || strings.Count(out, "\n") != min(len(tt.out), 1) ||
			errOut == "" || tt.args != "-o yaml" && !strings.Contains(errOut, "no agent listens on /nowhere.sock") {
			t.Errorf("status %s without an agent: code %d, stderr %q, stdout %q", tt.args, code, errOut, out)
		}
	}
}

// Each finding is in the table once, with its remedy: the first in the first line, then reasons, then warnings.
func TestStatusShowsFindings(t *testing.T) {
	const text = `{"verdict":"DEGRADED","reasons":["first","second"],"warnings":["of the file"],"findings":[` +
		`{"severity":"degraded","text":"first","remedy":"do this"},{"severity":"degraded","text":"second"},` +
		`{"severity":"warning","text":"of the file","remedy":"do that"}]}`
	var out strings.Builder
	must.Do(t, statusTable(&out, []byte(text)))
	rest := out.String()
	for _, want := range []string{"DEGRADED: first\n", "-> do this\n", "also      second\n", "warning   of the file\n",
		"-> do that\n"} {
		before, after, found := strings.Cut(rest, want)
		must.True(t, found && !strings.Contains(after, want) && !strings.Contains(before, "second"),
			"%q is not there, not once or not in order:\n%s", want, out.String())
		rest = after
	}
}

// services and backends list those of one service, or only those that are not healthy, in both formats.
func TestFilters(t *testing.T) {
	status := lb.Status{Settled: true}
	for _, state := range []lb.State{lb.StateHealthy, lb.StateUnhealthy, lb.StateDraining} {
		b := lb.BackendStatus{Service: "web", Address: addr("10.0.0.21"), State: state}
		if state == lb.StateDraining {
			b.Service = "default/mail"
		}
		status.Backends = append(status.Backends, b)
		status.Services = append(status.Services, lb.ServiceStatus{
			Service: b.Service, Address: addr("203.0.113.10"), Protocol: lb.TCP, State: state,
			Policy: lb.PolicyCluster, Forward: lb.MethodNAT, Algorithm: lb.AlgorithmMaglev,
		})
	}
	socket := serve(t, status)
	for _, tt := range []struct {
		args string
		rows int
		err  string
	}{
		{"", 3, ""}, {"web", 2, ""}, {"--service web", 2, ""}, {"--unhealthy", 2, ""}, {"--unhealthy web", 1, ""},
		{"--service default/mail", 1, ""}, {"mail", 0, `there is no service "mail"; did you mean "default/mail"?`},
		{"--service nothing", 0, `there is no service "nothing"`}, {"web mail", 0, "takes 1 argument, got 2"},
	} {
		for _, command := range []string{"services", "backends"} {
			args := append([]string{command, "--socket", socket}, strings.Fields(tt.args)...)
			code, out, errOut := steelyard(t, args...)
			must.True(t, (code == 0) == (tt.err == "") && strings.Contains(errOut, tt.err) &&
				(code != 0 || strings.Count(out, "\n") == 1+tt.rows), "%v: code %d\n%s%s", args, code, out, errOut)
			_, out, _ = steelyard(t, slices.Insert(args, 1, "-o", "json")...)
			var rows []any
			must.True(t, code != 0 || json.Unmarshal([]byte(out), &rows) == nil && len(rows) == tt.rows,
				"%v: %s", args, out)
		}
	}
	_, out, _ := steelyard(t, "backends", "--unhealthy", "-o", "json", "--socket", serve(t, lb.Status{}))
	must.Equal(t, "[]\n", out)
}

func TestFigures(t *testing.T) {
	for x, want := range map[float64]string{
		0: "0", 0.04: "0", 0.06: "0.1", 9.96: "10", 999.4: "999", 999.6: "1.0k", 12345: "12k", 1.26e6: "1.3M",
		4e13: "40T", 4e16: "40000T",
	} {
		must.Row(t, x, want, short(x))
	}
	for x, want := range map[float64]string{0: "-", 0.00043: "430µs", 0.0123456: "12ms", 3.0021: "3.002s"} {
		must.Row(t, x, want, seconds(x))
	}
}

// An agent that assigns no addresses does not know who does, and says nothing about it. Drained services do not count
// as services that should be healthy.
func TestStatusLines(t *testing.T) {
	for text, want := range map[string]string{
		`{"cluster":{"leader":"n1"}}`: "cluster connected, addresses are assigned by n1\n",
		`{"cluster":{}}`:              "cluster connected\n",
		`{"services":3,"services_healthy":2,"services_drained":1}`: "2 of 2 frontends can be announced, 1 drained\n",
		`{"services":3,"services_healthy":2}`:                      "2 of 3 frontends can be announced\n",
		`{"allocator":{"name":"a-1"}}`:                             "this is a-1, which only assigns addresses; ",
	} {
		var out strings.Builder
		err := statusTable(&out, []byte(text))
		must.True(t, err == nil && strings.Contains(spaces.ReplaceAllString(out.String(), " "), want),
			"%s: %v\n%s", text, err, out.String())
	}
}

var spaces = regexp.MustCompile(" +")

// services --inside shows what becomes of connections of the node and its pods, and from outside.
func TestServicesInside(t *testing.T) {
	at := netip.MustParseAddrPort
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Rules = func() []lb.NodeRule {
			return []lb.NodeRule{
				{Name: "default/web:http", Addr: addr("10.96.0.1"), Port: 80, Protocol: lb.TCP,
					Inside: lb.NodeChoice{Endpoints: []netip.AddrPort{at("10.244.0.1:8080"), at("10.244.1.1:8080")}}},
				{Name: "default/web:http", Addr: addr("::"), Port: 30080, Protocol: lb.TCP,
					Outside: &lb.NodeChoice{Drop: true}, Allow: []netip.Prefix{netip.MustParsePrefix("fd00::/8")}},
			}
		}
	})
	code, out, errOut := steelyard(t, "services", "--inside", "--socket", socket)
	want := "SERVICE ADDRESS ENDPOINTS FROM OUTSIDE ALLOW\n" +
		"default/web:http 10.96.0.1:80/tcp 10.244.0.1:8080, 10.244.1.1:8080 - all\n" +
		"default/web:http [::]:30080/tcp refused dropped fd00::/8\n"
	must.True(t, code == 0 && spaces.ReplaceAllString(out, " ") == want, "%d %s\n%s\nwant\n%s", code, errOut, out, want)
}

// If there are no flows, an unknown service name is an error. An unknown backend address is not, because it is a
// filter.
func TestFlowsOfNothing(t *testing.T) {
	socket := serve(t, lb.Status{Settled: true, Services: []lb.ServiceStatus{{Service: "default/mail"}}})
	for _, tt := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"--service mail", 1, "", `there is no service "mail"; did you mean "default/mail"?`},
		{"--service default/mail", 0, "SERVICE  SCOPE  CLIENT", ""},
		{"--backend 10.0.0.99", 0, "SERVICE  SCOPE  CLIENT", ""},
		{"--address 203.0.113.99", 0, "SERVICE  SCOPE  CLIENT", ""},
	} {
		code, out, errOut := steelyard(t, append([]string{"flows", "--socket", socket}, strings.Fields(tt.args)...)...)
		must.True(t, code == tt.code && strings.HasPrefix(out, tt.out) && strings.Contains(errOut, tt.err) &&
			strings.Count(out, "\n") == min(len(tt.out), 1),
			"flows %s: code %d, stdout %q, stderr %q; want %+v", tt.args, code, out, errOut, tt)
	}
}

// Text from a server, a tenant or a peer reaches the terminal neither as control characters, including C1 ones (U+009B)
// in JSON, nor as a line of its own.
func TestOutputIsPrintable(t *testing.T) {
	const hostile = "\x1b[2J\u009b1A\n\r\x07OK"
	b := lb.BackendStatus{Service: "web", Address: addr("10.0.0.21"), State: lb.StateUnhealthy, Reason: hostile}
	vip := addr("2001:db8::1%\x1b[2J\u009b1A") // in a status that a tenant has written
	p := lb.PeerStatus{Peer: addr("192.0.2.1"), State: hostile, LastError: hostile, BFD: hostile}
	p.Errors = []lb.PeerError{{Text: hostile}}
	socket := serve(t, lb.Status{
		Settled: true, Backends: []lb.BackendStatus{b},
		Services: []lb.ServiceStatus{{
			Service: "web", Address: vip, Protocol: lb.TCP, Policy: lb.PolicyCluster, Forward: lb.MethodNAT,
			Algorithm: lb.AlgorithmMaglev, Backends: []lb.BackendStatus{b}, Reason: hostile,
		}},
		Routes: []lb.RouteStatus{{Address: vip, Services: []string{"web"}, Reason: hostile}},
	}, func(o *admin.Options) {
		o.Peers = func() []lb.PeerStatus { return []lb.PeerStatus{p} }
		o.Explain = func(q lb.Question) (lb.Explanation, error) {
			x := lb.Explanation{Client: q.Client, Address: vip, Fault: hostile, Steps: []string{hostile}}
			x.Protocol, x.Action = q.Protocol, hostile
			return x, nil
		}
	})
	commands := []string{
		"status", "services", "backends", "routes", "peers", "peers --peer 192.0.2.1", "explain 192.0.2.1 192.0.2.2:80",
	}
	for _, command := range commands {
		for _, format := range []string{"table", "json"} {
			args := strings.Fields(command)
			args = slices.Insert(args, 1, "-o", format, "--socket", socket)
			code, out, errOut := steelyard(t, args...)
			plain := strings.ReplaceAll(out+errOut, "\n", "")
			fails := strings.HasPrefix(command, "explain") // because of the fault
			must.True(t, (code != 0) == fails &&
				!strings.ContainsFunc(plain, func(r rune) bool { return !unicode.IsPrint(r) }),
				"%s -o %s: code %d, %q", command, format, code, out+errOut)
			must.True(t, !strings.Contains(out, "\nOK"),
				"%s -o %s: the text has a line of its own:\n%s", command, format, out)
		}
	}
	_, out, errOut := steelyard(t, "status", "--socket", "/\x1b[2J")
	must.True(t, strings.Contains(errOut, "/�[2J") && strings.Contains(out, "/�[2J"), "an error: %q, %q", errOut, out)
}

// Without an agent status says what still forwards.
func TestStatusSaysWhatStillForwards(t *testing.T) {
	for _, tt := range []struct {
		left string
		err  error
		want string
	}{
		{"forwarding for 203.0.113.10", nil, "kernel  forwarding for 203.0.113.10\n        -> start the agent"},
		{"", nil, ""},
		{"", errors.New("no permission"), "kernel  not known: no permission\n"},
	} {
		p := programs
		p.Left = func() (string, error) { return tt.left, tt.err }
		var out, errOut strings.Builder
		code := Main(t.Context(), []string{"status", "--check", "--socket", "/nowhere.sock"}, &out, &errOut, p)
		first, rest, _ := strings.Cut(out.String(), "\n")
		must.True(t, code == 2 && strings.HasPrefix(first, "DOWN: no agent listens on") &&
			strings.HasPrefix(rest, tt.want) && (rest == "") == (tt.want == ""),
			"code %d, stdout %q; want %q", code, &out, tt.want)
	}
}

// A flag of the cleanup of a cluster does not clean the node when --cluster was forgotten.
func TestCleanupNeedsCluster(t *testing.T) {
	for _, tt := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"--kubeconfig k", 2, "", "steelyard: --kubeconfig needs --cluster\n"},
		{"--kubeconfig=", 2, "", "steelyard: --kubeconfig needs --cluster\n"},
		{"--namespace steelyard", 2, "", "steelyard: --namespace needs --cluster\n"},
		{"--cluster --wait", 2, "", "steelyard: --wait cannot be combined with --cluster\n"},
		{"--cluster --namespace n", 0, "cleanup  n\n", ""},
	} {
		code, out, errOut := steelyard(t, append([]string{"cleanup"}, strings.Fields(tt.args)...)...)
		must.True(t, code == tt.code && out == tt.out && strings.HasPrefix(errOut, tt.err),
			"cleanup %s: code %d, stdout %q, stderr %q; want %+v", tt.args, code, out, errOut, tt)
	}
}

// Two commands have the flag --peer.
func TestPeerFlag(t *testing.T) {
	socket := serve(t, lb.Status{})
	for command, want := range map[string]string{
		"peers": "peer 192.0.2.1, AS 64500 state active for -, ended sessions: 0 reason connection refused",
		"routes": "PREFIX NEXT HOP AS PATH MED LOCAL PREF COMMUNITIES BANDWIDTH SINCE " +
			"203.0.113.10/32 192.0.2.2 64512 64512 0 - no-export,64512:1:2 3 Gbit/s -",
	} {
		for _, tt := range []struct {
			peer, want, problem string
			code                int
		}{
			{"192.0.2.1", want, "", 0},
			{"192.0.2.9", "", "there is no BGP peer 192.0.2.9", 1},
			{"router", "", "--peer router: want an address", 2},
		} {
			code, out, errOut := steelyard(t, command, "--peer", tt.peer, "--socket", socket)
			words := strings.Join(strings.Fields(out), " ")
			must.True(t, code == tt.code && words == tt.want && strings.Contains(errOut, tt.problem),
				"%s --peer %s: code %d, stderr %q, stdout:\n%s", command, tt.peer, code, errOut, out)
		}
	}
}

// The details of an established session, and of one without any optional value.
func TestDetailsOfASession(t *testing.T) {
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	p := lb.PeerStatus{
		Peer: addr("fe80::1%eth0"), ASN: 64500, State: "established", Routes: 3, Since: ago(90 * time.Minute), Flaps: 1,
		Received: 2, BFD: "up", Errors: []lb.PeerError{{At: ago(91 * time.Minute), Text: "bfd session down"}},
		Session: &lb.PeerSession{
			Local: addr("fe80::2%eth0"), LocalASN: 64512, RouterID: addr("192.0.2.1"), Hold: 9, Keepalive: 3,
			Families: []string{"ipv4", "ipv6"}, ExtendedNextHop: true, Restart: 30, LongLived: 3600,
			Sent:     lb.PeerMessages{Messages: 40, Updates: 4, Last: ago(2 * time.Second)},
			Received: lb.PeerMessages{Messages: 39, Updates: 1, Last: ago(time.Second)},
		},
	}
	const full = `peer         fe80::1%eth0, AS 64500
state        established for 1h30m, ended sessions: 1
router ID    192.0.2.1
this node    fe80::2%eth0, AS 64512
families     ipv4, ipv6; IPv6 next hops of IPv4 routes
hold time    9s, keepalive 3s
routes kept  30s with graceful restart, 1h0m0s with long-lived graceful restart
sent         40 messages, 4 updates, the last 2s ago; 3 routes
received     39 messages, 1 updates, the last 1s ago; 2 routes, discarded
bfd          up
error        1h31m ago: bfd session down
`
	s := *p.Session
	s.Families, s.ExtendedNextHop, s.Hold, s.Keepalive, s.Restart, s.LongLived = []string{"ipv4"}, false, 0, 0, 0, 0
	plain := p
	plain.Session, plain.BFD, plain.Errors = &s, "", nil
	for want, p := range map[string]lb.PeerStatus{
		full: p,
		strings.NewReplacer("ipv4, ipv6; IPv6 next hops of IPv4 routes", "ipv4",
			"9s, keepalive 3s", "none, keepalive none", "30s with", "not with", "1h0m0s with", "not with",
			"bfd          up\n", "", "error        1h31m ago: bfd session down\n", "").Replace(full): plain,
	} {
		answer := must.Get(json.Marshal([]lb.PeerStatus{p}))(t)
		var out strings.Builder
		err := peerDetails(&out, answer)
		must.True(t, err == nil && out.String() == want, "%v:\n%s\nwant:\n%s", err, out.String(), want)
	}
}

// firstLine ends a context with the first line that has this text.
type firstLine struct {
	strings.Builder
	text string
	end  func()
}

func (f *firstLine) Write(p []byte) (int, error) {
	if strings.Contains(string(p), f.text) {
		f.end()
	}
	return f.Builder.Write(p)
}

// events prints the history, follows it, and reads the files without an agent. The history has a drain, with its user.
func TestEvents(t *testing.T) {
	dir := t.TempDir()
	h := must.Get(events.Open(dir))(t)
	log := slog.New(h.Handler(slog.NewTextHandler(io.Discard, nil)))
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Events, o.Log = h.After, log.With("component", "admin")
	})
	log.Warn("backend unhealthy", "component", "health", "service", "web", "reason", "HTTP 503, want 200-399\x1b[2J")
	const line = `  warn   health      backend unhealthy  reason="HTTP 503, want 200-399�[2J"  service=web` + "\n"
	for _, args := range [][]string{nil, {"--since", "1h"}, {"--service", "web"}, {"--kind", "health"}} {
		code, out, errOut := steelyard(t, append([]string{"events", "--socket", socket}, args...)...)
		must.True(t, code == 0 && strings.HasSuffix(out, line) && strings.Count(out, "\n") == 1,
			"%v: %d %q %q", args, code, out, errOut)
	}
	_, dns, errOut := steelyard(t, "events", "--socket", socket, "--service", "dns")
	must.Row(t, "another service", "", dns+errOut)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	out := &firstLine{text: "asked to drain", end: end}
	go func() {
		var drained any
		admin.NewClient(socket).Post(ctx, "/v1/drain?service=web", &drained) // the result does not matter
	}()
	must.Equal(t, 0, Main(ctx, []string{"events", "--socket", socket, "-f"}, out, io.Discard, programs))
	got := out.String()
	must.True(t, strings.Contains(got, line) && strings.Contains(got, "service=web  user="), "-f: %q", got)
	must.Do(t, h.Flush())
	alone := programs
	alone.Events = func(f events.Filter) ([]events.Event, error) { return events.Read(dir, f) }
	var stored strings.Builder
	args := []string{"events", "--socket", "/nowhere.sock", "--kind", "health"}
	code := Main(t.Context(), args, &stored, io.Discard, alone)
	must.True(t, code == 0 && strings.HasSuffix(stored.String(), line),
		"without an agent: %d %q", code, stored.String())
}
