package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// WarnEvery is the interval between checks of recent clients and capacities while nothing changes.
const WarnEvery = 5 * time.Second

// warnings holds states in which some packets are lost, or may be lost unnoticed. They withdraw no address.
type warnings struct {
	at        time.Time                     // when clients and capacities were last checked
	lost      condition                     // replies to recent clients are lost
	lostSince map[lb.Question]time.Time     // clients without a reply, and since when
	notRun    string                        // why synthetic packets could not be run in this round, or ""
	blind     condition                     // synthetic packets cannot be run
	noRoute   condition                     // no client behind a router has a route
	unpinned  condition                     // pins cannot be restored
	notPinned string                        // why, in this round, or ""
	readings  []reading                     // of the last ExhaustedFor
	flows     map[lb.Frontend]table.Traffic // as last read
	exhausted map[string]*exhaustion        // recently exhausted capacities, by reason

	continued continued
}

// run runs sy_explain on a frame. It returns false if that fails, because a shortage on this node says nothing about an
// address.
func (v *Verifier) run(frame []byte) (bpf.Explained, bool) {
	x, err := v.ExplainFrame(frame)
	if err != nil {
		v.warned.notRun = err.Error()
	}
	return x, err == nil
}

// Warn checks for problems that affect only some packets.
func (v *Verifier) Warn(found route.Changes, now time.Time) {
	w := &v.warned
	due := now.Sub(w.at) >= WarnEvery
	if found.Routes || due || w.lost.fault != "" {
		w.lost.observe(v.LostClients(v.Flows.RecentClients(), now), now)
	}
	w.blind.observe(w.notRun, now)
	w.noRoute.observe(v.noRoute(), now)
	w.unpinned.observe(w.notPinned, now)
	if due {
		w.at = now
		v.readCapacities(now)
		v.readContinued(now)
	}
}

// noRoute returns a warning if routers know the VIPs but no client behind a router receives replies, and otherwise "".
// This is not a fault, because the clients may be on this node's links.
func (v *Verifier) noRoute() string {
	no4, no6 := v.Clients.Had4 == reachLink, v.Clients.had6 == reachLink
	if !v.o.Routers || !no4 && !no6 {
		return ""
	}
	var vip netip.Addr
	for _, f := range v.Services.Held() {
		if no := f.VIP.Is4() && no4 || f.VIP.Is6() && no6; no && (!vip.IsValid() || f.VIP.Less(vip)) {
			vip = f.VIP
		}
	}
	if !vip.IsValid() {
		return ""
	}
	return fmt.Sprintf("only clients on this node's links get replies from %s, because there is no default route", vip)
}

// Findings returns states that lose or may lose packets although addresses are announced, and changes that Cleanup
// cannot undo.
func (v *Verifier) Findings() []lb.Finding {
	all := slices.Concat(v.unreachedBackends(), v.Hooks.Findings())
	v.Mu.Lock()
	defer v.Mu.Unlock()
	add := func(k *lb.FindingKind, c condition, prefix string) {
		if c.confirmed {
			all = append(all, k.About("", "%s%s", prefix, c.fault))
		}
	}
	add(lb.FoundUnverified, v.warned.blind, "packets cannot be verified: ")
	add(lb.FoundPinsLost, v.warned.unpinned, "the next start of the agent ends all connections: ")
	add(lb.FoundNoDefaultRoute, v.warned.noRoute, "")
	all = slices.Concat(all, v.capacities(), lb.FoundUnanswered.Each(v.warned.continued.portFaults),
		lb.FoundServerReplies.Each(v.warned.continued.serverFaults))
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
			faults = append(faults, InboundWarning+c.fault)
		}
	}
	slices.Sort(faults)
	return append(all, lb.FoundFromOtherNodes.Each(slices.Compact(faults))...)
}
