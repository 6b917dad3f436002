package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fakeHost has an interface eth0 with one address of each family, and a default route over it.
type fakeHost struct {
	noName, noRoute bool
	noV4            bool
}

func (h fakeHost) name() (string, error) {
	if h.noName {
		return "", errors.New("no name")
	}
	return "host", nil
}

func (h fakeHost) defaultInterface() (string, error) {
	if h.noRoute {
		return "", errors.New("no route")
	}
	return "eth0", nil
}

func (h fakeHost) addresses(iface string) (v4, v6 netip.Addr, err error) {
	switch {
	case iface != "eth0":
		_, err := netlink.LinkByName("no-such-link")
		return v4, v6, fmt.Errorf("interface %s: %w", iface, err)
	case h.noV4:
		return v4, ip("2001:db8::1"), nil
	}
	return ip("192.0.2.1"), ip("2001:db8::1"), nil
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestDescribe(t *testing.T) {
	eth0 := []string{"eth0"}
	bgp := &config.BGP{ASN: 64512}
	for _, tt := range []struct {
		name string
		host fakeHost
		env  string // NODE_NAME
		cfg  config.Config
		want node
		err  string
	}{
		{
			name: "nothing configured",
			want: node{"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), eth0, eth0},
		},
		{
			name: "NODE_NAME before the host name", env: "pod-node",
			want: node{"pod-node", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), eth0, eth0},
		},
		{
			name: "all configured", env: "pod-node", host: fakeHost{noName: true, noRoute: true},
			cfg: config.Config{
				Node:     config.Node{Name: "n", RouterID: ip("192.0.2.9"), Address: ip("192.0.2.2")},
				Datapath: config.Datapath{Interfaces: []string{"eth0", "eth1"}},
				L2:       &config.L2{Interfaces: []string{"eth2"}},
			},
			want: node{
				"n", ip("192.0.2.9"), ip("192.0.2.2"), ip("2001:db8::1"), []string{"eth0", "eth1"}, []string{"eth2"},
			},
		},
		{
			name: "IPv6 address configured, L2 on the uplinks",
			cfg:  config.Config{Node: config.Node{Address: ip("2001:db8::2")}, L2: &config.L2{}},
			want: node{"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::2"), eth0, eth0},
		},
		{
			name: "no IPv4, no BGP", host: fakeHost{noV4: true},
			want: node{name: "host", address6: ip("2001:db8::1"), interfaces: eth0, l2Interfaces: eth0},
		},
		{
			name: "no IPv4, BGP with a router ID", host: fakeHost{noV4: true},
			cfg:  config.Config{BGP: bgp, Node: config.Node{RouterID: ip("192.0.2.9")}},
			want: node{"host", ip("192.0.2.9"), netip.Addr{}, ip("2001:db8::1"), eth0, eth0},
		},
		{
			name: "no IPv4, BGP", host: fakeHost{noV4: true}, cfg: config.Config{BGP: bgp},
			err: "interface eth0 has no IPv4 address to use as BGP identifier; set node.router_id",
		},
		{name: "no host name", host: fakeHost{noName: true}, err: "find the host name: no name; set node.name"},
		{
			name: "no default route", host: fakeHost{noRoute: true},
			err: "find the uplink: no route; set datapath.interfaces",
		},
		{
			name: "unknown interface", cfg: config.Config{Datapath: config.Datapath{Interfaces: []string{"eth9"}}},
			err: "interface eth9: Link not found; name an interface of this machine",
		},
		{
			name: "unknown first interface",
			cfg:  config.Config{Datapath: config.Datapath{Interfaces: []string{"eth9", "eth0"}}},
			want: node{
				"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), []string{"eth9", "eth0"},
				[]string{"eth9", "eth0"},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("NODE_NAME", tt.env)
			got, err := describe(&tt.cfg, tt.host)
			if tt.err != "" {
				must.Equal(t, tt.err, fmt.Sprint(err))
				return
			}
			must.Do(t, err)
			must.Equal(t, tt.want, got)
		})
	}
}

func TestNodeAddress(t *testing.T) {
	for _, tt := range []struct{ n, want string }{
		{"192.0.2.1 2001:db8::1", "192.0.2.1"}, {" 2001:db8::1", "2001:db8::1"},
	} {
		v4, v6, _ := strings.Cut(tt.n, " ")
		n := node{address6: ip(v6)}
		if v4 != "" {
			n.address4 = ip(v4)
		}
		if got := n.address(); got != ip(tt.want) {
			t.Errorf("%q: %s; want %s", tt.n, got, tt.want)
		}
	}
}

// The system itself is read without privileges: the loopback interface has no global address.
func TestThisHost(t *testing.T) {
	v4, v6, err := thisHost{}.addresses("lo")
	if err != nil || v4.IsLoopback() || v6.IsLoopback() || v6.IsLinkLocalUnicast() {
		t.Errorf("lo: %s, %s, %v", v4, v6, err)
	}
	_, _, err = thisHost{}.addresses("no-such-link")
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "interface no-such-link: "),
		"unknown interface: %v", err)
	if name, err := (thisHost{}).name(); err != nil || name == "" {
		t.Errorf("host name %q, %v", name, err)
	}
}

// A node has the peers whose node_selector matches its labels, follows changes of both, and has them when it starts
// again without the API server.
func TestPeersOfANode(t *testing.T) {
	const text = `
[kubernetes]
[bgp]
asn = 64512
listen_port = -1
peers = [
  { address = "127.0.0.1", asn = 64500 },
  { address = "127.0.0.2", asn = 64500, node_selector = "rack=a" },
  { address = "127.0.0.3", asn = 64500, node_selector = "rack in (b, c), !canary" },
]
`
	dir, cfg := t.TempDir(), parse(t, text)
	start := func() (setLabels func(map[string]string), want func(step string, peers ...string)) {
		t.Helper()
		a := must.Get(newAnnouncers(cfg, facts, dir, prometheus.NewRegistry(), nil, discard))(t)
		return a.setLabels, func(step string, peers ...string) {
			t.Helper()
			labtest.Until(t, 10*time.Second, step, func() error {
				var got []string
				for _, p := range a.peers() {
					got = append(got, p.Peer.String())
				}
				return labtest.ErrorIf(fmt.Sprint(got) != fmt.Sprint(peers), "peers %v", got)
			})
		}
	}
	setLabels, want := start()
	want("the labels are not known", "127.0.0.1")
	setLabels(map[string]string{"rack": "a"})
	want("rack a", "127.0.0.1", "127.0.0.2")
	setLabels(map[string]string{"rack": "b", "canary": ""})
	want("a canary", "127.0.0.1")
	setLabels(map[string]string{"rack": "b"})
	want("rack b", "127.0.0.1", "127.0.0.3")
	_, want = start()
	want("the next start", "127.0.0.1", "127.0.0.3")

	cfg.Kubernetes = nil
	_, want = start()
	want("without Kubernetes", "127.0.0.1", "127.0.0.2", "127.0.0.3")
}

func TestHealthRelay(t *testing.T) {
	var r healthRelay
	var got []string
	report := func(service string) { r.report(lb.Health{Key: lb.CheckKey{Service: service}}) }
	report("a")
	report("b")
	r.deliverTo(func(h lb.Health) { got = append(got, h.Key.Service) })
	report("c")
	must.Equal(t, []string{"a", "b", "c"}, got)
}

type behindFunc func(context.Context) (time.Time, error)

func (f behindFunc) Behind(ctx context.Context) (time.Time, error) { return f(ctx) }

func TestCheckEngine(t *testing.T) {
	for _, want := range []error{nil, errors.New("no answer")} {
		err := checkEngine(behindFunc(func(ctx context.Context) (time.Time, error) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > engineTimeout || time.Until(d) < engineTimeout/2 {
				t.Errorf("deadline %s, %t; want %s from now", d, ok, engineTimeout)
			}
			return time.Time{}, want
		}))
		must.True(t, errors.Is(err, want), "%v; want %v", err, want)
	}
}

type publishes struct{ state lb.Progress }

func (p publishes) Progress() lb.Progress { return p.state }
func (publishes) InForce(s string) bool   { return s == "default/web" }

// Health requests are answered from what the engine publishes. It does not respond when an event has waited too long.
func TestEngineHealth(t *testing.T) {
	since := time.Unix(1, 0)
	for _, tt := range []struct {
		waiting time.Duration
		want    error
	}{{0, nil}, {engineTimeout / 2, nil}, {engineTimeout + time.Second, errEngine}} {
		p := publishes{lb.Progress{Behind: since, Applied: tt.waiting == 0}}
		if tt.waiting > 0 {
			p.state.Waiting = time.Now().Add(-tt.waiting)
		}
		h := engineHealth{p}
		got, err := h.behind()
		if !got.Equal(since) || !errors.Is(err, tt.want) || h.applied() != p.state.Applied {
			t.Errorf("an event waits for %s: behind %s, %v, applied %t", tt.waiting, got, err, h.applied())
		}
		must.True(t, h.inForce("default/web") && !h.inForce("default/db"), "in force is wrong")
	}
}
