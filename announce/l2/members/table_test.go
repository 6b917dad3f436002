package members

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func newTestTable(n int, peers ...netip.Addr) (t *table, sent *[][]byte) {
	sent = new([][]byte)
	t = newTable(node(n), "self", func(b []byte) { *sent = append(*sent, b) })
	t.setPeers(peers)
	return t, sent
}

// Reports apply in the order of their creation, whatever order they arrive in.
func TestMergeOrder(t *testing.T) {
	claim := func(term uint32, seq uint64) map[netip.Addr]entry {
		return map[netip.Addr]entry{vip: {Claim{Eligible: true, Term: term}, seq}}
	}
	for _, tt := range []struct {
		name    string
		reports []report
		want    uint32 // term; 0 for no claim
	}{
		{"change", []report{{epoch: 1, claims: claim(1, 1)}, {epoch: 1, claims: claim(2, 2)}}, 2},
		{"late change", []report{{epoch: 1, claims: claim(2, 2)}, {epoch: 1, claims: claim(1, 1)}}, 2},
		{"removed", []report{
			{epoch: 1, claims: claim(1, 1)}, {epoch: 1, claims: map[netip.Addr]entry{vip: {seq: 2}}},
		}, 0},
		{"late, after the removal", []report{
			{epoch: 1, claims: map[netip.Addr]entry{vip: {seq: 2}}}, {epoch: 1, claims: claim(1, 1)},
		}, 0},
		{"whole without it", []report{{epoch: 1, claims: claim(1, 1)}, {epoch: 1, seq: 1, whole: true}}, 0},
		{"older whole without it", []report{{epoch: 1, claims: claim(2, 2)}, {epoch: 1, seq: 1, whole: true}}, 2},
		{"restart", []report{{epoch: 1, claims: claim(9, 9)}, {epoch: 2, claims: claim(1, 1)}}, 1},
		{"late, after a restart", []report{{epoch: 2, claims: claim(1, 1)}, {epoch: 1, claims: claim(9, 9)}}, 1},
	} {
		x, _ := newTestTable(1, node(2))
		for _, r := range tt.reports {
			r.member = node(2)
			x.merge(r)
		}
		p := x.list(vip)[0]
		must.True(t, p.Claim.Term == tt.want && p.Claim.Eligible == (tt.want > 0) && p.Known,
			"%s: %+v; want term %d", tt.name, p, tt.want)
	}
}

// A member's reports from before a restart do not count once the restart is known.
func TestClaimsOfAnEarlierProcess(t *testing.T) {
	x, _ := newTestTable(1, node(2))
	holds := map[netip.Addr]entry{vip: {Claim{Eligible: true, Holds: true}, 1}}
	for _, step := range []struct {
		name string
		do   func()
		want Peer
	}{
		{"started", func() { x.setAlive(node(2), true, meta{Epoch: 5}) }, Peer{}},
		{"reported", func() { x.merge(report{member: node(2), epoch: 5, claims: holds}) },
			Peer{Known: true, Claim: Claim{Eligible: true, Holds: true}}},
		{"started again", func() { x.setAlive(node(2), true, meta{Epoch: 7}) }, Peer{}},
		{"a late report", func() { x.merge(report{member: node(2), epoch: 5, claims: holds}) }, Peer{}},
		{"reported again", func() { x.merge(report{member: node(2), epoch: 7}) }, Peer{Known: true}},
	} {
		step.do()
		p := x.list(vip)[0]
		must.Row(t, step.name, []any{step.want.Known, step.want.Claim}, []any{p.Known, p.Claim})
	}
}

// Reports from others do not change a member's own claims, but make it choose a higher epoch, in case its clock was
// ahead in a previous run.
func TestMergeOwn(t *testing.T) {
	x, sent := newTestTable(1, node(2))
	x.publish(map[netip.Addr]Claim{vip: {Eligible: true}})
	before := len(*sent)
	ahead := x.own.epoch + 1000
	x.merge(report{member: node(1), epoch: ahead})
	must.Row(t, "epoch, and messages", [2]uint64{ahead + 1, 1}, [2]uint64{x.own.epoch, uint64(len(*sent) - before)})
	r, _, err := parseReport((*sent)[before])
	must.True(t, err == nil && r.epoch == ahead+1 && r.claims[vip].Eligible, "%+v, %v", r, err)
	x.merge(report{member: node(9), epoch: 1, claims: map[netip.Addr]entry{vip: {seq: 1}}}) // not configured
	must.True(t, len(x.list(vip)) == 1, "peers %+v", x.list(vip))
}

// Changes of many VIPs fit into datagrams, and the receiver decodes what was sent.
func TestPublish(t *testing.T) {
	x, sent := newTestTable(1, node(2))
	y, _ := newTestTable(2, node(1))
	claims := map[netip.Addr]Claim{vip6: {Eligible: true}}
	for i := range 500 {
		claims[netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})] = Claim{
			Eligible: i%2 == 0, Holds: i%3 == 0, Local: i%5 == 0, Term: uint32(i),
		}
	}
	deliver := func() {
		for _, b := range *sent {
			must.Need(t, len(b) <= 1200, "a message of %d bytes", len(b))
			r, rest, err := parseReport(b)
			if err != nil || len(rest) > 0 {
				t.Fatal(err)
			}
			y.merge(r)
		}
		*sent = nil
	}
	check := func(y *table) {
		t.Helper()
		got := map[netip.Addr]Claim{}
		for v, e := range y.peers[node(1)].claims {
			if e.Claim != (Claim{}) {
				got[v] = e.Claim
			}
		}
		want := maps.Clone(claims)
		maps.DeleteFunc(want, func(_ netip.Addr, c Claim) bool { return c == Claim{} })
		must.True(t, maps.Equal(got, want), "%d claims; want %d", len(got), len(want))
	}
	x.publish(claims)
	deliver()
	check(y)
	x.publish(claims)
	must.Row(t, "messages without a change", 0, len(*sent))
	delete(claims, vip6)
	x.publish(claims)
	deliver()
	check(y)
	// A third member receives all of it from the second one.
	z, _ := newTestTable(3, node(1), node(2))
	for b := y.whole(); len(b) > 0; {
		r, rest, err := parseReport(b)
		must.Do(t, err)
		z.merge(r)
		b = rest
	}
	check(z)
}

func FuzzParseReport(f *testing.F) {
	f.Add(report{member: node(1), epoch: 1, claims: map[netip.Addr]entry{vip: {Claim{Eligible: true}, 3}}}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, _ := newTestTable(1, node(2))
		for {
			r, rest, err := parseReport(b)
			if err != nil || len(rest) >= len(b) {
				return
			}
			x.merge(r)
			b = rest
		}
	})
}

// Members with the same name, as after copying a configuration, are distinguished by their addresses.
func TestMembersWithOneName(t *testing.T) {
	table := newTable(node(1), "lb1", func([]byte) {})
	table.setPeers([]netip.Addr{node(2), node(3), node(4)})
	names := func(of ...string) (got string) {
		for i, name := range of {
			table.setAlive(node(i+2), true, meta{Name: name})
		}
		for _, p := range table.list(vip) {
			got += fmt.Sprintf("%s %t; ", p.Name, p.Twin)
		}
		return got
	}
	for _, tt := range []struct {
		of   []string
		want string
	}{
		{[]string{"lb2", "lb3", "lb4"}, "lb2 false; lb3 false; lb4 false; "},
		{[]string{"lb1", "lb3", "lb4"}, "lb1 (127.0.5.2) true; lb3 false; lb4 false; "},
		{[]string{"lb2", "lb3", "lb2"}, "lb2 (127.0.5.2) true; lb3 false; lb2 (127.0.5.4) true; "},
	} {
		must.Row(t, tt.of, tt.want, names(tt.of...))
	}
}

// A member's false report about another lasts only until the other receives it, however high its numbers are.
func TestFalseReportsDoNotLast(t *testing.T) {
	holds := map[netip.Addr]Claim{vip: {Eligible: true, Holds: true, Term: 7}}
	last := uint64(1<<64 - 1)
	for name, lie := range map[string]func(epoch uint64) report{
		"the highest change": func(epoch uint64) report {
			return report{epoch: epoch, claims: map[netip.Addr]entry{vip: {seq: last}}}
		},
		"the highest epoch": func(uint64) report {
			return report{epoch: epochMax(), claims: map[netip.Addr]entry{vip: {seq: last}}}
		},
	} {
		victim, _ := newTestTable(2, node(1))
		victim.publish(holds)
		x, _ := newTestTable(1, node(2))
		tell := func(from, to *table) {
			for b := from.whole(); len(b) > 0; {
				r, rest, err := parseReport(b)
				must.Need(t, err == nil, "%s: %v", name, err)
				to.merge(r)
				b = rest
			}
		}
		tell(victim, x)
		r := lie(victim.epoch())
		r.member = node(2)
		x.merge(r)
		tell(x, victim)
		time.Sleep(time.Millisecond) // a message takes at least as long
		tell(victim, x)
		p := x.list(vip)[0]
		must.True(t, p.Claim == holds[vip], "%s: %+v; want what the member says", name, p.Claim)
	}
}
