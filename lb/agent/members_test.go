package agent

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
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
		peers string // "" for no membership
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
		m, err := newMembership(&tt.c, tt.facts, nil, discard)
		if (err != nil) != tt.err || (m != nil) != (tt.peers != "") {
			t.Errorf("%s: %v, %v", tt.name, m, err)
			continue
		}
		if m == nil {
			must.True(t, lbtest.Texts(m.findings()) == nil && m.reload(&tt.c, &tt.c) == nil,
				"%s: problems %q", tt.name, lbtest.Texts(m.findings()))
			m.setNodes(other)
			m.setClusterKeys(&tt.c, kube.Keys{})
			continue
		}
		must.Row(t, tt.name, tt.peers, l2PeersOf(m))
		m.setNodes([]netip.Addr{ip("192.0.2.11"), ip("192.0.2.13"), ip("2001:db8::13")}) // one is this node
		want := "[192.0.2.13]"
		if len(tt.c.L2.Members) > 0 {
			want = "[192.0.2.12 192.0.2.13]"
		}
		must.Row(t, tt.name, want, l2PeersOf(m))
		for _, s := range m.status() {
			must.True(t, s.State == lb.MemberDown && s.Name == s.Member.String() && s.Within == 0 && !s.Since.IsZero(),
				"%s: %+v", tt.name, s)
		}
		must.Row(t, tt.name, len(m.Peers(netip.Addr{})), len(m.status()))
	}
}

func l2PeersOf(m *membership) string {
	list := []netip.Addr{}
	for _, p := range m.Peers(netip.Addr{}) {
		list = append(list, p.Address)
	}
	return fmt.Sprint(list)
}

// A reload applies changed members and secrets. Whether there are any is read only at startup.
func TestReloadMembers(t *testing.T) {
	one, two := config.NewSecret("the first secret"), config.NewSecret("the second secret")
	node1 := node{name: "lb1", address4: ip("192.0.2.11")}
	before := &config.L2{Members: []netip.Addr{ip("192.0.2.12")}, Secrets: []config.Secret{one}, Port: 7946}
	after, port, none, open := *before, *before, *before, *before
	after.Members, after.Secrets = []netip.Addr{ip("192.0.2.13")}, []config.Secret{two, one}
	port.Port, none.Members, open.Secrets = 1, nil, nil
	for _, tt := range []struct {
		name    string
		next    *config.L2
		peers   string
		restart bool
	}{
		{"unchanged", before, "[192.0.2.12]", false},
		{"others", &after, "[192.0.2.13]", false},
		{"another port", &port, "[192.0.2.12]", true},
		{"no members", &none, "[192.0.2.12]", true},
		{"no secret", &open, "[192.0.2.12]", true},
		{"no l2", nil, "[192.0.2.12]", true},
	} {
		running, next := &config.Config{L2: before}, &config.Config{L2: tt.next}
		m := must.Get(newMembership(running, node1, nil, discard))(t)
		must.Row(t, tt.name, nil, m.reload(running, next))
		must.Row(t, tt.name, tt.peers, l2PeersOf(m))
		must.Row(t, tt.name, tt.restart, len(needRestart(running, next)) > 0)
	}
}

// A reload also applies changes of the members that the file lists besides the nodes of a cluster.
func TestReloadMembersInACluster(t *testing.T) {
	config := func(members ...netip.Addr) *config.Config {
		return &config.Config{L2: &config.L2{Members: members}, Kubernetes: &config.Kubernetes{}}
	}
	running := config(ip("192.0.2.12"))
	m := must.Get(newMembership(running, node{name: "lb1", address4: ip("192.0.2.11")}, nil, discard))(t)
	reload := func(want string, members ...netip.Addr) {
		t.Helper()
		err := m.reload(running, config(members...))
		must.True(t, err == nil && l2PeersOf(m) == want, "%v, peers %s; want %s", err, l2PeersOf(m), want)
	}
	reload("[]", ip("192.0.2.13")) // the nodes are not known yet
	m.setNodes([]netip.Addr{ip("192.0.2.21")})
	reload("[192.0.2.13 192.0.2.21]", ip("192.0.2.13"))
	reload("[192.0.2.14 192.0.2.21]", ip("192.0.2.14"))
	reload("[192.0.2.14 192.0.2.21]")
}

// A member that does not respond is a problem after a while, including one that a reload has added, until a reload
// removes it.
func TestMembersDoNotRespond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := func(members ...netip.Addr) *config.Config { return &config.Config{L2: &config.L2{Members: members}} }
		running := config(ip("192.0.2.12"))
		m := must.Get(newMembership(running, node{name: "lb1", address4: ip("192.0.2.11")}, nil, discard))(t)
		problems := func(after time.Duration, want ...string) {
			t.Helper()
			time.Sleep(after)
			got := lbtest.Texts(m.findings())
			same := slices.EqualFunc(got, want, func(text, member string) bool {
				return strings.HasPrefix(text, "member "+member+" of [l2] has not responded since ")
			})
			must.True(t, same, "problems %q; want those of %s", got, want)
		}
		problems(memberGrace)
		problems(time.Second, "192.0.2.12")
		m.reload(running, config(ip("192.0.2.12"), ip("192.0.2.99")))
		problems(memberGrace, "192.0.2.12")
		problems(time.Second, "192.0.2.12", "192.0.2.99")
		m.reload(running, config(ip("192.0.2.99")))
		problems(0, "192.0.2.99")
	})
}

// Members whose family is not this node's are refused, or only cause a warning if there are others.
func TestMemberFamily(t *testing.T) {
	for _, tt := range []struct {
		name, members  string
		host           fakeHost
		error, warning string
	}{
		{name: "the same family", members: `["192.0.2.12"]`},
		{name: "IPv6 alone", members: `["2001:db8::12"]`, host: fakeHost{noV4: true}},
		{name: "the other family", members: `["2001:db8::12"]`,
			error: ":3: l2.members[0]: 2001:db8::12 has no effect: this node is a member through its IPv4 address " +
				"192.0.2.1; write the IPv4 address of the member"},
		{name: "the other family, IPv6 alone", members: `["192.0.2.12"]`, host: fakeHost{noV4: true},
			error: ":3: l2.members[0]: 192.0.2.12 has no effect: this node is a member through its IPv6 address " +
				"2001:db8::1; write the IPv6 address of the member"},
		{name: "both", members: `["192.0.2.12", "2001:db8::12"]`,
			warning: ":3: l2.members[1]: 2001:db8::12 has no effect"},
	} {
		path := writeConfig(t, "", "[l2]\nunencrypted = true\nmembers = "+tt.members+"\n")
		c, err := config.Load(path, memberFamily(tt.host, (*config.Report).Errorf))
		if tt.error != "" {
			must.True(t, err != nil && strings.Contains(err.Error(), tt.error),
				"%s: %v; want %s", tt.name, err, tt.error)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		text := strings.Join(c.Warnings, "\n")
		must.True(t, strings.Contains(text, "has no effect") == (tt.warning != "") &&
			strings.Contains(text, tt.warning), "%s: warnings %q; want %q", tt.name, text, tt.warning)
	}
}

// The nodes of a cluster find each other by their addresses and the keys of the Secret, even during a rotation.
func TestMembersOfACluster(t *testing.T) {
	t.Parallel()
	nodes := []netip.Addr{ip("127.0.6.1"), ip("127.0.6.2"), ip("2001:db8::1")}
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	before := kube.Keys{Current: key(1), Next: key(2)}
	after := kube.Keys{Previous: key(1), Current: key(2), Next: key(3)}
	c := &config.Config{L2: &config.L2{Port: freePort(t)}, Kubernetes: &config.Kubernetes{}}
	var all []*membership
	for i, keys := range []kube.Keys{before, after} {
		m := must.Get(newMembership(c, node{name: fmt.Sprintf("n%d", i), address4: nodes[i]}, nil, discard))(t)
		m.setNodes(nodes)
		m.setClusterKeys(c, keys)
		all = append(all, m)
	}
	findEachOther(t, all)
}

// A secret that a reload removes stays active until the next start; the tunnel keys do not replace it.
func TestReloadKeepsTheSecret(t *testing.T) {
	t.Parallel()
	nodes := []netip.Addr{ip("127.0.6.1"), ip("127.0.6.2")}
	tunnel := config.Datapath{TunnelKeys: []config.Secret{config.NewSecret("the key of the tunnels")}}
	l2 := config.L2{Port: freePort(t), Members: nodes, Secrets: []config.Secret{config.NewSecret("the first secret")}}
	running := &config.Config{L2: &l2, Datapath: tunnel}
	var all []*membership
	for i := range nodes {
		m := must.Get(newMembership(running, node{name: fmt.Sprintf("n%d", i), address4: nodes[i]}, nil, discard))(t)
		all = append(all, m)
	}
	open := l2
	open.Secrets = nil
	must.Do(t, all[0].reload(running, &config.Config{L2: &open, Datapath: tunnel}))
	findEachOther(t, all)
}

// freePort returns a port of 127.0.6.1 that no socket uses.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.6.1:0"))(t)
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// findEachOther runs two memberships, n0 and n1, until both have found the other one.
func findEachOther(t *testing.T, all []*membership) {
	t.Helper()
	for _, m := range all {
		must.Run(t, m.Run)
	}
	for i, m := range all {
		eventually(t, "the other node", func() bool {
			p := m.Peers(netip.Addr{})
			return len(p) == 1 && p[0].Alive && p[0].Name == fmt.Sprintf("n%d", 1-i)
		})
	}
}

// The problem names all causes that look the same: a member that is down, a filtered port, and another secret.
func TestMemberProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &config.Config{L2: &config.L2{Port: 7946, Members: []netip.Addr{ip("127.0.6.2")}}}
		m := must.Get(newMembership(c, node{name: "n1", address4: ip("127.0.6.1")}, nil, discard))(t)
		must.Equal(t, nil, lbtest.Texts(m.findings()))
		time.Sleep(memberGrace + time.Second)
		list := lbtest.Texts(m.findings())
		must.True(t, len(list) == 1 &&
			strings.HasPrefix(list[0], "member 127.0.6.2 of [l2] has not responded since ") &&
			strings.HasSuffix(list[0], "it is down, port 7946 is filtered (UDP or TCP), or it has a different secret"),
			"problems %q", list)
	})
}
