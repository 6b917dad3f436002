package agent

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Rates follow the counters. Packets that servers still send to clients that have gone do not count as client packets.
func TestRates(t *testing.T) {
	t.Parallel()
	var c datapath.Traffic
	f := lb.Frontend{VIP: netip.MustParseAddr("203.0.113.10"), Port: 80, Protocol: lb.TCP}
	r := rates{read: func() (map[lb.Frontend]datapath.Traffic, error) {
		return map[lb.Frontend]datapath.Traffic{f: c}, nil
	}, log: discard}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	read := func(intervals int, more datapath.Traffic) lb.Traffic {
		for range intervals {
			c.Add(more)
			now = now.Add(ratesEvery)
			r.sample(now)
		}
		st := lb.Status{Services: []lb.ServiceStatus{{Address: f.VIP, Port: f.Port, Protocol: f.Protocol}}}
		r.mark(&st)
		return st.Services[0].Traffic
	}
	c = datapath.Traffic{Packets: 1e6, Flows: 1e4} // of an earlier agent
	if got := read(1, datapath.Traffic{}); got.PacketRate != 0 || !got.Last.IsZero() || got.Packets != 1e6 {
		t.Errorf("at the start: %+v", got)
	}
	busy := now.Add(40 * ratesEvery)
	got := read(40, datapath.Traffic{Packets: 1700, Flows: 50, Replies: 850})
	must.True(t, math.Round(got.PacketRate) == 340 && math.Round(got.FlowRate) == 10 && got.Last.Equal(busy),
		"under load: %+v", got)
	got = read(40, datapath.Traffic{Packets: 2, Replies: 2})
	must.True(t, got.PacketRate <= 1 && got.FlowRate <= 0.01 && got.Last.Equal(busy) && math.Round(got.Before) == 340,
		"without clients: %+v", got)
	c = datapath.Traffic{Packets: 5}
	if got := read(1, datapath.Traffic{}); got.PacketRate != 0 || !got.Last.IsZero() || got.Packets != 5 {
		t.Errorf("a new frontend with the same name: %+v", got)
	}
}
