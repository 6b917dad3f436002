package agent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var discard = slog.New(slog.DiscardHandler)

var facts = node{
	name: "n", routerID: ip("192.0.2.9"), address4: ip("192.0.2.1"), address6: ip("2001:db8::1"),
	interfaces: []string{"eth0"}, l2Interfaces: []string{"eth1"},
}

// parse returns the configuration of a TOML text.
func parse(t *testing.T, text string) *config.Config {
	t.Helper()
	return must.Get(config.Parse("test.toml", []byte(text)))(t)
}

func TestBGPOptions(t *testing.T) {
	cfg := parse(t, `
[bgp]
asn = 64512
listen_port = 1179
communities = ["64512:1", "64512:2:3", "rt:64512:100"]
local_pref = 200
restart_time = "45s"
long_lived_restart_time = "1h"
graceful_shutdown = "3s"
max_routes = 9
weighted = true
peers = [
  { address = "192.0.2.254", asn = 64500, port = 1790, hold_time = "9s", multihop = 3, source = "192.0.2.1",
    graceful_restart = false, bfd = true, pools = ["public"], local_asn = 64999, passive = true, keepalive = "1s",
    connect_retry = "7s" },
  { address = "2001:db8::fe", asn = 64501, ttl_security = true },
  { interface = "eth2", asn = 64500 },
  { listen_range = "192.0.2.0/24", asn = 64500, device = "red" },
]

[[pool]]
name = "public"
addresses = ["203.0.113.0/28"]

[[pool]]
name = "internal"
addresses = ["198.51.100.0/28"]
aggregate_v4 = 28
prepend = 1

[[pool]]
name = "other"
addresses = ["198.51.100.128/28"]
`)
	cfg.BGP.AggregateV4, cfg.BGP.AggregateV6 = 24, 64
	want := bgp.Options{
		ASN: 64512, RouterID: facts.routerID, ListenPort: 1179, LocalPref: 200, Weighted: lb.WeightedMovable,
		RestartTime: 45 * time.Second, LongLivedRestartTime: time.Hour, GracefulShutdown: 3 * time.Second, MaxRoutes: 9,
		Communities: []uint32{64512<<16 + 1}, LargeCommunities: [][3]uint32{{64512, 2, 3}},
		ExtCommunities: [][8]byte{{0, 2, 252, 0, 0, 0, 0, 100}},
		Pools: []bgp.Pool{ // the last one has no effect on BGP
			{Name: "public", Ranges: cfg.Pools[0].Ranges},
			{Name: "internal", Ranges: cfg.Pools[1].Ranges, AggregateV4: 28, Prepend: 1},
		},
		AggregateV4: 24, AggregateV6: 64, NextHopV4: facts.address4, NextHopV6: facts.address6,
		Peers: []bgp.Peer{
			{
				Address: ip("192.0.2.254"), ASN: 64500, Port: 1790, HoldTime: 9 * time.Second, MaxReceived: 1000,
				Multihop: 3, Pools: []string{"public"},
				BFD:    bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3, Multihop: true, MinTTL: 253},
				Source: ip("192.0.2.1"), LocalASN: 64999, Passive: true, Retry: 7 * time.Second, Keepalive: time.Second,
			},
			{Address: ip("2001:db8::fe"), ASN: 64501, Port: 179, HoldTime: cfg.BGP.Peers[1].HoldTime,
				MaxReceived: 1000, Retry: 2 * time.Second,
				TTLSecurity: true, GracefulRestart: true},
			{Interface: "eth2", ASN: 64500, Port: 179, HoldTime: cfg.BGP.Peers[1].HoldTime, MaxReceived: 1000,
				GracefulRestart: true, Retry: 2 * time.Second},
			{ListenRange: netip.MustParsePrefix("192.0.2.0/24"), ASN: 64500, Port: 179,
				HoldTime: cfg.BGP.Peers[1].HoldTime, MaxReceived: 1000, GracefulRestart: true, Retry: 2 * time.Second,
				Device: "red"},
		},
	}
	got := bgpOptions(cfg, facts, nil)
	must.Equal(t, want, got)
	cfg.BGP.RestartTime = 0
	for _, p := range bgpOptions(cfg, facts, nil).Peers {
		must.True(t, !p.GracefulRestart, "peer %s has graceful restart with restart_time = 0s", p.Address)
	}
}

func TestAnnouncers(t *testing.T) {
	none, err := newAnnouncers(parse(t, ""), facts, "", prometheus.NewRegistry(), nil, discard)
	must.True(t, err == nil && len(none.tasks) == 0 && none.peers() == nil && none.all != nil,
		"nothing configured: %+v, %v", none, err)
	both := parse(t, "[l2]\n[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.254\", asn = 64500 }]")
	out, err := newAnnouncers(both, facts, "", prometheus.NewRegistry(), nil, discard)
	must.Need(t, err == nil && len(out.tasks) == 2 && out.tasks[0].name == "bgp" && out.tasks[1].name == "l2",
		"BGP and L2: %+v, %v", out.tasks, err)
	p := out.peers()
	must.True(t, len(p) == 1 && p[0].Peer == ip("192.0.2.254"), "peers %+v", p)
	all := []lb.AnnouncerKind{lb.AnnounceBGP, lb.AnnounceL2}
	routes := out.judge([]lb.RouteStatus{
		{Announced: true, State: lb.RouteAnnounced},
		{Announced: true, State: lb.RouteAnnounced, By: all[:1]}, {State: lb.RouteWithheld},
	})
	for i, want := range [][]lb.AnnouncerKind{all, all[:1], nil} {
		must.Row(t, fmt.Sprintf("route %d is announced by", i), want, routes[i].By)
	}
	both.BGP.ASN = 0
	_, err = newAnnouncers(both, facts, "", prometheus.NewRegistry(), nil, discard)
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "bgp: "), "wrong options: %v", err)
}

func TestDatapathOptions(t *testing.T) {
	cfg := parse(t, `
[datapath]
mode = "tc"
max_flows = 1000
snat_ports = "2000-3000"
tunnel_port = 6082
tunnel_sources = ["192.0.2.0/24"]`)
	o := Options{Config: cfg, PinPath: "/pins", StateDir: "/state", Log: discard}
	want := datapath.Options{
		Interfaces: facts.interfaces, FollowRoutes: true, Mode: datapath.ModeTC, MaxFlows: 1000,
		SNATPorts:     []datapath.PortRange{{First: 2000, Last: 3000}},
		LocalClients:  true,
		TunnelPort:    6082,
		TunnelSources: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Own: facts.addresses(),
		Timeouts: datapath.DefaultTimeouts, PinPath: "/pins", StateDir: "/state", TunnelKeys: &datapath.TunnelKeys{},
	}
	for _, delivers := range []bool{false, true} {
		if delivers {
			cfg.Kubernetes = &config.Kubernetes{}
			want.TunnelKeys = nil // from the Secret
		}
		want.Delivers = delivers
		got := datapathOptions(o, facts)
		got.Log = nil
		must.Equal(t, want, got, cmpopts.IgnoreUnexported(datapath.Options{}))
	}
	// Clients' packets arrive where VIPs are resolved, and from the peers, whatever the interfaces are.
	cfg.Datapath.Interfaces, cfg.L2 = []string{"eth0"}, &config.L2{}
	cfg.BGP = &config.BGP{Peers: []config.Peer{
		{Address: ip("192.0.2.254")}, {Address: ip("fe80::1%eth2")}, {Interface: "eth3"},
		{ListenRange: netip.MustParsePrefix("192.0.2.0/24")},
	}}
	got := datapathOptions(o, facts)
	if want := []netip.Addr{ip("192.0.2.254"), ip("fe80::1")}; got.FollowRoutes ||
		!slices.Equal(got.Keep, []string{"eth1", "eth2", "eth3"}) || !slices.Equal(got.Reach, want) {
		t.Errorf("with L2 on eth1: follow %t, keep %v, reach %v", got.FollowRoutes, got.Keep, got.Reach)
	}
	for _, row := range []struct {
		bgp     *config.BGP
		routers bool
	}{{nil, false}, {&config.BGP{}, false}, {&config.BGP{Peers: []config.Peer{{Interface: "eth3"}}}, true}} {
		cfg.BGP = row.bgp
		got := datapathOptions(o, facts)
		must.True(t, got.Routers == row.routers, "%+v: routers %t", row.bgp, got.Routers)
	}
}

func TestKubeOptions(t *testing.T) {
	cfg := parse(t, `
[kubernetes]
load_balancer_class = "steelyard.dev/lb"
forward = "nat"
proxy = "replace"
exclude_nodes = ["not-ready"]
[probe]
interval = "3s"
timeout = "2s"
rise = 4
fall = 5
proxy_healthz = "http://127.0.0.1:1/healthz"`)
	want := kube.Options{
		Node: "n", Classes: []string{"steelyard.dev/lb"}, Address: facts.address4, Forward: lb.MethodNAT,
		NodeProbe:    300 * time.Millisecond,
		Probe:        lb.CheckSpec{Interval: 3 * time.Second, Timeout: 2 * time.Second, Rise: 4, Fall: 5},
		ProxyHealthz: "http://127.0.0.1:1/healthz",
		KeepLast:     true,
		NotReady:     true, NoAnnouncer: true, MaxEndpoints: 10000, PanicHold: 30 * time.Second,
	}
	must.Equal(t, want, kubeOptions(cfg, facts))
	cfg.Kubernetes.ExcludeNodes, cfg.Kubernetes.Proxy = []string{config.NodeUnschedulable}, config.ProxyAuto
	o := kubeOptions(cfg, facts)
	must.True(t, !o.NotReady && o.Unschedulable,
		"not ready %t, unschedulable %t; want the second alone", o.NotReady, o.Unschedulable)
}

func TestPoolsOf(t *testing.T) {
	cfg := parse(t, `
[l2]
[[pool]]
name = "a"
addresses = ["203.0.113.0/30"]
announce = ["l2"]
auto_assign = false
avoid_buggy_ips = true
priority = 7
namespaces = ["prod"]
service_selector = "tier=web"
[[pool]]
name = "b"
addresses = ["2001:db8::1-2001:db8::9"]`)
	pools, err := poolsOf(cfg)
	must.Need(t, err == nil && len(pools) == 2, "%v, %v", pools, err)
	want := lb.Pool{
		Name: "a", Ranges: []lb.AddrRange{{From: ip("203.0.113.0"), To: ip("203.0.113.3")}},
		AvoidBuggy: true, AvoidAnycast: true, Priority: 7,
		Announce: []lb.AnnouncerKind{lb.AnnounceL2},
	}
	must.Equal(t, want, pools[0].Pool)
	must.Equal(t, []string{"prod"}, pools[0].Namespaces)
	must.Equal(t, "tier=web", pools[0].Selector.String())
	if p := pools[1]; p.Name != "b" || !p.AutoAssign || p.Selector != nil || p.Ranges[0].To != ip("2001:db8::9") {
		t.Errorf("second pool %+v", p)
	}
	cfg.Pools[1].ServiceSelector = "!!"
	_, err = poolsOf(cfg)
	must.Fail(t, err, `pool "b": service_selector: `)
}

type uplinks []datapath.InterfaceStatus

func (u uplinks) Interfaces() []datapath.InterfaceStatus { return u }

func TestInfo(t *testing.T) {
	started, loaded := time.Unix(1, 0), time.Unix(2, 0)
	l := &reloader{file: "/etc/x.toml"}
	l.state.Store(&loadState{at: loaded, refused: "wrong", warnings: []string{"w"}, restart: []string{"bgp"}})
	drains, cluster := lb.Drains{Services: []string{"web"}}, &admin.Cluster{Leader: "n"}
	d := describer{node: "n", version: "v", started: started, reloader: l, datapath: uplinks{
		{Name: "eth0", Mode: datapath.ModeTC, Hook: "tcx"}, {Name: "eth1"},
	}, drained: func() lb.Drains { return drains }, cluster: func() *admin.Cluster { return cluster }, l2: true}
	want := admin.Info{
		Node: "n", Version: "v", Started: started, Config: "/etc/x.toml", Loaded: loaded, LoadError: "wrong",
		NeedRestart: []string{"bgp"}, Drained: &drains, Cluster: cluster, L2: true,
		Findings: []lb.Finding{lb.FoundConfiguration.About("", "w")}, Interfaces: []admin.Interface{
			{Name: "eth0", Mode: "tc", Hook: "tcx"},
			{Name: "eth1", Err: "interface not found; it will be attached when it reappears"},
		},
	}
	must.Equal(t, want, d.info())
}
