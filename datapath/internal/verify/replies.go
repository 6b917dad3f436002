package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/table"
)

const (
	// RepliesEvery is how long flows are counted between comparisons of servers.
	RepliesEvery = 30 * time.Second
	someFlows    = 10 // fewer say nothing about a server
)

// readContinued compares how many of each server's dsr and tunnel flows the clients have continued. It is the only
// evidence here that such servers reply, because their replies take another path and so do the answers to their checks.
func (v *Verifier) readContinued(now time.Time) {
	w := &v.warned
	if now.Sub(w.continuedAt) < RepliesEvery {
		return
	}
	ids := map[netip.AddrPort]uint32{}
	_, _, backends := v.Services.Names()
	for id, at := range backends {
		ids[at] = id
	}
	was, recent := w.continued, map[netip.AddrPort]table.Traffic{}
	w.continuedAt, w.continued, w.unanswered = now, map[netip.AddrPort]table.Traffic{}, nil
	for _, p := range v.Services.Direct() {
		var best table.Traffic // the server whose clients continue most often
		for _, t := range p.Targets {
			n, err := table.ReadTraffic(v.Counters, ids[t.Addr])
			if before, ok := was[t.Addr]; err == nil && ok && n.Flows >= before.Flows {
				recent[t.Addr] = table.Traffic{
					Flows: n.Flows - before.Flows, Continued: n.Continued - before.Continued,
				}
			}
			w.continued[t.Addr] = n
			if r := recent[t.Addr]; r.Flows >= someFlows && r.Continued*best.Flows >= best.Continued*r.Flows {
				best = r
			}
		}
		for _, t := range p.Targets {
			r := recent[t.Addr]
			if r.Flows >= someFlows && 2*r.Continued < r.Flows && 5*best.Continued >= 4*best.Flows {
				w.unanswered = append(w.unanswered, fmt.Sprintf("of %d connections to %s of %s "+
					"with %s, clients continued %d (another server: %d of %d); do its replies reach the clients?",
					r.Flows, t.Addr, p.Service, p.Method, r.Continued, best.Continued, best.Flows))
			}
		}
	}
	slices.Sort(w.unanswered) // a server occurs once for each address of its service
	w.unanswered = slices.Compact(w.unanswered)
}
