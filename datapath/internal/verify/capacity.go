package verify

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// keyMismatch is the reason for dropping packets from nodes or balancers that have another key or none.
const keyMismatch = "tunnel_key_mismatch"

// warnedReasons lists keyMismatch and the reasons for refusing packets of new flows because of a limit of this node.
// They are not a fault of an address, because other flows continue.
var warnedReasons = []string{"flows_full", "snat_exhausted", "udp_share_full", keyMismatch}

const (
	// ExhaustedFor is how long a finding about an exhausted capacity stays after the last refused packet, and the time
	// in which packets are counted for its severity.
	ExhaustedFor = time.Minute
	// ownerPorts is the number of client ports in the search for the service that has exhausted a capacity. Several are
	// needed because the hash of each synthetic packet may select another backend.
	ownerPorts = 16
	// ownerPackets bounds the synthetic packets per search.
	ownerPackets = 4096
)

// exhaustion describes the packets that found a capacity exhausted.
type exhaustion struct {
	since   time.Time
	packets uint64
	many    bool            // more than a warning
	owners  map[string]bool // services, with the backend whose ports are in use
}

// reading is what the counters said at a time.
type reading struct {
	at     time.Time
	drops  map[string]uint64
	opened uint64 // flows, since the first reading
}

// readCapacities compares the counters of warnedReasons with their previous values.
func (v *Verifier) readCapacities(now time.Time) {
	packets, err := table.ReadVerdicts(v.Objects.SyVerdicts)
	if err != nil {
		v.Log.Debug("counters not read", "err", err)
		return
	}
	drops := map[string]uint64{}
	width := len(v.Names.Reasons) - 1 // the last name is the end mark
	for i, n := range packets {
		drops[v.Names.Reasons[i%width]] += n
	}
	frontends, _, _ := v.Services.Names()
	w, of, flows := &v.warned, ids(frontends), map[lb.Frontend]table.Traffic{}
	is := reading{at: now, drops: drops}
	for f := range of {
		is.opened += recent(v.Chunks.FrontendCounters, of, f, w.flows, flows).Flows
	}
	w.flows = flows
	if len(w.readings) == 0 {
		w.readings, w.exhausted = []reading{is}, map[string]*exhaustion{}
		return
	}
	was := w.readings[len(w.readings)-1]
	is.opened += was.opened
	w.readings = append(w.readings, is)
	for now.Sub(w.readings[1].at) >= ExhaustedFor {
		w.readings = w.readings[1:]
	}
	first := w.readings[0]
	for _, reason := range warnedReasons {
		x, n, lately := w.exhausted[reason], drops[reason]-was.drops[reason], drops[reason]-first.drops[reason]
		switch {
		case lately == 0:
			delete(w.exhausted, reason)
			continue
		case x == nil:
			x = &exhaustion{since: now.Add(-WarnEvery), owners: map[string]bool{}}
			w.exhausted[reason] = x
		}
		x.many = lately > fewDrops || 100*lately >= lately+is.opened-first.opened
		if n > 0 {
			x.packets += n
			v.FindOwners(reason, x.owners)
		}
	}
}

// FindOwners adds the services whose synthetic packets find a capacity exhausted.
func (v *Verifier) FindOwners(reason string, owners map[string]bool) {
	if reason == "flows_full" || reason == keyMismatch { // all services share it
		return
	}
	frontends, service, backends := v.Services.Names()
	left := ownerPackets
	for id, f := range frontends { // in random order
		from := v.Clients.v4
		if f.VIP.Is6() {
			from = v.Clients.v6
		}
		if f.Decap || !from.IsValid() || reason == "udp_share_full" && f.Protocol != lb.UDP {
			continue
		}
		for port := range uint16(ownerPorts) {
			if left--; left < 0 {
				return
			}
			client := netip.AddrPortFrom(from, 40000+port)
			x, ok := v.run(opening(lb.Question{
				Client: client, To: netip.AddrPortFrom(f.VIP, f.Port), Protocol: f.Protocol,
			}))
			if !ok {
				return
			}
			if v.Names.Reasons[x.V.Reason] != reason {
				continue
			}
			if at, ok := backends[x.V.Backend]; ok && reason == "snat_exhausted" {
				owners[fmt.Sprintf("%s to %s", service[id], at)] = true
				continue
			}
			owners[service[id]] = true
			break
		}
	}
}

// fewDrops is the largest number of dropped packets in ExhaustedFor that is only a warning, provided that they are less
// than one in a hundred new connections.
const fewDrops = 10

// capacities returns a finding for each of warnedReasons for which packets were recently dropped or refused.
func (v *Verifier) capacities() (list []lb.Finding) {
	for _, reason := range warnedReasons {
		x := v.warned.exhausted[reason]
		what, kind := "packets of new connections were dropped or reset", lb.FoundCapacity
		if x == nil {
			continue
		}
		if reason == keyMismatch {
			what, kind = "tunnel packets were dropped", lb.FoundTunnelKeyMismatch
		}
		text := fmt.Sprintf("%d %s since %s: %s", x.packets, what, x.since.Format(time.TimeOnly), reason)
		switch {
		case len(x.owners) > 0:
			text += " (" + strings.Join(slices.Sorted(maps.Keys(x.owners)), ", ") + ")"
		case reason == "snat_exhausted" || reason == "udp_share_full":
			text += " (\"steelyard flows\" lists the flows of services and servers)"
		}
		found := kind.About(reason, "%s: %s", text, v.Meaning(reason))
		if !x.many {
			found = found.As(lb.SeverityWarning)
		}
		list = append(list, found)
	}
	return list
}
