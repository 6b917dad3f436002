package doctor

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// e2e.TestDoctor tests the checks on a network. The tests here are for what it cannot vary.

func TestSilent(t *testing.T) {
	addr, port := netip.MustParseAddr, netip.MustParseAddrPort
	up := &lb.PeerSession{}
	n := Node{
		Peers: []Peer{
			{PeerStatus: lb.PeerStatus{Peer: addr("192.0.2.1")}, Port: 1790},
			{PeerStatus: lb.PeerStatus{Peer: addr("192.0.2.2"), Session: up}, Port: 179},
			{PeerStatus: lb.PeerStatus{Peer: addr("192.0.2.3"), Dynamic: true}, Port: 179},
		},
		Away: []netip.AddrPort{port("192.0.2.12:7946")},
		Status: lb.Status{Backends: []lb.BackendStatus{
			{Address: addr("10.0.0.21"), Port: 80, State: lb.StateUnhealthy, Reason: lb.NoResponse + "1s"},
			{Address: addr("10.0.0.21"), Port: 80, State: lb.StateUnhealthy, Reason: lb.NoResponse + "1s"},
			{Address: addr("10.0.0.22"), Port: 80, State: lb.StateUnhealthy, Reason: "connection refused"},
			{Address: addr("10.0.0.23"), Port: 80, State: lb.StateHealthy},
		}},
	}
	must.Equal(t, []netip.AddrPort{port("192.0.2.1:1790"), port("192.0.2.12:7946"), port("10.0.0.21:80")}, n.silent())
}

// A clock differs only if the round trip does not explain it.
func TestClocks(t *testing.T) {
	member := func(name, state string, ahead, within float64) lb.MemberStatus {
		return lb.MemberStatus{Name: name, State: state, Ahead: ahead, Within: within}
	}
	for _, tt := range []struct {
		members []lb.MemberStatus
		text    string // "" for no finding
		asked   bool
	}{
		{nil, "", false},
		{[]lb.MemberStatus{member("lb2", lb.MemberUp, 0, 0), member("lb3", lb.MemberDown, 60, 0.1)}, "", false},
		{[]lb.MemberStatus{member("lb2", lb.MemberUp, -5.5, 0.6)}, "", true},
		{[]lb.MemberStatus{member("lb2", lb.MemberUp, 3600, 0.1)},
			"the clock of member lb2 is 3600.0 s ahead of this node's", true},
		{[]lb.MemberStatus{member("lb2", lb.MemberUp, -6, 0.1), member("lb3", lb.MemberUp, -7, 0.1)},
			"the clock of member lb2 is 6.0 s behind this node's; and 1 more like this, such as lb3", true},
	} {
		found, notAsked := clocks(t.Context(), &Node{Members: tt.members})
		text := ""
		if len(found) > 0 {
			text = found[0].Text
		}
		must.Equal(t, tt.text, text)
		must.Equal(t, tt.asked, notAsked == "")
	}
}

// Without an answer of the API server, nothing is known.
func TestPermissions(t *testing.T) {
	refused := lb.FoundNotPermitted.About("list nodes", "no")
	for _, tt := range []struct {
		found []lb.Finding
		err   error
		not   string
	}{{[]lb.Finding{refused}, nil, ""}, {nil, nil, ""}, {nil, errors.New("away"), "cannot ask: away"}} {
		n := &Node{Permissions: func(context.Context) ([]lb.Finding, error) { return tt.found, tt.err }}
		found, not := permissions(t.Context(), n)
		must.Equal(t, tt.found, found)
		must.Equal(t, tt.not, not)
	}
	_, not := permissions(t.Context(), &Node{})
	must.Equal(t, "there is no cluster", not)
}

// One finding names the first Service and how many others its policies concern.
func TestNetworkPolicies(t *testing.T) {
	n := &Node{Policies: func(context.Context) ([]lb.Finding, error) {
		kind := lb.FoundNetworkPolicy
		return []lb.Finding{kind.About("default/a", "p refuses"), kind.About("default/b", "q refuses")}, nil
	}}
	found, not := networkPolicies(t.Context(), n)
	want := lb.FoundNetworkPolicy.About("", "p refuses; and 1 more like this, such as default/b")
	must.Equal(t, []lb.Finding{want}, found)
	must.Equal(t, "", not)
}

// The examples are lines of /proc/net/tcp and /proc/net/tcp6 on amd64.
func TestKernelAddr(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:00B3":                         "127.0.0.1:179",
		"B80D0120020000000000000001000000:C350": "[2001:db8:0:2::1]:50000",
		"0000000000000000FFFF0000010200C0:00B3": "192.0.2.1:179",
	} {
		must.Row(t, text, want, kernelAddr(text).String())
	}
	must.True(t, !kernelAddr("x:1").IsValid(), "x is an address")
}

// The parsers accept any packet that arrives.
func TestHostilePackets(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		b := make([]byte, draw.IntN(70))
		for i := range b {
			b[i] = byte(draw.Uint32())
		}
		if len(b) > 0 { // most are of a known type
			b[0] = []byte{0, 1, 2, 3, 128, 129, 0x45, 0x4f, 0x60, b[0]}[draw.IntN(10)]
		}
		parseICMP(true, b)
		parseICMP(false, b)
		tcpOf(b)
	}
}

// A finding names two of many objects.
func TestMerged(t *testing.T) {
	faults := []fault{{"a", "a is lost"}, {"b", "b is lost"}, {"c", "c is lost"}}
	var texts []string
	for n := range len(faults) + 1 {
		for _, f := range merged(lb.FoundMTU, faults[:n]) {
			texts = append(texts, f.Object+": "+f.Text)
		}
	}
	want := []string{"a: a is lost", ": a is lost; and 1 more like this, such as b",
		": a is lost; and 2 more like this, such as b"}
	must.True(t, slices.Equal(texts, want), "%q; want %q", texts, want)
}
