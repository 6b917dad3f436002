package flow

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The sample has at most a fixed number of clients, all of which have proved their address.
func TestClientSample(t *testing.T) {
	var s sample
	vip := func(uint32) netip.Addr { return netip.MustParseAddr("203.0.113.10") }
	f := bpf.ServerFlow{}
	f.F.State = uint8(bpf.FlowHalfOpen)
	s.see(bpf.GCHalfOpen, bpf.ServerKey{}, f, vip)
	s.see(bpf.GCUDP, bpf.ServerKey{}, f, vip)
	f.F.State = uint8(bpf.FlowClosed)
	s.see(bpf.GCHalfOpen, bpf.ServerKey{}, f, vip)
	must.True(t, len(s.all) == 0, "a client that has proved nothing is in the sample")
	for i := range byte(200) {
		f.Client.Client = bpf.ToAddr(netip.AddrFrom4([4]byte{10, 0, 0, i}))
		s.see(bpf.GCStream, bpf.ServerKey{}, f, vip)
	}
	late := 0
	for _, q := range s.all {
		if q.Client.Addr().As4()[3] >= sampledClients {
			late++
		}
	}
	must.True(t, len(s.all) == sampledClients && late >= sampledClients/4,
		"%d in the sample, %d of them seen late", len(s.all), late)
}
