package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// warnEvery is the interval of checks of recent clients and capacities while nothing changes.
const warnEvery = 5 * time.Second

// warnings are states in which some packets are lost, or may be lost without being noticed. They withdraw no address.
type warnings struct {
	at        time.Time                 // when clients and capacities were last checked
	lost      condition                 // replies to recent clients
	lostSince map[lb.Question]time.Time // clients without a reply, since when
	notRun    string                    // why synthetic packets could not be run in this round, or ""
	blind     condition                 // synthetic packets cannot be run
	noRoute   condition                 // no client behind a router has a route
	unpinned  condition                 // pins cannot be restored
	notPinned string                    // why, in this round, or ""
	drops     map[string]uint64
	exhausted map[string]*exhaustion // recently exhausted capacities, by reason
}

// run runs sy_explain on a frame. It returns false if that fails: a shortage of this node says nothing about an
// address.
func (v *verifier) run(frame []byte) (bpf.Explained, bool) {
	x, err := v.d.explainFrame(frame)
	if err != nil {
		v.warned.notRun = err.Error()
	}
	return x, err == nil
}

// warn looks for problems that affect only some packets.
func (v *verifier) warn(found route.Changes, now time.Time) {
	w := &v.warned
	due := now.Sub(w.at) >= warnEvery
	if found.Routes || due || w.lost.fault != "" {
		w.lost.observe(v.lostClients(v.d.flows.RecentClients(), now), now)
	}
	w.blind.observe(w.notRun, now)
	w.noRoute.observe(v.noRoute(), now)
	w.unpinned.observe(w.notPinned, now)
	if due {
		w.at = now
		v.readCapacities(now)
	}
}

// noRoute returns a text if routers know the VIPs but no client behind a router gets replies, or "". This is not a
// fault, because the clients may be on the links of this node.
func (v *verifier) noRoute() string {
	no4, no6 := v.clients.had4 == reachLink, v.clients.had6 == reachLink
	if !v.d.o.Routers || !no4 && !no6 {
		return ""
	}
	var vip netip.Addr
	for _, f := range v.d.services.Held() {
		if no := f.VIP.Is4() && no4 || f.VIP.Is6() && no6; no && (!vip.IsValid() || f.VIP.Less(vip)) {
			vip = f.VIP
		}
	}
	if !vip.IsValid() {
		return ""
	}
	return fmt.Sprintf("only clients on the links of this node get replies from %s: there is no default route", vip)
}

// Findings returns states in which packets are lost, or may be, although addresses are announced, and changes that
// Cleanup cannot undo.
func (d *Datapath) Findings() []lb.Finding {
	all := slices.Concat(d.verifier.unreachedBackends(), d.hooks.Findings(), d.keptSize(), d.pinsWritable())
	v := d.verifier
	v.mu.Lock()
	defer v.mu.Unlock()
	add := func(k *lb.FindingKind, c condition, prefix string) {
		if c.confirmed {
			all = append(all, k.About("", "%s%s", prefix, c.fault))
		}
	}
	add(lb.FoundUnverified, v.warned.blind, "packets cannot be verified: ")
	add(lb.FoundPinsLost, v.warned.unpinned, "the next start of the agent ends all connections: ")
	add(lb.FoundNoDefaultRoute, v.warned.noRoute, "")
	all = append(all, v.warned.capacities()...)
	if c := v.warned.lost; c.confirmed {
		f := lb.FoundRepliesLost.About("", "%s", c.fault)
		if len(v.warned.lostSince) < 2 {
			f = f.As(lb.SeverityWarning)
		}
		all = append(all, f)
	}
	var faults []string
	for _, f := range v.inbound.frontends() {
		if c := v.inbound.of(f); c.confirmed {
			faults = append(faults, inboundWarning+c.fault)
		}
	}
	slices.Sort(faults)
	return append(all, lb.FoundFromOtherNodes.Each(slices.Compact(faults))...)
}
