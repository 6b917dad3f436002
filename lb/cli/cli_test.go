package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// steelyard runs a command and returns what a shell would see.
func steelyard(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e strings.Builder
	code = Main(t.Context(), args, &o, &e, programs)
	return code, o.String(), e.String()
}

// programs write their arguments; Run fails for /bad.toml.
var programs = Programs{
	Check: func(configFile string, _ bool) (*config.Config, error) { return config.Load(configFile) },
	Run: func(_ context.Context, configFile, version string, errOut io.Writer) error {
		fmt.Fprintln(errOut, "run", configFile, version)
		if configFile == "/bad.toml" {
			return errors.New("bad")
		}
		return nil
	},
	Demo: func(_ context.Context, out io.Writer) error { fmt.Fprintln(out, "demo"); return nil },
	DemoShell: func(_ context.Context, out io.Writer, incident string) error {
		fmt.Fprintln(out, "shell", incident)
		return nil
	},
	Incidents:  [][2]string{{"port-dead", "clients are refused"}, {"mtu", "uploads hang"}},
	DemoRouter: func(_ context.Context, errOut io.Writer) error { fmt.Fprintln(errOut, "demo-router"); return nil },
	Allocate: func(_ context.Context, file, version string, errOut io.Writer) error {
		fmt.Fprintln(errOut, "allocate", file)
		return nil
	},
	CleanupCluster: func(_ context.Context, kubeconfig, namespace string, out io.Writer) error {
		fmt.Fprintln(out, "cleanup", kubeconfig, namespace)
		return nil
	},
	Network: func(w io.Writer) error { _, err := fmt.Fprintln(w, "route"); return err },
	Events:  func(events.Filter) ([]events.Event, error) { return nil, nil },
	Remains: func() (bool, error) { return false, nil }, Left: func() (string, error) { return "", nil },
	Cleanup: func(errOut io.Writer, _ bool) error { fmt.Fprintln(errOut, "cleanup"); return nil },
}

func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "steelyard.toml")
	must.Do(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

const good = `
[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500 }]
[[service]]
name = "web"
address = "203.0.113.10"
ports = ["80:8080"]
backends = ["10.0.0.21"]
`

func TestExitCodes(t *testing.T) {
	file, bad := write(t, good), write(t, strings.Replace(good, "ports", "prots", 1))
	keys := write(t, "a key of the tunnels\nseed: that of the hashes\n")
	keyed := write(t, fmt.Sprintf("[datapath]\ntunnel_key_file = %q\n", keys)+good)
	for _, tt := range []struct {
		name     string
		args     []string
		code     int
		out, err string // parts that must occur; "" means that nothing is written
	}{
		{"version", []string{"version"}, 0, version + "\ncommit ", ""},
		{"version as a flag", []string{"--version"}, 0, version + "\ncommit ", ""},
		{"manual page", []string{"man"}, 0, ".SH explain\n", ""},
		{"help", []string{"help"}, 0, "announce addresses, balance their traffic", ""},
		{"no command", nil, 0, "announce addresses, balance their traffic", ""},
		{"unknown command", []string{"frobnicate"}, 2, "", `no command "frobnicate"`},
		{"nearly a command", []string{"statsu"}, 2, "", `no command "statsu". Did you mean "status"?`},
		{"unknown flag", []string{"check", "--fast"}, 2, "", "there is no flag -fast"},
		{"too many arguments", []string{"check", "x", "y"}, 2, "", "check takes 1 argument, got 2"},
		{"flag after argument", []string{"check", file, "-o", "json"}, 0, `"ok": true`, ""},
		{"switch after argument", []string{"check", file, "--elsewhere"}, 0, "ok: " + file, ""},
		{"unknown flag after argument", []string{"check", file, "--fast"}, 2, "", "there is no flag -fast"},
		{"flag without value", []string{"check", file, "-o"}, 2, "", "flag needs an argument: -o"},
		{"no flag after --", []string{"check", "--", file, "-o"}, 2, "", "check takes 1 argument, got 2"},
		{"flags of a subcommand", []string{"config", "show", "--socket", "/nowhere.sock"}, 1, "", "no agent listens"},
		{"check, good", []string{"check", "-c", file}, 0, "ok: " + file + ": 1 service, 0 pools, 1 BGP peer\n", ""},
		{"check, argument", []string{"check", file}, 0, "ok: " + file + ": 1 service, 0 pools, 1 BGP peer\n", ""},
		{"check, tunnel keys", []string{"check", keyed}, 0, "1 BGP peer, 1 tunnel key, a hash seed\n", ""},
		{"check, JSON", []string{"check", "-o", "json", file}, 0, `"ok": true`, ""},
		{"check, JSON of errors", []string{"check", "-o", "json", bad}, 1, `"line": 8,
      "key": "service[0].prots",`, ""},
		{"check, bad format", []string{"check", "-o", "table", file}, 2, "", "allowed: text, json"},
		{"check, bad", []string{"check", "-c", bad}, 1, "", `prots (service "web"): no such key; did you mean ports?`},
		{"check, no file", []string{"check", "-c", "/nowhere.toml"}, 1, "",
			"/nowhere.toml: cannot be read: no such file or directory"},
		{"reload, no agent", []string{"reload", "--socket", "/nowhere.sock"}, 1, "",
			"no agent listens on /nowhere.sock"},
		{"reload, argument", []string{"reload", "x"}, 2, "", "reload takes 0 arguments, got 1"},
		{"restart, argument", []string{"restart", "x"}, 2, "", "restart takes 0 arguments, got 1"},
		{"restart, no agent", []string{"restart", "--socket", "/nowhere.sock"}, 1, "",
			"no agent listens on /nowhere.sock"},
		{"manifest", []string{"manifest", "--image", "x:1"}, 0, "image: x:1\n", ""},
		{"manifest of the release", []string{"manifest"}, 0, "image: steelyard-lb/steelyard:" + version + "\n", ""},
		{"status, bad format", []string{"status", "-o", "xml"}, 2, "", "-o xml: unknown format; allowed: table, json"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out, errOut := steelyard(t, tt.args...)
			must.True(t, code == tt.code, "exit code %d; want %d (stderr: %s)", code, tt.code, errOut)
			for _, x := range []struct{ what, got, want string }{{"stdout", out, tt.out}, {"stderr", errOut, tt.err}} {
				must.True(t, (x.want == "") == (x.got == "") && strings.Contains(x.got, x.want),
					"%s is %q; want it to have %q", x.what, x.got, x.want)
			}
		})
	}
}

// check passes on whether the file is for another machine, and an error that is not about the file.
func TestCheckElsewhere(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{{[]string{"check", "/x.toml"}, "false"}, {[]string{"check", "--elsewhere", "/x.toml"}, "true"}} {
		p := programs
		p.Check = func(file string, elsewhere bool) (*config.Config, error) {
			return nil, fmt.Errorf("%s %t", file, elsewhere)
		}
		var out, errOut strings.Builder
		code := Main(t.Context(), tt.args, &out, &errOut, p)
		must.Row(t, tt.args, "steelyard: /x.toml "+tt.want+"\n", errOut.String())
		must.True(t, code == 1 && out.Len() == 0, "%v: code %d, stdout %q", tt.args, code, &out)
	}
}

func TestPrograms(t *testing.T) {
	for _, tt := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"run", 0, "", "run " + DefaultConfig + " " + version + "\n"},
		{"run -c /x.toml", 0, "", "run /x.toml " + version + "\n"},
		{"run -c /bad.toml", 1, "", "run /bad.toml " + version + "\nsteelyard: bad\n"},
		{"demo", 0, "demo\n", ""},
		{"demo --shell", 0, "shell \n", ""},
		{"demo --break mtu", 0, "shell mtu\n", ""},
		{"demo --break list", 0, "port-dead  clients are refused\nmtu        uploads hang\n", ""},
		{"demo --break x", 2, "port-dead  clients are refused\nmtu        uploads hang\n",
			"steelyard: there is no incident \"x\"\nSee \"steelyard help\".\n"},
		{"demo-router", 0, "", "demo-router\n"},
		{"cleanup --cluster --kubeconfig k", 0, "cleanup k steelyard\n", ""},
		{"allocate -c x.toml", 0, "", "allocate x.toml\n"},
		{"cleanup", 0, "Steelyard has been removed from the kernel\n", "cleanup\n"},
	} {
		code, out, errOut := steelyard(t, strings.Fields(tt.args)...)
		must.True(t, code == tt.code && out == tt.out && errOut == tt.err,
			"%s: code %d, stdout %q, stderr %q; want %+v", tt.args, code, out, errOut, tt)
	}
	_, out, _ := steelyard(t, "help")
	must.Equal(t, "one\ntwo\none", printableLines("one\none\ntwo\none"))
	must.True(t, !strings.Contains(out, "demo-router"), "users see the process of the demo:\n%s", out)
}

func TestTables(t *testing.T) {
	const down = "0 of 1 backends healthy, min_healthy is 1"
	b := lb.BackendStatus{
		Service: "web", Address: addr("10.0.0.21"), Port: 8080, Weight: 1, State: lb.StateUnhealthy,
		Reason: "connection refused", ProbeTimes: lb.ProbeTimes{Last: 0.003104, P95: 1.0501},
		Handshake95: 0.00079,
		Traffic:     lb.Traffic{PacketRate: 125},
	}
	socket := serve(t, lb.Status{
		Settled: true,
		Services: []lb.ServiceStatus{{
			Service: "web", Address: addr("203.0.113.10"), Port: 80, Protocol: lb.TCP, Policy: lb.PolicyCluster,
			Forward: lb.MethodNAT, Algorithm: lb.AlgorithmMaglev, Backends: []lb.BackendStatus{b},
			State: lb.StateUnhealthy, Reason: down, Traffic: lb.Traffic{FlowRate: 2.5, BitRate: 1.26e6},
		}},
		Backends: []lb.BackendStatus{b},
		Routes: []lb.RouteStatus{{Address: addr("203.0.113.10"), Services: []string{"web"}, Reason: down}, {
			Address: addr("203.0.113.11"), Services: []string{"mail"}, State: lb.RouteOffered, Reason: "no peer",
			By: []lb.AnnouncerKind{lb.AnnounceBGP, lb.AnnounceL2},
		}},
	})
	for command, want := range map[string]string{
		"services": "SERVICE  ADDRESS              FORWARD  ALGORITHM  HEALTHY  ANNOUNCED  " +
			"NEW/S  PACKETS/S  BITS/S  LAST PACKET  REASON\n" +
			"web      203.0.113.10:80/tcp  nat      maglev     0/1      no         " +
			"2.5    0          1.3M    -            " + down + "\n",
		"backends": "SERVICE  BACKEND         WEIGHT  STATE      SINCE  " +
			"NEW/S  PACKETS/S  BITS/S  LAST PACKET  PROBE  P95    HANDSHAKE  REASON\n" +
			"web      10.0.0.21:8080  1       unhealthy  -      " +
			"0      125        0       -            3.1ms  1.05s  790µs      connection refused\n",
		"routes": "ADDRESS       ANNOUNCED  BY      SINCE  SERVICES  REASON\n" +
			"203.0.113.10  no         -       -      web       0 of 1 backends healthy, min_healthy is 1\n" +
			"203.0.113.11  offered    bgp,l2  -      mail      no peer\n",
		"members": "MEMBER      NAME        STATE  SINCE  CLOCK\n" +
			"192.0.2.12  lb2         up     -      61.2s behind\n" +
			"192.0.2.13  lb3         up     -      same\n" +
			"192.0.2.14  192.0.2.14  down   -      -\n",
		"peers": "PEER       ASN    STATE   ROUTES  SINCE  REASON\n" +
			"192.0.2.1  64500  active  0       -      connection refused\n",
	} {
		t.Run(command, func(t *testing.T) {
			if code, out, errOut := steelyard(t, command, "--socket", socket); code != 0 || out != want {
				t.Errorf("code %d, stderr %q, stdout:\n%s\nwant:\n%s", code, errOut, out, want)
			}
			code, out, _ := steelyard(t, command, "-o", "json", "--socket", socket)
			must.True(t, code == 0 && json.Valid([]byte(out)), "-o json: code %d, %s", code, out)
		})
	}
	flow := "SERVICE  SCOPE  CLIENT               ADDRESS              BACKEND         FORWARD  STATE        " +
		"AGE   IDLE  PACKETS  BYTES     RESENT  HANDSHAKE\n" +
		"web      inside  198.51.100.11:40000  203.0.113.10:80/tcp  10.0.0.21:8080  nat      established  " +
		"1m2s  2s    12/10    640/3.0M  1/0     820µs\n"
	for _, tt := range []struct {
		flag, value, want string
		code              int
	}{
		{"client", "198.51.100.0/24", flow, 0}, {"client", "198.51.100.12", flow[:strings.Index(flow, "\n")+1], 0},
		{"limit", "1", flow + "… and more; see --limit\n", 0}, {"state", "established", flow, 0},
		{"backend", "10.0.0.21", flow, 0}, {"service", "web", flow, 0}, {"address", "203.0.113.10", flow, 0},
		{"port", "80", flow, 0}, {"scope", "inside", flow, 0}, {"scope", "in", "", 2},
		{"state", "open", "", 2}, {"client", "me", "", 2}, {"limit", "-1", "", 2},
	} {
		code, out, errOut := steelyard(t, "flows", "--"+tt.flag, tt.value, "--socket", socket)
		must.True(t, code == tt.code &&
			strings.Join(strings.Fields(out), " ") == strings.Join(strings.Fields(tt.want), " "),
			"flows --%s %s: code %d, stderr %q, stdout:\n%s\nwant:\n%s", tt.flag, tt.value, code, errOut, out, tt.want)
	}
	code, out, _ := steelyard(t, "status", "--socket", socket)
	must.True(t, code == 0 && strings.Contains(out, "backends  0 of 1 healthy\n"), "status: code %d\n%s", code, out)
	must.True(t, strings.HasPrefix(out, "DOWN: no address is announced: 203.0.113.10: 0 of 1 backends healthy"),
		"status begins with %.100q", out)
	code, out, errOut := steelyard(t, "status", "--check", "--socket", socket)
	must.True(t, code == 2 && strings.HasPrefix(out, "DOWN: ") && errOut == "",
		"status --check: code %d, stderr %q\n%s", code, errOut, out)
	for _, tt := range []struct {
		st   lb.Status
		want string
		code int
	}{
		{lb.Status{Settled: true}, "DEGRADED: 1 of 1 BGP sessions are not established: 192.0.2.1: connection", 1},
		{lb.Status{}, "DEGRADED: starting: ", 1},
	} {
		code, out, errOut := steelyard(t, "status", "--check", "--socket", serve(t, tt.st))
		must.True(t, code == tt.code && strings.HasPrefix(out, tt.want) && errOut == "",
			"status --check: code %d, stderr %q; want %d and %q\n%s", code, errOut, tt.code, tt.want, out)
	}
	code, out, errOut = steelyard(t, "status", "--ready", "--socket", socket)
	must.True(t, code == 1 && strings.Contains(out, "backends") && strings.Contains(errOut, "0 of 1 BGP sessions"),
		"status --ready: code %d, stderr %q\n%s", code, errOut, out)
}

func TestExplain(t *testing.T) {
	socket := serve(t, lb.Status{Settled: true})
	for _, tt := range []struct {
		args string
		code int
		want string
	}{
		{"198.51.100.7 203.0.113.10:53/udp", 1,
			"198.51.100.7:40000 to 203.0.113.10:53/udp: drop (no_backend)\n  1. first\n  2. then\n"},
		{"198.51.100.7 203.0.113.10:80 -o json", 1, `"reason": "no_backend"`},
		{"198.51.100.7", 2, "takes 2 arguments"}, {"198.51.100.7 203.0.113.10", 2, "want VIP:PORT"},
		{"2001:db8::7 2001:db8::10:80", 2, "with an IPv6 address in brackets and a port of at most 65535"},
	} {
		args := append([]string{"explain", "--socket", socket}, strings.Fields(tt.args)...)
		code, out, errOut := steelyard(t, args...)
		must.True(t, code == tt.code && strings.Contains(out+errOut, tt.want),
			"explain %s: code %d\n%s%s", tt.args, code, out, errOut)
	}
}

func TestDrain(t *testing.T) {
	socket := serve(t, lb.Status{Settled: true})
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"drain", "--socket", socket, "web"}, 0, "drained: [web]\n"},
		{[]string{"drain", "--node", "--socket", socket}, 0, "drained: the node\n"},
		{[]string{"undrain", "--node", "--socket", socket}, 0, "drained: nothing\n"},
		{[]string{"drain", "--socket", socket, "web", "10.0.0.1"}, 0, "drained: [10.0.0.1 of web]\n"},
		{[]string{"drain", "--socket", socket, "web", ""}, 1, "is not an address"},
		{[]string{"drain", "--socket", socket}, 2, "want either SERVICE, with or without ADDRESS, or --node"},
		{[]string{"drain", "--node", "web"}, 2, "want either SERVICE, with or without ADDRESS, or --node"},
		{[]string{"drain", "a", "b", "c"}, 2, "takes 2 arguments, got 3"},
	} {
		if code, out, errOut := steelyard(t, tt.args...); code != tt.code || !strings.Contains(out+errOut, tt.want) {
			t.Errorf("%v: code %d\n%s%s", tt.args, code, out, errOut)
		}
	}
}

// drain --wait returns once the server has no connections of the service.
func TestDrainWaits(t *testing.T) {
	asked := 0
	socket := serve(t, lb.Status{Services: []lb.ServiceStatus{{Service: "web"}}}, func(o *admin.Options) {
		flows := o.Flows
		o.Flows = func(ctx context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			if asked++; asked > 1 {
				return nil, false, nil
			}
			return flows(ctx, want)
		}
	})
	code, out, errOut := steelyard(t, "drain", "--wait", "--socket", socket, "web", "10.0.0.21")
	must.True(t, code == 0 && asked == 2, "code %d after %d requests: %s%s", code, asked, out, errOut)
	code, out, errOut = steelyard(t, "drain", "--wait", "--socket", socket, "web")
	must.True(t, code == 2, "without an address: code %d: %s%s", code, out, errOut)
}

func TestReady(t *testing.T) {
	for _, tt := range []struct {
		settled   bool
		peers, up int
		age       time.Duration
		ready     bool
	}{
		{false, 0, 0, time.Hour, false}, {true, 0, 0, 0, true}, {true, 2, 2, 0, true},
		{true, 2, 1, 25 * time.Second, false}, {true, 2, 1, 35 * time.Second, true}, {true, 2, 0, time.Hour, false},
	} {
		started := time.Now().Add(-tt.age)
		err := notReady(admin.Info{Settled: tt.settled, Peers: tt.peers, PeersUp: tt.up, Started: started})
		must.True(t, (err == nil) == tt.ready, "%+v: %v", tt, err)
	}
}

func TestAgo(t *testing.T) {
	for age, want := range map[time.Duration]string{
		59 * time.Second: "59s", time.Minute: "1m", 90 * time.Minute: "1h30m", 47 * time.Hour: "47h0m",
		48 * time.Hour: "2d",
	} {
		must.Row(t, fmt.Sprintf("%s ago", age), want, ago(time.Now().Add(-age)))
	}
	must.Equal(t, "-", ago(time.Time{}))
}

func TestRemedy(t *testing.T) {
	denied := fmt.Errorf("install: %w", &fs.PathError{Op: "open", Path: "/usr/local/bin/x", Err: syscall.EACCES})
	for _, tc := range []struct {
		err  error
		euid int
		want string
	}{
		{denied, 1000, "; use sudo"},
		{denied, 0, ""},
		{errors.New("other"), 1000, ""},
		{config.Errors{{Problem: "cannot be read", Hint: "use sudo"}}, 1000, ""},
	} {
		must.Row(t, fmt.Sprintf("%v as %d: got", tc.err, tc.euid), tc.want, remedy(tc.err, tc.euid))
	}
}

// Shells get a completion script, and the program prints the words that may follow.
func TestCompletion(t *testing.T) {
	for shell, want := range map[string]string{
		"bash": "complete -o", "zsh": "bashcompinit\n_steelyard", "fish": "complete -c steelyard",
	} {
		code, out, errOut := steelyard(t, "completion", shell)
		must.True(t, code == 0 && strings.Contains(out, want) && errOut == "", "%s: %d %q %q", shell, code, out, errOut)
	}
	was := os.Args
	defer func() { os.Args = was }()
	for args, want := range map[string]string{"": "status", "dr": "drain", "status -": "--check", "config": "show"} {
		words := append(strings.Fields(args), "--generate-bash-completion")
		os.Args = append([]string{"steelyard"}, words...) // urfave/cli reads it
		code, out, _ := steelyard(t, words...)
		must.True(t, code == 0 && strings.Contains(out, want), "%q: %d %q; want %s", args, code, out, want)
	}
	code, _, errOut := steelyard(t, "completion", "csh")
	must.True(t, code == 2 && strings.Contains(errOut, "bash, zsh or fish"), "csh: %d %q", code, errOut)
}
