package inside

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

var (
	descOpened = prometheus.NewDesc("steelyard_proxy_connections_total",
		"Connections and UDP flows that the service proxy has sent to an endpoint.", nil, nil)
	descRejected = prometheus.NewDesc("steelyard_proxy_rejected_packets_total",
		"Packets to Services that the service proxy has refused or dropped, by reason.", []string{"reason"}, nil)
	descFlows = prometheus.NewDesc("steelyard_proxy_flows",
		"Flows in the service proxy's table: inside, of this node and its pods; node, of others to node ports. "+
			"Updated every 10 s; includes flows that have just ended.", []string{"scope"}, nil)
	descMaxFlows = prometheus.NewDesc("steelyard_proxy_max_flows",
		"Maximum number of flows in the service proxy's table: in total (inside), and from other machines (node).",
		[]string{"scope"}, nil)
)

// Describe implements prometheus.Collector.
func (i *Inside) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOpened, descRejected, descFlows, descMaxFlows} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It reads the kernel's counters at each scrape.
func (i *Inside) Collect(ch chan<- prometheus.Metric) {
	reasons, err := prog.Reasons()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descRejected, err)
		return
	}
	for reason, name := range reasons[:i.objects.Counters.MaxEntries()] {
		var perCPU []uint64
		if err := i.objects.Counters.Lookup(uint32(reason), &perCPU); err != nil {
			ch <- prometheus.NewInvalidMetric(descRejected, fmt.Errorf("read the counters: %w", err))
			return
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		switch {
		case name == prog.None:
			ch <- prometheus.MustNewConstMetric(descOpened, prometheus.CounterValue, float64(sum))
		case sum > 0:
			ch <- prometheus.MustNewConstMetric(descRejected, prometheus.CounterValue, float64(sum), name)
		}
	}
	most := i.objects.Flows.MaxEntries() / 2 // a flow has two entries
	for scope, limit := range map[lb.Scope]uint32{lb.ScopeInside: most, lb.ScopeNode: most / 2} {
		ch <- prometheus.MustNewConstMetric(descMaxFlows, prometheus.GaugeValue, float64(limit), string(scope))
	}
	if counts := i.flows.counts.Load(); counts != nil {
		for scope, entries := range *counts {
			ch <- prometheus.MustNewConstMetric(descFlows, prometheus.GaugeValue, float64(entries)/2, string(scope))
		}
	}
}
