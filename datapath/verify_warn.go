package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// warnEvery is how often recent clients and capacities are looked at while nothing changes.
const warnEvery = 5 * time.Second

// warnings are states in which some packets are lost, or in which that is not known. They withdraw no address.
type warnings struct {
	at        time.Time                 // when clients and capacities were looked at
	lost      condition                 // replies to recent clients
	lostSince map[lb.Question]time.Time // clients without a reply, since when
	notRun    string                    // why made packets could not be run in this round; "": they could
	blind     condition                 // made packets cannot be run
	noRoute   condition                 // no client behind a router has a route
	unpinned  condition                 // pins cannot be restored
	notPinned string                    // why, in this round
	drops     map[string]uint64
	exhausted map[string]*exhaustion // capacities that were exhausted lately, by reason
}

// run runs sy_explain on a frame. It returns false when that is not possible: a shortage of this node says nothing
// about an address.
func (v *verifier) run(frame []byte) (syExplained, bool) {
	x, err := v.d.explainFrame(frame)
	if err != nil {
		v.warned.notRun = err.Error()
	}
	return x, err == nil
}

// warn looks for what concerns some packets only.
func (v *verifier) warn(found changes, now time.Time) {
	w := &v.warned
	due := now.Sub(w.at) >= warnEvery
	if found.routes || due || w.lost.fault != "" {
		w.lost.observe(v.lostClients(v.d.gc.recentClients(), now), now)
	}
	w.blind.observe(w.notRun, now)
	w.noRoute.observe(v.noRoute(), now)
	w.unpinned.observe(w.notPinned, now)
	if due {
		w.at = now
		v.readCapacities(now)
	}
}

// noRoute returns which VIPs have no client behind a router that gets replies, where routers know them; "": none. It is
// no fault: the clients may be on the links of this node.
func (v *verifier) noRoute() string {
	no4, no6 := v.clients.had4 == reachLink, v.clients.had6 == reachLink
	if !v.d.o.Routers || !no4 && !no6 {
		return ""
	}
	var vip netip.Addr
	for _, f := range v.d.services.held() {
		if no := f.VIP.Is4() && no4 || f.VIP.Is6() && no6; no && (!vip.IsValid() || f.VIP.Less(vip)) {
			vip = f.VIP
		}
	}
	if !vip.IsValid() {
		return ""
	}
	return fmt.Sprintf("only clients on the links of this node get replies from %s: there is no default route", vip)
}

// Warnings returns states in which some packets are lost although addresses are announced, or in which that is not
// known.
func (d *Datapath) Warnings() (list []string) {
	list = d.uplinks.hidden()
	if kept := d.keptSize(); kept != "" {
		list = append(list, kept)
	}
	if open := d.pins.openToAll(); open != "" {
		list = append(list, open)
	}
	v := d.verifier
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.warned.blind.confirmed {
		list = append(list, "packets cannot be verified: "+v.warned.blind.fault)
	}
	if v.warned.unpinned.confirmed {
		list = append(list, "the next start of the agent ends all connections: "+v.warned.unpinned.fault)
	}
	if v.warned.noRoute.confirmed {
		list = append(list, v.warned.noRoute.fault)
	}
	list = append(list, v.warned.capacities()...)
	if v.warned.lost.confirmed {
		list = append(list, v.warned.lost.fault)
	}
	var faults []string
	for _, f := range v.inbound.frontends() {
		if c := v.inbound.of(f); c.confirmed {
			faults = append(faults, inboundWarning+c.fault)
		}
	}
	slices.Sort(faults)
	return append(list, slices.Compact(faults)...)
}
