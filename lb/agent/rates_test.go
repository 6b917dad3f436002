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
	servers := []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.1:443")}
	var h lb.Handshakes
	r := rates{readHandshakes: func() (map[netip.AddrPort]lb.Handshakes, error) {
		return map[netip.AddrPort]lb.Handshakes{servers[0]: h}, nil
	}, read: func() (map[lb.Frontend]datapath.Traffic, map[netip.AddrPort]datapath.Traffic, error) {
		return map[lb.Frontend]datapath.Traffic{f: c},
			map[netip.AddrPort]datapath.Traffic{servers[0]: c, servers[1]: c}, nil
	}, log: discard}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	read := func(intervals int, more datapath.Traffic) lb.Traffic {
		for range intervals {
			c.Add(more)
			now = now.Add(ratesEvery)
			r.mark(&lb.Status{}, now, nil) // reads the counters, because they are old
			r.mark(&lb.Status{}, now.Add(ratesFresh/2), nil)
		}
		b := lb.BackendStatus{Key: lb.CheckKey{Service: "web"}, Serves: servers}
		st := lb.Status{
			Services: []lb.ServiceStatus{{
				Address: f.VIP, Port: f.Port, Protocol: f.Protocol, Backends: []lb.BackendStatus{b},
			}},
			Backends: []lb.BackendStatus{b},
		}
		r.mark(&st, now, func(k lb.CheckKey) lb.ProbeTimes { return lb.ProbeTimes{Last: float64(len(k.Service))} })
		x := st.Services[0].Traffic
		for _, b := range []lb.BackendStatus{st.Backends[0], st.Services[0].Backends[0]} {
			must.Equal(t, 3.0, b.ProbeTimes.Last)
			must.Equal(t, 2*x.Packets, b.Packets)
			must.Equal(t, 2*x.BitRate, b.BitRate)
			must.Equal(t, x.Last, b.Traffic.Last)
		}
		return x
	}
	c = datapath.Traffic{Packets: 1e6, Flows: 1e4} // of an earlier agent
	if got := read(1, datapath.Traffic{}); got.PacketRate != 0 || !got.Last.IsZero() || got.Packets != 1e6 {
		t.Errorf("at the start: %+v", got)
	}
	busy := now.Add(40 * ratesEvery)
	got := read(40, datapath.Traffic{Packets: 1700, Bytes: 125e3, Flows: 50, Replies: 850})
	must.True(t, math.Round(got.PacketRate) == 340 && math.Round(got.FlowRate) == 10 && got.Last.Equal(busy) &&
		math.Round(got.BitRate/1000) == 200,
		"under load: %+v", got)
	got = read(40, datapath.Traffic{Packets: 2, Replies: 2})
	must.True(t, got.PacketRate <= 1 && got.FlowRate <= 0.01 && got.Last.Equal(busy) && math.Round(got.Before) == 340,
		"without clients: %+v", got)
	c.Packets += 100
	for name, counters := range map[string]datapath.Traffic{
		"packets": {Packets: 5}, "bytes": {Packets: c.Packets, Flows: c.Flows, Replies: c.Replies},
		"flows":   {Packets: c.Packets, Bytes: c.Bytes, Replies: c.Replies},
		"replies": {Packets: c.Packets, Bytes: c.Bytes, Flows: c.Flows},
	} {
		read(1, datapath.Traffic{})
		was := c
		c = counters
		got := read(1, datapath.Traffic{})
		must.True(t, got.PacketRate == 0 && got.BitRate == 0 && got.Last.IsZero() && got.Packets == c.Packets &&
			got.Read.Equal(now), "a new frontend with the same name and fewer %s: %+v", name, got)
		c = was
	}
}

// The figures of a backend are those of recent handshakes, not of all since the counters began.
func TestRecentHandshakes(t *testing.T) {
	t.Parallel()
	at := netip.MustParseAddrPort("10.0.0.1:80")
	var h lb.Handshakes
	h.Counts[0] = 1e6
	r := rates{log: discard, read: func() (
		map[lb.Frontend]datapath.Traffic, map[netip.AddrPort]datapath.Traffic, error,
	) {
		return nil, nil, nil
	}, readHandshakes: func() (map[netip.AddrPort]lb.Handshakes, error) {
		return map[netip.AddrPort]lb.Handshakes{at: h}, nil
	}}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	after := func(d time.Duration) (p50, p95 float64) {
		now = now.Add(d)
		st := lb.Status{Backends: []lb.BackendStatus{{Serves: []netip.AddrPort{at}}}}
		r.mark(&st, now, func(lb.CheckKey) lb.ProbeTimes { return lb.ProbeTimes{} })
		return st.Backends[0].Handshake50, st.Backends[0].Handshake95
	}
	if p50, _ := after(0); p50 != 0 {
		t.Errorf("an earlier agent's handshakes: %f s; want none", p50)
	}
	h.Counts[13] += 10 // 0.54 to 1.07 s
	p50, p95 := after(ratesEvery)
	must.True(t, math.Abs(p50-0.805) < 0.001 && math.Abs(p95-1.047) < 0.001, "median %f s, p95 %f s", p50, p95)
	h.Counts[1] += 100 // to 0.26 ms
	p50, p95 = after(ratesEvery)
	must.True(t, p50 < 0.0003 && p95 > 0.5, "with fast ones: median %f s, p95 %f s", p50, p95)
	h.Counts[15]++ // above 2.1 s
	if _, p95 = after(5 * time.Minute); math.Abs(p95-lb.HandshakeBound(14)) > 1e-9 {
		t.Errorf("of one very slow handshake, when the others are long ago: %f s", p95)
	}
	if p50, _ = after(5 * time.Minute); p50 != 0 {
		t.Errorf("minutes after the last one: %f s; want none", p50)
	}
	h = lb.Handshakes{}
	if p50, _ = after(ratesEvery); p50 != 0 {
		t.Errorf("a new backend with the same address: %f s; want none", p50)
	}
}
