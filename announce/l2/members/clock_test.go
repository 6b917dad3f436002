package members

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A member's clock is the one in its response. A member of an earlier version sends none, and another's is ignored.
func TestClock(t *testing.T) {
	t.Parallel()
	m := New(Options{Name: "lb1", Address: node(1), Port: 7946})
	m.SetPeers([]netip.Addr{node(1), node(2)})
	other := &memberlist.Node{Name: node(2).String(), Addr: net.IP(node(2).AsSlice())}
	unknown := &memberlist.Node{Name: node(3).String(), Addr: net.IP(node(3).AsSlice())}
	now := binary.BigEndian.AppendUint64(nil, uint64(time.Now().Add(-time.Hour).UnixNano()))
	for _, payload := range [][]byte{nil, {1}} {
		delegate{m}.NotifyPingComplete(other, time.Millisecond, payload)
		must.Equal(t, 0, m.Peers(vip)[0].Within)
	}
	delegate{m}.NotifyPingComplete(unknown, time.Millisecond, now)
	delegate{m}.NotifyPingComplete(other, time.Millisecond, now)
	p := m.Peers(vip)
	must.Need(t, len(p) == 1, "%+v", p)
	must.True(t, (p[0].Ahead+time.Hour).Abs() < 10*time.Second && p[0].Within == time.Millisecond, "%+v", p[0])
}
