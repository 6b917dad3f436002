package datapath

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Traffic counts the packets and bytes of a frontend or backend in both directions since the maps were created.
type Traffic = table.Traffic

// Stats holds all counters.
type Stats struct {
	Frontends map[lb.Frontend]Traffic
	Backends  map[netip.AddrPort]Traffic
	// Packets are counted by action ("forward", "drop"…) and reason. Packets to addresses other than VIPs are not
	// counted.
	Packets map[Verdict]uint64
	Flows   flow.Counts
}

// Verdict is an action and its reason.
type Verdict struct{ Action, Reason string }

// Stats reads all counters.
func (d *Datapath) Stats() (Stats, error) {
	s := Stats{Packets: map[Verdict]uint64{}, Flows: d.flows.Counts()}
	var err error
	if s.Frontends, s.Backends, err = d.Traffic(); err != nil {
		return s, err
	}
	packets, err := table.ReadVerdicts(d.objects.SyVerdicts)
	if err != nil {
		return s, err
	}
	width := len(d.names.Reasons) - 1 // the last name is the end mark
	for i, n := range packets {
		if n > 0 {
			s.Packets[Verdict{d.names.Actions[i/width], d.names.Reasons[i%width]}] = n
		}
	}
	return s, nil
}

// Traffic reads the counters of all frontends and backends.
func (d *Datapath) Traffic() (map[lb.Frontend]Traffic, map[netip.AddrPort]Traffic, error) {
	frontends, _, backends := d.services.Names()
	ofFrontends, ofBackends := map[lb.Frontend]Traffic{}, make(map[netip.AddrPort]Traffic, len(backends))
	for id, f := range frontends {
		t, err := table.ReadTraffic(d.chunks.FrontendCounters, id)
		if err != nil {
			return nil, nil, err
		}
		f.Decap = false // packets that arrive through a tunnel count for the same frontend
		sum := ofFrontends[f]
		sum.Add(t)
		ofFrontends[f] = sum
	}
	for id, at := range backends {
		var err error
		if ofBackends[at], err = table.ReadTraffic(d.chunks.BackendCounters, id); err != nil {
			return nil, nil, err
		}
	}
	return ofFrontends, ofBackends, nil
}

// Handshakes reads the handshake times of all backends.
func (d *Datapath) Handshakes() (map[netip.AddrPort]lb.Handshakes, error) {
	_, _, backends := d.services.Names()
	all := make(map[netip.AddrPort]lb.Handshakes, len(backends))
	for id, at := range backends {
		var err error
		if all[at], err = table.ReadHandshakes(d.chunks.Handshakes, id); err != nil {
			return nil, err
		}
	}
	return all, nil
}

var (
	serviceLabels = []string{"service", "vip", "port", "protocol"}

	descPackets = prometheus.NewDesc("steelyard_datapath_packets_total",
		"Packets to or from a VIP, by action and reason.", []string{"action", "reason"}, nil)
	descFlows = prometheus.NewDesc("steelyard_datapath_flows",
		"Flows by state, as of the last walk over the tables.", []string{"state"}, nil)
	descMaxFlows = prometheus.NewDesc("steelyard_max_flows",
		"The configured limit of established flows.", nil, nil)
	descSPackets = prometheus.NewDesc("steelyard_datapath_service_packets_total",
		"Packets of a service, both directions.", serviceLabels, nil)
	descSBytes = prometheus.NewDesc("steelyard_datapath_service_bytes_total",
		"Bytes of a service, both directions, with all headers.", serviceLabels, nil)
	descSFlows = prometheus.NewDesc("steelyard_datapath_service_flows_total",
		"Flows opened to a service.", serviceLabels, nil)
	descBPackets = prometheus.NewDesc("steelyard_datapath_backend_packets_total",
		"Packets forwarded to or from a backend.", []string{"backend"}, nil)
	descBBytes = prometheus.NewDesc("steelyard_datapath_backend_bytes_total",
		"Bytes forwarded to or from a backend, with all headers.", []string{"backend"}, nil)
	descBFlows = prometheus.NewDesc("steelyard_datapath_backend_flows_total",
		"Flows opened to a backend.", []string{"backend"}, nil)
	descHandshakes = prometheus.NewDesc("steelyard_backend_handshake_seconds",
		"Time from a client's first SYN to the backend's SYN-ACK, with nat.", []string{"backend"}, nil)
	descFaults = prometheus.NewDesc("steelyard_datapath_vips_with_fault",
		"VIPs that have backends but whose packets are not delivered; steelyard routes shows the reasons.",
		nil, nil)
	descRepairs = prometheus.NewDesc("steelyard_datapath_repairs_total",
		"Changes by others to programs, pins or forwarding that the agent reverted.",
		[]string{"what"}, nil)
	descOverruns = prometheus.NewDesc("steelyard_datapath_netlink_overruns_total",
		"How often the kernel dropped network notifications; the agent then reads everything again.", nil, nil)
)

// Describe implements prometheus.Collector.
func (d *Datapath) Describe(ch chan<- *prometheus.Desc) {
	for _, x := range []*prometheus.Desc{
		descPackets, descFlows, descMaxFlows, descSPackets, descSBytes, descSFlows, descBPackets, descBBytes,
		descBFlows, descHandshakes, descFaults, descRepairs, descOverruns,
	} {
		ch <- x
	}
}

// Collect implements prometheus.Collector. It reads the kernel's counters at each scrape.
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
	ch <- prometheus.MustNewConstMetric(descFaults, prometheus.GaugeValue, float64(d.verifier.Faults()))
	for what, n := range d.hooks.Repairs() {
		counter(descRepairs, n, what)
	}
	counter(descOverruns, d.verifier.Overruns.Load())
	states := map[string]int{"half_open": s.Flows.HalfOpen, "established": s.Flows.Established,
		"closing": s.Flows.Closing}
	for state, n := range states {
		ch <- prometheus.MustNewConstMetric(descFlows, prometheus.GaugeValue, float64(n), state)
	}
	ch <- prometheus.MustNewConstMetric(descMaxFlows, prometheus.GaugeValue, float64(d.o.MaxFlows))
	frontends, service, _ := d.services.Names()
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
	handshakes, err := d.Handshakes()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descHandshakes, err)
		return
	}
	for at, h := range handshakes {
		if n, below := h.Cumulated(); n > 0 {
			ch <- prometheus.MustNewConstHistogram(descHandshakes, n, h.Sum, below, at.String())
		}
	}
}
