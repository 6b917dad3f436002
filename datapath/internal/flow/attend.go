package flow

import (
	"fmt"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Resume reads the collection's state. If empty is set, there are no flows, and it starts over.
func (g *Collector) Resume(empty bool) error {
	g.empty = nil
	for i := range g.state {
		if err := g.objects.SyCollector.Lookup(uint32(i), &g.state[i]); err != nil {
			return fmt.Errorf("read the state of the collection: %w", err)
		}
		if empty {
			g.state[i].PlaceFrom = g.half(i)
		}
	}
	return g.writeState()
}

// half returns half of a table's capacity in flows.
func (g *Collector) half(table int) uint32 {
	if table == 0 {
		return g.objects.SyUdpServers.MaxEntries() / 2
	}
	return g.objects.SyStreamServers.MaxEntries() / 2
}

// attend tells the programs that an agent collects flows. Call it every few seconds; otherwise the programs reclaim
// entries themselves (bpf/reclaim.h).
func (g *Collector) attend() {
	if err := g.writeState(); err != nil {
		g.log.Error("heartbeat of the flow collection not written", "err", err)
	}
}

func (g *Collector) writeState() error {
	for i := range g.state {
		g.state[i].Seen = bpf.FlowClock(bpf.Uptime())
		if err := g.objects.SyCollector.Put(uint32(i), g.state[i]); err != nil {
			return fmt.Errorf("write the state of the collection: %w", err)
		}
	}
	return nil
}

// stored returns the number of flows ever stored in each table.
func (g *Collector) stored() (n [2]uint32, err error) {
	for i := range n {
		if err := g.objects.SyStored.Lookup(uint32(i), &n[i]); err != nil {
			return n, fmt.Errorf("read the number of stored flows: %w", err)
		}
	}
	return n, nil
}

// counted sets, for each table, the number of stored flows from which new flows have a place (bpf/reclaim.h), so that
// they have one when the table is half full. left is the number of flows in each table after a walk, and before the
// number of flows ever stored when the walk began.
func (g *Collector) counted(left, before [2]uint32) error {
	for i := range g.state {
		half := g.half(i)
		g.state[i].PlaceFrom = before[i] + half - min(half, left[i])
	}
	return g.writeState()
}
