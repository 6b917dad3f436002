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
	// ExhaustedFor is how long the warning about an exhausted capacity stays after the last refused packet.
	ExhaustedFor = time.Minute
	// ownerPorts is the number of client ports in the search for the service that has exhausted a capacity. Several are
	// needed because the hash of each synthetic packet may select another backend.
	ownerPorts = 16
	// ownerPackets bounds the synthetic packets per search.
	ownerPackets = 4096
)

// exhaustion describes the packets that found a capacity exhausted.
type exhaustion struct {
	since, last time.Time
	packets     uint64
	owners      map[string]bool // services, with the backend whose ports are in use
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
	w := &v.warned
	was := w.drops
	w.drops = drops
	if was == nil {
		w.exhausted = map[string]*exhaustion{}
		return
	}
	for _, reason := range warnedReasons {
		x, n := w.exhausted[reason], drops[reason]-was[reason]
		switch {
		case n > 0 && x == nil:
			x = &exhaustion{since: now.Add(-WarnEvery), owners: map[string]bool{}}
			w.exhausted[reason] = x
		case n == 0 && x != nil && now.Sub(x.last) >= ExhaustedFor:
			delete(w.exhausted, reason)
		}
		if n > 0 {
			x.last = now
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

// fewDrops is the largest number of dropped packets that is only a warning.
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
		if x.packets <= fewDrops {
			found = found.As(lb.SeverityWarning)
		}
		list = append(list, found)
	}
	return list
}
