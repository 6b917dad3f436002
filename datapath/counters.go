package datapath

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Traffic is what was counted for a frontend or a backend since the maps were made, both directions.
type Traffic struct{ Packets, Bytes, Flows uint64 }

// Stats are all counters.
type Stats struct {
	Frontends map[lb.Frontend]Traffic
	Backends  map[netip.AddrPort]Traffic
	// Packets are counted by action ("forward", "drop"…) and reason. Packets to other addresses than VIPs are not
	// counted.
	Packets map[Verdict]uint64
	Flows   FlowCounts
}

// Verdict is an action and its reason.
type Verdict struct{ Action, Reason string }

// Stats reads all counters.
func (d *Datapath) Stats() (Stats, error) {
	s := Stats{
		Frontends: map[lb.Frontend]Traffic{}, Backends: map[netip.AddrPort]Traffic{},
		Packets: map[Verdict]uint64{}, Flows: d.gc.counts(),
	}
	frontends, _, backends := d.services.names()
	for id, f := range frontends {
		t, err := readTraffic(d.chunks.frontendCounters, id)
		if err != nil {
			return s, err
		}
		f.Decap = false // packets that arrive in a tunnel count for the same frontend
		sum := s.Frontends[f]
		s.Frontends[f] = Traffic{sum.Packets + t.Packets, sum.Bytes + t.Bytes, sum.Flows + t.Flows}
	}
	for id, b := range backends {
		t, err := readTraffic(d.chunks.backendCounters, id)
		if err != nil {
			return s, err
		}
		s.Backends[b] = t
	}
	packets, err := readVerdicts(d.objects.SyVerdicts)
	if err != nil {
		return s, err
	}
	width := len(d.reasons) - 1 // without the end mark
	for i, n := range packets {
		if n > 0 {
			s.Packets[Verdict{d.actions[i/width], d.reasons[i%width]}] = n
		}
	}
	return s, nil
}

// readVerdicts returns the packets of each verdict, of all CPUs.
func readVerdicts(m *ebpf.Map) ([]uint64, error) {
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

func readTraffic(c *chunked, id uint32) (sum Traffic, err error) {
	var perCPU []bpf.Traffic
	if err := c.lookup(id, &perCPU); err != nil {
		return sum, fmt.Errorf("read counters: %w", err)
	}
	for _, x := range perCPU {
		sum.Packets += x.Packets
		sum.Bytes += x.Bytes
		sum.Flows += x.Flows
	}
	return sum, nil
}

// resetCounts sets the counters of an id to zero before the id is used again.
func resetCounts(c *chunked, id uint32) error {
	err := c.grow(id + 1)
	if err == nil {
		err = c.put(id, make([]bpf.Traffic, ebpf.MustPossibleCPU()))
	}
	if err != nil {
		return fmt.Errorf("reset counters: %w", err)
	}
	return nil
}

var (
	serviceLabels = []string{"service", "vip", "port", "protocol"}

	descPackets = prometheus.NewDesc("steelyard_datapath_packets_total",
		"Packets to or from a VIP, by action and reason.", []string{"action", "reason"}, nil)
	descFlows = prometheus.NewDesc("steelyard_datapath_flows",
		"Flows, by state, as of the last walk through the tables.", []string{"state"}, nil)
	descSPackets = prometheus.NewDesc("steelyard_datapath_service_packets_total",
		"Packets of a service, both directions.", serviceLabels, nil)
	descSBytes = prometheus.NewDesc("steelyard_datapath_service_bytes_total",
		"Bytes of a service, both directions, with all headers.", serviceLabels, nil)
	descSFlows = prometheus.NewDesc("steelyard_datapath_service_flows_total",
		"Flows of a service that were opened.", serviceLabels, nil)
	descBPackets = prometheus.NewDesc("steelyard_datapath_backend_packets_total",
		"Packets forwarded to or from a backend.", []string{"backend"}, nil)
	descBBytes = prometheus.NewDesc("steelyard_datapath_backend_bytes_total",
		"Bytes forwarded to or from a backend, with all headers.", []string{"backend"}, nil)
	descBFlows = prometheus.NewDesc("steelyard_datapath_backend_flows_total",
		"Flows that were opened to a backend.", []string{"backend"}, nil)
	descFaults = prometheus.NewDesc("steelyard_datapath_vips_with_fault",
		"VIPs whose packets are not delivered although they have backends; see the routes for the reasons.", nil, nil)
	descRepairs = prometheus.NewDesc("steelyard_datapath_repairs_total",
		"What others changed on this node and the agent restored: programs, pins or forwarding.",
		[]string{"what"}, nil)
	descOverruns = prometheus.NewDesc("steelyard_datapath_netlink_overruns_total",
		"How often the kernel dropped notifications about the network; everything is read again then.", nil, nil)
)

// Describe implements prometheus.Collector.
func (d *Datapath) Describe(ch chan<- *prometheus.Desc) {
	for _, x := range []*prometheus.Desc{
		descPackets, descFlows, descSPackets, descSBytes, descSFlows, descBPackets, descBBytes, descBFlows,
		descFaults, descRepairs, descOverruns,
	} {
		ch <- x
	}
}

// Collect implements prometheus.Collector: the counters of the kernel are read at each scrape.
func (d *Datapath) Collect(ch chan<- prometheus.Metric) {
	s, err := d.Stats()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descPackets, err)
		return
	}
	counter := func(desc *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), labels...)
	}
	for v, n := range s.Packets {
		counter(descPackets, n, v.Action, v.Reason)
	}
	ch <- prometheus.MustNewConstMetric(descFaults, prometheus.GaugeValue, float64(d.verifier.faults()))
	for what, n := range d.repairs.counts() {
		counter(descRepairs, n, what)
	}
	counter(descOverruns, d.overruns.Load())
	states := map[string]int{"half_open": s.Flows.HalfOpen, "established": s.Flows.Established,
		"closing": s.Flows.Closing}
	for state, n := range states {
		ch <- prometheus.MustNewConstMetric(descFlows, prometheus.GaugeValue, float64(n), state)
	}
	frontends, service, _ := d.services.names()
	for id, f := range frontends {
		if f.Decap {
			continue
		}
		labels := []string{service[id], f.VIP.String(), f.Ports(), f.Protocol.String()}
		t := s.Frontends[f]
		counter(descSPackets, t.Packets, labels...)
		counter(descSBytes, t.Bytes, labels...)
		counter(descSFlows, t.Flows, labels...)
	}
	for at, t := range s.Backends {
		counter(descBPackets, t.Packets, at.String())
		counter(descBBytes, t.Bytes, at.String())
		counter(descBFlows, t.Flows, at.String())
	}
}

// names returns the service of each frontend id and the address of each backend id.
// The maps are shared: a reader that asks often must not keep mu from the engine.
func (s *services) names() (
	frontends map[uint32]lb.Frontend, service map[uint32]string, backends map[uint32]netip.AddrPort,
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := s.changes + s.backends.changes
	if s.named.frontends != nil && s.named.changes == changes {
		return s.named.frontends, s.named.service, s.named.backends
	}
	frontends, service, backends = map[uint32]lb.Frontend{}, map[uint32]string{}, map[uint32]netip.AddrPort{}
	for f, state := range s.frontends {
		frontends[state.id], service[state.id] = f, state.service
	}
	for at, b := range s.backends.byAddr {
		backends[b.id] = at
	}
	s.named = named{changes, frontends, service, backends}
	return frontends, service, backends
}

// named is the result of names at this number of changes.
type named struct {
	changes   uint64
	frontends map[uint32]lb.Frontend
	service   map[uint32]string
	backends  map[uint32]netip.AddrPort
}

// serviceOf returns the service of the frontend of a VIP that has this id.
func (s *services) serviceOf(vip netip.Addr, id uint32) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.vips[vip][id]; f != nil {
		return f.service
	}
	return ""
}
