package lb

import (
	"net/netip"
	"time"
)

// Traffic is the traffic of a frontend or a backend in both directions. The rates are averages over about 20 s.
type Traffic struct {
	Packets    uint64    `json:"packets"`
	Bytes      uint64    `json:"bytes"`       // with all headers
	Flows      uint64    `json:"connections"` // opened
	PacketRate float64   `json:"packets_per_second"`
	BitRate    float64   `json:"bits_per_second"`
	FlowRate   float64   `json:"connections_per_second"` // new ones
	Read       time.Time `json:"read,omitzero"`          // when the counters were read
	// Last is when the last packet of a client arrived, at most five seconds late, or zero if none arrived since the
	// agent started.
	Last time.Time `json:"last_packet,omitzero"`
	// Before is PacketRate at Last.
	Before float64 `json:"-"`
}

// Add adds the traffic of another port.
func (t *Traffic) Add(o Traffic) {
	t.Packets, t.Bytes, t.Flows = t.Packets+o.Packets, t.Bytes+o.Bytes, t.Flows+o.Flows
	t.PacketRate, t.BitRate, t.FlowRate = t.PacketRate+o.PacketRate, t.BitRate+o.BitRate, t.FlowRate+o.FlowRate
	if t.Before += o.Before; o.Last.After(t.Last) {
		t.Last = o.Last
	}
	if o.Read.After(t.Read) {
		t.Read = o.Read
	}
}

// Since sets the rates to those since an earlier reading. It returns false if this is no later reading of the same
// counters: those of a new frontend or backend begin at zero.
func (t *Traffic) Since(was Traffic) bool {
	if t.Packets < was.Packets || t.Bytes < was.Bytes || t.Flows < was.Flows || !t.Read.After(was.Read) {
		return false
	}
	took := t.Read.Sub(was.Read).Seconds()
	t.PacketRate = float64(t.Packets-was.Packets) / took
	t.BitRate = 8 * float64(t.Bytes-was.Bytes) / took
	t.FlowRate = float64(t.Flows-was.Flows) / took
	return true
}

// ProbeTimes are the durations of a check's recent probes in seconds, or zero before the first one.
type ProbeTimes struct {
	Last float64 `json:"probe_seconds,omitzero"`
	P95  float64 `json:"probe_p95_seconds,omitzero"` // of the last 60 probes
}

// MarkBackends sets the figures of each backend. traffic and handshakes are asked for each address and port that serves
// clients.
func (out *Status) MarkBackends(
	traffic func(netip.AddrPort) Traffic, handshakes func(netip.AddrPort) Handshakes, probes func(CheckKey) ProbeTimes,
) {
	mark := func(all []BackendStatus) {
		for i := range all {
			b := &all[i]
			b.ProbeTimes, b.Traffic = probes(b.Key), Traffic{}
			var h Handshakes
			for _, at := range b.Serves {
				b.Traffic.Add(traffic(at))
				h.Add(handshakes(at), 1)
			}
			b.Handshake50, b.Handshake95 = h.Quantile(0.5), h.Quantile(0.95)
		}
	}
	mark(out.Backends)
	for _, s := range out.Services {
		mark(s.Backends)
	}
}
