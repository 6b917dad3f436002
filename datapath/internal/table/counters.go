package table

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Traffic counts the packets and bytes of a frontend or backend in both directions since the maps were created
// (bpf/types.h).
type Traffic = bpf.Traffic

// ReadVerdicts returns the number of packets with each verdict, summed over all CPUs.
func ReadVerdicts(m *ebpf.Map) ([]uint64, error) {
	cpus, size := ebpf.MustPossibleCPU(), int(m.MaxEntries())
	keys, values := make([]uint32, size), make([]uint64, size*cpus)
	var cursor ebpf.MapBatchCursor
	if n, err := m.BatchLookup(&cursor, keys, values, nil); n != size {
		return nil, fmt.Errorf("read verdicts: %w", err)
	}
	packets := make([]uint64, size)
	for i, n := range values {
		packets[keys[i/cpus]] += n
	}
	return packets, nil
}

// ReadTraffic returns an id's traffic, summed over all CPUs.
func ReadTraffic(c *Chunked, id uint32) (sum Traffic, err error) {
	var perCPU []bpf.Traffic
	if err := c.lookup(id, &perCPU); err != nil {
		return sum, fmt.Errorf("read counters: %w", err)
	}
	for _, x := range perCPU {
		sum.Add(x)
	}
	return sum, nil
}

// ReadHandshakes returns the handshake times of a backend.
func ReadHandshakes(c *Chunked, id uint32) (out lb.Handshakes, err error) {
	var h bpf.Handshakes
	if err := c.lookup(id, &h); err != nil {
		return out, fmt.Errorf("read handshake times: %w", err)
	}
	out.Sum = (time.Duration(h.Sum) * bpf.HandshakeUnit).Seconds()
	for i, n := range h.N {
		out.Counts[i] = float64(n)
	}
	return out, nil
}

// resetCounts resets the counters of an id that is about to be reused.
func resetCounts(c *Chunked, id uint32, zero any) error {
	err := c.grow(id + 1)
	if err == nil {
		err = c.put(id, zero)
	}
	if err != nil {
		return fmt.Errorf("reset counters: %w", err)
	}
	return nil
}

// noTraffic returns a zero for each CPU.
func noTraffic() []bpf.Traffic { return make([]bpf.Traffic, ebpf.MustPossibleCPU()) }

// Names returns the frontend and the service of each frontend id, and the address of each backend id. Callers share the
// maps and must not change them. So frequent callers do not block the engine with Mu.
func (s *Services) Names() (
	frontends map[uint32]lb.Frontend, service map[uint32]string, backends map[uint32]netip.AddrPort,
) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	changes := s.changes + s.Backends.changes
	if s.named.frontends != nil && s.named.changes == changes {
		return s.named.frontends, s.named.service, s.named.backends
	}
	frontends, service, backends = map[uint32]lb.Frontend{}, map[uint32]string{}, map[uint32]netip.AddrPort{}
	for f, state := range s.Frontends {
		frontends[state.ID], service[state.ID] = f, state.service
	}
	for at, b := range s.Backends.ByAddr {
		backends[b.ID] = at
	}
	s.named = named{changes, frontends, service, backends}
	return frontends, service, backends
}

// Balanced returns the active plans whose targets are servers, and not nodes.
func (s *Services) Balanced() (plans []*lb.FrontendPlan) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, f := range s.Frontends {
		if p := f.Plan; p != nil && !p.NodeForwarding.Enabled && !p.Decap {
			plans = append(plans, p)
		}
	}
	return plans
}

// named caches the result of Names at this number of changes.
type named struct {
	changes   uint64
	frontends map[uint32]lb.Frontend
	service   map[uint32]string
	backends  map[uint32]netip.AddrPort
}
