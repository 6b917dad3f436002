package datapath

import (
	"fmt"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// attendance tells the programs that an agent collects flows. Without that, they reclaim entries themselves
// (bpf/reclaim.h).
type attendance struct {
	objects *bpf.Objects
	state   [2]bpf.Collector // by table, as in sy_collector
}

// openAttendance continues the attendance of an earlier agent. empty means that there was none, and that there are no
// flows.
func openAttendance(o *bpf.Objects, empty bool) (*attendance, error) {
	a := &attendance{objects: o}
	for i := range a.state {
		if err := o.SyCollector.Lookup(uint32(i), &a.state[i]); err != nil {
			return nil, fmt.Errorf("read the state of the collection: %w", err)
		}
		if empty {
			a.state[i].PlaceFrom = a.half(i)
		}
	}
	return a, a.write()
}

// half returns half of the table's capacity in flows.
func (a *attendance) half(table int) uint32 {
	if table == 0 {
		return a.objects.SyUdpServers.MaxEntries() / 2
	}
	return a.objects.SyStreamServers.MaxEntries() / 2
}

// write records that the agent is running. It must be called every few seconds.
func (a *attendance) write() error {
	for i := range a.state {
		a.state[i].Seen = bpf.FlowClock(bpf.Uptime())
		if err := a.objects.SyCollector.Put(uint32(i), a.state[i]); err != nil {
			return fmt.Errorf("write the state of the collection: %w", err)
		}
	}
	return nil
}

// stored returns the number of flows ever stored in each table.
func (a *attendance) stored() (n [2]uint32, err error) {
	for i := range n {
		if err := a.objects.SyStored.Lookup(uint32(i), &n[i]); err != nil {
			return n, fmt.Errorf("read how many flows were stored: %w", err)
		}
	}
	return n, nil
}

// counted makes new flows get a place once a table is half full. left is the number of flows in each table after a
// walk, before the number ever stored when the walk began.
func (a *attendance) counted(left, before [2]uint32) error {
	for i := range a.state {
		half := a.half(i)
		a.state[i].PlaceFrom = before[i] + half - min(half, left[i])
	}
	return a.write()
}
