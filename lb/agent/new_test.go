package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// memoryDatapath is a datapath in memory.
type memoryDatapath struct {
	*lbtest.Fixture
	prometheus.Gauge
	*recorded // of Close
	options   datapath.Options
	keys      atomic.Pointer[datapath.TunnelKeys] // the last ones that were set
}

func (d *memoryDatapath) OnFault(func(map[netip.Addr]string)) {}

func (d *memoryDatapath) open(o datapath.Options) (forwarder, error) { d.options = o; return d, nil }

func (d *memoryDatapath) Run(ctx context.Context) error { d.add("run"); <-ctx.Done(); return nil }

func (d *memoryDatapath) Traffic() (
	map[lb.Frontend]datapath.Traffic, map[netip.AddrPort]datapath.Traffic, error,
) {
	return nil, nil, nil
}

func (d *memoryDatapath) Handshakes() (map[netip.AddrPort]lb.Handshakes, error) { return nil, nil }

func (d *memoryDatapath) Findings() []lb.Finding { return nil }
func (d *memoryDatapath) Interfaces() []datapath.InterfaceStatus {
	return []datapath.InterfaceStatus{{Name: "lo", Mode: datapath.ModeTC, Hook: "tcx"}}
}

func (d *memoryDatapath) EndFlows(context.Context, lb.FlowFilter) (ended, kept int, err error) {
	return 0, 0, nil
}

func (d *memoryDatapath) Flows(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
	return nil, true, nil
}

func (d *memoryDatapath) Explain(q lb.Question) (lb.Explanation, error) {
	return lb.Explanation{Protocol: q.Protocol, Reason: "test"}, nil
}

func (d *memoryDatapath) Trace(context.Context, lb.TraceFilter, datapath.TracePart, func([]lb.TraceEvent) error) error {
	return nil
}

func (d *memoryDatapath) SetTunnelSources([]netip.Addr) error { return nil }

func (d *memoryDatapath) SetTunnelKeys(k datapath.TunnelKeys) error { d.keys.Store(&k); return nil }

// ProbeWay fails with its arguments, so that they appear as the reason for the backend's state.
func (d *memoryDatapath) ProbeWay(
	vip, server netip.Addr, method lb.Method, encap lb.Encap,
) (uint32, netip.Addr, error) {
	if method == lb.MethodDSR {
		return 0, netip.Addr{}, fmt.Errorf("way to %s on %s by %s", vip, server, method)
	}
	return 0, server, nil
}

func newMemoryDatapath() *memoryDatapath {
	gauge := prometheus.NewGauge(prometheus.GaugeOpts{Name: "steelyard_test"})
	return &memoryDatapath{Fixture: lbtest.New(), Gauge: gauge, recorded: new(recorded)}
}

// newInMemory creates an agent with a configuration, a datapath in memory and a state directory.
func newInMemory(t *testing.T, text string, change func(*Options)) (*Agent, *memoryDatapath, error) {
	t.Helper()
	dp := newMemoryDatapath()
	text = "[node]\nname = \"n\"\n[datapath]\ninterfaces = [\"lo\"]\n" + text
	o := Options{
		ConfigFile: writeConfig(t, "", text), Config: parse(t, text), Version: "v", Log: discard,
		PinPath: "/pins", StateDir: t.TempDir(), open: dp.open,
	}
	change(&o)
	a, err := New(o)
	return a, dp, err
}

func asIs(*Options) {}

// New connects the parts: each request to the API reaches the part that has the answer.
func TestNewConnects(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	a, dp, err := newInMemory(t, fmt.Sprintf("[admin]\nsocket = %q\n", socket)+`
[[service]]
name = "up"
address = "203.0.113.10"
ports = ["80:8080"]
backends = ["10.0.0.21"]
check = "none"
[[service]]
name = "web"
address = "203.0.113.11"
ports = ["80"]
backends = ["10.0.0.22"]
forward = "dsr"
check = "tcp"
`, asIs)
	must.Do(t, err)
	o := dp.options
	must.True(t, o.PinPath == "/pins" && o.Interfaces[0] == "lo" && !o.Delivers, "options of the datapath %+v", o)
	stop := must.Run(t, a.Run)
	c := admin.NewClient(socket)
	var i admin.Info
	eventually(t, "settled", func() bool { return c.Get(t.Context(), "/v1/status", &i) == nil && i.Settled })
	must.True(t, i.Node == "n" && i.Version == "v" && i.Services == 2 && i.Interfaces[0].Name == "lo" &&
		!i.Started.IsZero(), "status %+v", i)
	var backends []lb.BackendStatus
	reason := func() string {
		must.Do(t, c.Get(t.Context(), "/v1/backends", &backends))
		return fmt.Sprint(backends)
	}
	eventually(t, "a failed check", func() bool {
		return strings.Contains(reason(), "way to 203.0.113.11 on 10.0.0.22 by dsr")
	})
	var flows admin.Flows
	err = c.Get(t.Context(), "/v1/flows", &flows)
	must.True(t, err == nil && flows.More, "flows %+v, %v", flows, err)
	var x lb.Explanation
	path := "/v1/explain?client=198.51.100.7&to=203.0.113.10:80"
	err = c.Get(t.Context(), path, &x)
	must.True(t, err == nil && x.Reason == "test", "explanation %+v, %v", x, err)
	var drains lb.Drains
	err = c.Post(t.Context(), "/v1/drain?service=web", &drains)
	must.True(t, err == nil && len(drains.Services) == 1, "drains %+v, %v", drains, err)
	var reloaded admin.Reloaded
	err = c.Post(t.Context(), "/v1/reload", &reloaded)
	must.True(t, err == nil && reloaded.Config == a.reloader.file, "reload %+v, %v", reloaded, err)
	metrics := scrape(t, socket)
	for _, name := range []string{
		"steelyard_test 0", "steelyard_engine_settled 1", "steelyard_engine_apply_duration_seconds_count{",
		"steelyard_health_", "go_goroutines ", "process_open_fds ",
	} {
		must.True(t, strings.Contains(metrics, name), "no %s in the metrics", name)
	}
	stop()
	must.Equal(t, "[run datapath closed]", fmt.Sprint(dp.all()))
}

// scrape returns the answer to GET /metrics on a socket.
func scrape(t *testing.T, socket string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	resp := must.Get(client.Get("http://agent/metrics"))(t)
	defer resp.Body.Close()
	return string(must.Get(io.ReadAll(resp.Body))(t))
}

// New closes what it has opened when a later step fails.
func TestNewFails(t *testing.T) {
	const kubeconfig = "[kubernetes]\nkubeconfig = \"/no/such/file\"\n"
	const bgp = "[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.254\", asn = 64500 }]\n"
	for _, tt := range []struct {
		name, text string
		change     func(*Options)
		err        string
		closed     bool
	}{
		{
			"datapath", "", func(o *Options) {
				o.open = func(datapath.Options) (forwarder, error) { return nil, errors.New("no BPF") }
			}, "no BPF", false,
		},
		{"node", bgp, asIs, "interface lo has no IPv4 address to use as BGP identifier", false},
		{"announcer", bgp, func(o *Options) {
			o.Config.Node.RouterID, o.Config.BGP.ASN = ip("192.0.2.1"), 0
		}, "bgp: ", false},
		{"cluster", kubeconfig, asIs, "kubernetes: ", false},
	} {
		a, dp, err := newInMemory(t, tt.text, tt.change)
		must.True(t, a == nil && err != nil && strings.Contains(err.Error(), tt.err),
			"%s: agent %v, error %v; want %s", tt.name, a, err, tt.err)
		closed := len(dp.all()) == 1
		must.True(t, closed == tt.closed, "%s: datapath closed %t; want %t", tt.name, closed, tt.closed)
	}
}

// Drains that cannot be read are a problem, and do not prevent the start. Warnings are logged.
func TestUnreadableDrains(t *testing.T) {
	var log bytes.Buffer
	a, _, err := newInMemory(t, "", func(o *Options) {
		o.Log, o.Config.Warnings = slog.New(slog.NewTextHandler(&log, nil)), []string{"pointless"}
		must.Do(t, os.WriteFile(filepath.Join(o.StateDir, "drained.json"), []byte("x"), 0o600))
	})
	must.True(t, err == nil && strings.Contains(log.String(), "reason=pointless"), "error %v, log %s", err, &log)
	p := lbtest.Texts(a.problems.findings())
	must.True(t, len(p) == 1 && strings.Contains(p[0], "read the drains from "), "problems %q", p)
}

// The parts of the cluster source that run depend on who the service proxy is and who assigns addresses.
func TestClusterTasks(t *testing.T) {
	kubeconfig := kubeconfigOf(t, "http://127.0.0.1:1")
	const pool = "[l2]\n[[pool]]\nname = \"a\"\naddresses = [\"203.0.113.0/30\"]\n"
	for _, tt := range []struct{ keys, more, want string }{
		{`proxy = "kube-proxy"`, "", "node health checks, addresses"},
		{"", "", "health check node ports, node health checks, addresses"},
		{`proxy = "replace"`, "",
			"health check node ports, health of the service proxy, node health checks, addresses"},
		{`proxy = "kube-proxy"`, pool, "node health checks, addresses"},
		{"proxy = \"kube-proxy\"\nallocate = false", pool, "node health checks"},
	} {
		cfg := parse(t, fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n%s\n%s", kubeconfig, tt.keys, tt.more))
		o := Options{Config: cfg, Log: discard, api: new(apiDialer)}
		c := must.Get(newCluster(o, facts, nil, nil, nil, nil, nil))(t)
		var names []string
		for _, x := range c.tasks {
			names = append(names, x.name)
		}
		want := "last known state of the cluster, " + tt.want
		must.Row(t, tt.keys+": tasks", want, strings.Join(names, ", "))
		must.Row(t, tt.keys+": source", "kubernetes", c.source.name)
		if tt.more != "" {
			cfg.Pools[0].ServiceSelector = "!!"
			_, err := newCluster(o, facts, nil, nil, nil, nil, nil)
			must.True(t, err != nil, "%s: a wrong selector is accepted", tt.keys)
		}
	}
}

// The client of the API server identifies itself, asks for protobuf, and gives up after its timeout.
func TestNewClient(t *testing.T) {
	header := make(chan http.Header, 10)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	stop := make(chan struct{})
	server := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		header <- r.Header
		<-stop
	})}
	go server.Serve(l)
	t.Cleanup(func() { close(stop); server.Close() })
	kubeconfig := kubeconfigOf(t, "http://"+l.Addr().String())
	dialed := ""
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		dialed = address
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	client := must.Get(newClient(kubeconfig, "v1", time.Second, dial))(t)
	_, err := client.Discovery().ServerVersion()
	must.True(t, err != nil && dialed == l.Addr().String(), "a server without an answer: %v, dialed %q", err, dialed)
	h := <-header
	must.Equal(t, "steelyard/v1", h.Get("User-Agent"))
	got := h.Get("Accept")
	must.True(t, strings.HasPrefix(got, "application/vnd.kubernetes.protobuf"), "accepts %q", got)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err = newClient("", "v1", 0, nil)
	must.True(t, err != nil, "outside of a pod: no error")
}

// The default interface is the one of the kernel's default route; a host without a default route has none.
func TestDefaultInterface(t *testing.T) {
	routes := must.Get(os.ReadFile("/proc/net/route"))(t)
	got, err := thisHost{}.defaultInterface()
	for line := range strings.Lines(string(routes)) {
		f := strings.Fields(line)
		if f[1] == "00000000" && f[7] == "00000000" {
			must.True(t, err == nil && got == f[0], "%s, %v; want %s", got, err, f[0])
			return
		}
	}
	if err != nil && err.Error() != "there is no default route through an Ethernet interface" {
		t.Error(err)
	}
}
