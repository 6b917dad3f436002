package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// RepliesEvery is how long flows are counted between comparisons.
	RepliesEvery = 30 * time.Second
	someFlows    = 10 // fewer say nothing
)

// continued holds the last reading of how many flows there were, and how many of them clients continued.
type continued struct {
	at      time.Time
	servers map[netip.AddrPort]table.Traffic
	ports   map[lb.Frontend]table.Traffic
	good    map[lb.Frontend]table.Traffic // of the last interval without a fault; zero until most clients continue
	// texts about servers and ports whose clients do not continue
	serverFaults, portFaults []string
}

// readContinued compares how many flows clients have continued: each server with the best of its siblings, and each
// port with its past. Checks do not show this if a firewall treats clients differently, or if replies to clients take
// another path. Clients also do not continue forged SYNs. So a port has a fault only if the number of continued flows
// has fallen from one interval to the next, which a flood does not cause.
func (v *Verifier) readContinued(now time.Time) {
	was := v.warned.continued
	if now.Sub(was.at) < RepliesEvery {
		return
	}
	c := continued{
		at: now, servers: map[netip.AddrPort]table.Traffic{}, ports: map[lb.Frontend]table.Traffic{},
		good: map[lb.Frontend]table.Traffic{},
	}
	frontends, _, backends := v.Services.Names()
	ports, servers := ids(frontends), ids(backends)
	for _, p := range v.Services.Balanced() {
		port := recent(v.Chunks.FrontendCounters, ports, p.Frontend, was.ports, c.ports)
		good, ok := was.good[p.Frontend]
		if !ok && mostContinue(c.ports[p.Frontend]) {
			good = c.ports[p.Frontend] // since the port exists: an earlier agent may have found the fault
		}
		fewer := manyLost(port) && 3*port.Continued < 2*good.Continued
		if port.Flows >= someFlows && !fewer && (mostContinue(port) || good.Flows > 0) {
			good = port // traffic may decrease without a fault
		}
		c.good[p.Frontend] = good
		faults := len(c.serverFaults)
		var best table.Traffic // of the server whose clients continue most often
		for _, t := range p.Targets {
			r := recent(v.Chunks.BackendCounters, servers, t.Addr, was.servers, c.servers)
			if r.Flows >= someFlows && r.Continued*best.Flows >= best.Continued*r.Flows {
				best = r
			}
		}
		for _, t := range p.Targets {
			r := since(t.Addr, was.servers, c.servers)
			if best.Flows > 0 && mostContinue(best) && manyLost(r) {
				c.serverFaults = append(c.serverFaults, fmt.Sprintf("of %d connections to %s of %s with %s, clients "+
					"continued %d (another server: %d of %d); do its replies reach the clients?",
					r.Flows, t.Addr, p.Service, p.Method, r.Continued, best.Continued, best.Flows))
			}
		}
		if len(c.serverFaults) == faults && fewer {
			c.portFaults = append(c.portFaults, fmt.Sprintf("of %d connections to %s of %s, clients continued %d "+
				"(before: %d of %d), whichever server got them", port.Flows, p.Frontend, p.Service, port.Continued,
				good.Continued, good.Flows))
		}
	}
	slices.Sort(c.serverFaults) // a server occurs once for each address of its service
	c.serverFaults = slices.Compact(c.serverFaults)
	slices.Sort(c.portFaults)
	v.warned.continued = c
}

func mostContinue(t table.Traffic) bool { return 5*t.Continued >= 4*t.Flows }

func manyLost(t table.Traffic) bool {
	lost := int64(t.Flows - t.Continued) // some flows continued later than they were counted
	return lost >= someFlows && 3*lost > int64(t.Flows)
}

func ids[K comparable](names map[uint32]K) map[K]uint32 {
	all := make(map[K]uint32, len(names))
	for id, k := range names {
		all[k] = id
	}
	return all
}

// recent reads the counters of k into now, and returns what was counted since they were read into was.
func recent[K comparable](c *table.Chunked, ids map[K]uint32, k K, was, now map[K]table.Traffic) table.Traffic {
	if _, ok := now[k]; !ok {
		if n, err := table.ReadTraffic(c, ids[k]); err == nil {
			now[k] = n
		}
	}
	return since(k, was, now)
}

func since[K comparable](k K, was, now map[K]table.Traffic) table.Traffic {
	n, before := now[k], was[k]
	if _, ok := was[k]; !ok || n.Flows < before.Flows || n.Continued < before.Continued {
		return table.Traffic{}
	}
	return table.Traffic{Flows: n.Flows - before.Flows, Continued: n.Continued - before.Continued}
}
