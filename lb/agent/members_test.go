package agent

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// A node has members when the file names some, or it is in a cluster.
func TestNewMembership(t *testing.T) {
	other := []netip.Addr{ip("192.0.2.12")}
	facts := node{name: "lb1", address4: ip("192.0.2.11")}
	secret := []config.Secret{config.NewSecret("a good secret of a file")}
	for _, tt := range []struct {
		name  string
		c     config.Config
		facts node
		peers string // "": no membership
		err   bool
	}{
		{"no l2", config.Config{}, facts, "", false},
		{"alone", config.Config{L2: &config.L2{}}, facts, "", false},
		{"members", config.Config{L2: &config.L2{Members: other}}, facts, "[192.0.2.12]", false},
		{"members with a secret", config.Config{L2: &config.L2{Members: other, Secrets: secret}}, facts,
			"[192.0.2.12]", false},
		{"cluster", config.Config{L2: &config.L2{}, Kubernetes: &config.Kubernetes{}}, facts, "[]", false},
		{"no address", config.Config{L2: &config.L2{Members: other}}, node{name: "lb1"}, "", true},
	} {
		m, err := newMembership(&tt.c, tt.facts, discard)
		if (err != nil) != tt.err || (m != nil) != (tt.peers != "") {
			t.Errorf("%s: %v, %v", tt.name, m, err)
			continue
		}
		if m == nil {
			if m.problems() != nil || m.reload(&tt.c) != nil {
				t.Errorf("%s: problems %q", tt.name, m.problems())
			}
			m.setNodes(other)
			m.setClusterKeys(&tt.c, kube.Keys{})
			continue
		}
		if got := l2PeersOf(m); got != tt.peers {
			t.Errorf("%s: peers %s; want %s", tt.name, got, tt.peers)
		}
		m.setNodes([]netip.Addr{ip("192.0.2.11"), ip("192.0.2.13"), ip("2001:db8::13")}) // of which one is this node
		want := "[192.0.2.13]"
		if len(tt.c.L2.Members) > 0 {
			want = "[192.0.2.12 192.0.2.13]"
		}
		if got := l2PeersOf(m); got != want {
			t.Errorf("%s: peers %s; want %s", tt.name, got, want)
		}
	}
}

func l2PeersOf(m *membership) string {
	list := []netip.Addr{}
	for _, p := range m.Peers(netip.Addr{}) {
		list = append(list, p.Address)
	}
	return fmt.Sprint(list)
}

// A reload puts members and secrets in force; that there are some is read at the start only.
func TestReloadMembers(t *testing.T) {
	one, two := config.NewSecret("the first secret"), config.NewSecret("the second secret")
	before := &config.L2{Members: []netip.Addr{ip("192.0.2.12")}, Secrets: []config.Secret{one}, Port: 7946}
	m, err := newMembership(&config.Config{L2: before}, node{name: "lb1", address4: ip("192.0.2.11")}, discard)
	if err != nil {
		t.Fatal(err)
	}
	after := *before
	after.Members, after.Secrets = []netip.Addr{ip("192.0.2.13")}, []config.Secret{two, one}
	if err := m.reload(&config.Config{L2: &after}); err != nil || l2PeersOf(m) != "[192.0.2.13]" {
		t.Errorf("%v, peers %s", err, l2PeersOf(m))
	}
	restart := func(next *config.L2) bool {
		return len(needRestart(&config.Config{L2: before}, &config.Config{L2: next})) > 0
	}
	port, none := after, after
	port.Port, none.Secrets = 1, nil
	if restart(before) || restart(&after) || !restart(&port) || !restart(&none) || !restart(nil) {
		t.Error("a restart is needed for the wrong changes")
	}
}

// The nodes of a cluster find each other by their addresses and the keys of the Secret, also during a rotation.
func TestMembersOfACluster(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.6.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	l.Close()
	nodes := []netip.Addr{ip("127.0.6.1"), ip("127.0.6.2"), ip("2001:db8::1")}
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	before := kube.Keys{Current: key(1), Next: key(2)}
	after := kube.Keys{Previous: key(1), Current: key(2), Next: key(3)}
	c := &config.Config{L2: &config.L2{Port: port}, Kubernetes: &config.Kubernetes{}}
	var all []*membership
	for i, keys := range []kube.Keys{before, after} {
		m, err := newMembership(c, node{name: fmt.Sprintf("n%d", i), address4: nodes[i]}, discard)
		if err != nil {
			t.Fatal(err)
		}
		m.setNodes(nodes)
		m.setClusterKeys(c, keys)
		done := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { done <- m.Run(ctx) }()
		t.Cleanup(func() {
			if cancel(); <-done != nil {
				t.Error("membership failed")
			}
		})
		all = append(all, m)
	}
	for i, m := range all {
		eventually(t, "the other node", func() bool {
			p := m.Peers(netip.Addr{})
			return len(p) == 1 && p[0].Alive && p[0].Name == fmt.Sprintf("n%d", 1-i)
		})
	}
}
