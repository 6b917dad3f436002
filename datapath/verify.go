package datapath

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Times of the verification.
const (
	// confirmAfter is how long a fault must last, because a route that is being replaced is missing for a moment.
	confirmAfter = 200 * time.Millisecond
	// clearAfter is how long nothing must be wrong before a reported fault ends.
	clearAfter = time.Second
	// sweepTime is the time in which all frontends are verified once while nothing changes.
	sweepTime = time.Minute
	// rareTicks is the number of ticks between checks of state that rarely changes without a notification: settings,
	// and routes to clients and backends.
	rareTicks = 2
	// pinTicks is the number of ticks between checks of the pins, which only the next agent needs.
	pinTicks = 3
	// minChecks is the minimum number of frontends verified at a time.
	minChecks = 16
	// maxPause bounds the pause between verifications while the network keeps changing.
	maxPause = 300 * time.Millisecond
)

// verifier checks that packets of clients would be forwarded and packets of servers returned: that our programs are in
// force on the interfaces, that the kernel permits their lookups, and that a synthetic packet for each frontend gets
// the verdict that its plan implies. It repairs what it can, and reports the rest per VIP. It verifies all frontends
// after each network change, and some of them at each tick.
type verifier struct {
	d *Datapath

	mu       sync.Mutex // guards all below
	report   func(map[netip.Addr]string)
	node     condition // affects every VIP
	bad      conditions
	looked   map[netip.Addr]bool // VIPs with a frontend checked since the last report
	ofNode   string              // what was last reported for all VIPs
	reported map[netip.Addr]string
	queue    []lb.Frontend // rest of the sweep
	missed   route.Changes // that were postponed
	sample   lb.Frontend   // the frontend that made uses
	routes   route.Cache
	backends *toBackends // nil if they must be read again
	clients  madeClients
	routers  route.Routers
	reroutes reroutes
	warned   warnings
	inbound  conditions // of packets that other nodes send here, by frontend for decapsulated packets
	view     view
	failed   map[triedBackend]int // synthetic packets that failed in this round, by backend
	// unreached are backends, by id, that synthetic packets do not reach.
	unreached map[uint32]*unreached
	took      time.Duration // of the last round after a change
	rounds    int
}

// condition is a fault that is observed repeatedly.
type condition struct {
	fault     string
	since, ok time.Time // first observed, and first no longer observed; ok is zero while the fault is observed
	confirmed bool
}

// observe records what is wrong now, "" when nothing is.
func (c *condition) observe(fault string, now time.Time) {
	switch {
	case fault != "":
		if c.fault == "" {
			c.since = now
		}
		c.fault, c.ok = fault, time.Time{}
		c.confirmed = c.confirmed || now.Sub(c.since) >= confirmAfter
	case c.ok.IsZero() && c.confirmed:
		c.ok = now
	case !c.confirmed || now.Sub(c.ok) >= clearAfter:
		*c = condition{}
	}
}

// conditions holds the conditions of frontends with a fault, by VIP.
type conditions map[netip.Addr]map[lb.Frontend]*condition

func (all conditions) of(f lb.Frontend) *condition { return all[f.VIP][f] }

// frontends returns the frontends that have a condition.
func (all conditions) frontends() (list []lb.Frontend) {
	for _, ofVIP := range all {
		list = slices.AppendSeq(list, maps.Keys(ofVIP))
	}
	return list
}

// observe records what is wrong with a frontend now, "" when nothing is.
func (all conditions) observe(f lb.Frontend, fault string, now time.Time) {
	c := all.of(f)
	if c == nil && fault == "" {
		return
	}
	if c == nil {
		c = &condition{}
		if all[f.VIP] == nil {
			all[f.VIP] = map[lb.Frontend]*condition{}
		}
		all[f.VIP][f] = c
	}
	if c.observe(fault, now); c.fault != "" {
		return
	}
	if delete(all[f.VIP], f); len(all[f.VIP]) == 0 {
		delete(all, f.VIP)
	}
}

func newVerifier(d *Datapath) *verifier {
	return &verifier{
		d: d, bad: conditions{}, inbound: conditions{}, looked: map[netip.Addr]bool{},
		reported: map[netip.Addr]string{}, unreached: map[uint32]*unreached{},
		clients: madeClients{nics: map[bool]int{}},
	}
}

func (v *verifier) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.routers.Close()
}

// OnFault makes report receive, at each change, what prevents packets of VIPs from being forwarded and answered, or ""
// if nothing does. The first report about a VIP comes before the call to Apply that puts it returns. OnFault must be
// called before Apply and Run.
func (d *Datapath) OnFault(report func(changed map[netip.Addr]string)) { d.verifier.report = report }

// changed verifies all frontends after a network change.
func (v *verifier) changed(found route.Changes) {
	start := time.Now()
	if err := route.Shortage(); err != nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.postpone(found, err)
		return
	}
	if found != (route.Changes{}) { // routes of an interface that is set down vanish without a notification
		v.d.services.RefreshSources()
		if err := v.d.tunnels.Refresh(); err != nil {
			v.d.log.Error("addresses of this node not refreshed", "err", err)
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.routes.Forget(start, route.AfterChange)
	v.queue = v.d.services.Held()
	v.reroutes.look(start, v.d.services.Reroutes())
	v.round(found, len(v.queue))
	v.took = time.Since(start)
}

// pause returns the time until the next verification after a change.
func (v *verifier) pause() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	return min(2*v.took, maxPause)
}

// tick verifies the node and some of the frontends, or all of them after a postponed change.
func (v *verifier) tick() {
	if missed := v.takePostponed(); missed != (route.Changes{}) {
		v.changed(missed)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := route.Shortage(); err != nil {
		v.postpone(route.Changes{}, err)
		return
	}
	if len(v.queue) == 0 {
		v.queue = v.d.services.Held()
	}
	v.round(route.Changes{}, max(minChecks, v.d.services.Count()*int(route.Tick)/int(sweepTime)))
}

// round verifies the node, the frontends with a fault, and n frontends of the queue.
func (v *verifier) round(found route.Changes, n int) {
	now := time.Now()
	v.routes.Expire(now)
	v.rounds++
	rare := found != (route.Changes{}) || v.rounds%rareTicks == 0
	if found != (route.Changes{}) || v.rounds%pinTicks == 0 {
		v.repairPins()
	}
	faults := v.repair(found, rare)
	v.node.observe(strings.Join(faults, "; "), now)
	v.look(rare)
	v.reroutes.probe(v.d.services.Accept)
	n = min(n, len(v.queue))
	next := v.queue[:n]
	v.queue = v.queue[n:]
	again := slices.Concat(v.bad.frontends(), v.inbound.frontends())
	for _, f := range again {
		v.check(f, now)
	}
	for _, f := range next {
		if v.bad.of(f) == nil && v.inbound.of(f) == nil {
			v.check(f, now)
		}
	}
	if found != (route.Changes{}) {
		next = nil // all frontends were verified; one packet for each is enough
	}
	v.tryBackends(next, now)
	v.publish()
	v.warn(found, now)
}

// repairPins restores the pins. A failure affects no packets.
func (v *verifier) repairPins() {
	v.warned.notPinned = ""
	if err := v.d.hooks.RepairPins(); err != nil {
		v.warned.notPinned = err.Error()
	}
}

// repair restores the programs, and returns what cannot be restored. If rare is set, it also restores kernel settings,
// and attaches the programs to interfaces that routes lead to.
func (v *verifier) repair(found route.Changes, rare bool) (faults []string) {
	if err := v.d.hooks.RepairChain(); err != nil {
		faults = append(faults, err.Error())
	}
	if rare {
		v.d.hooks.Follow(v.d.needed(&v.routes, v.toBackends().interfaces))
		v.d.hooks.RepairForwarding()
	}
	return append(faults, v.d.hooks.Repair(found.Links, v.made())...)
}

// made returns a synthetic packet for a frontend that has backends, or nil if there is no such frontend.
func (v *verifier) made() []byte {
	if _, ok := v.d.services.Subject(v.sample); !ok {
		v.sample = lb.Frontend{}
		for _, f := range v.d.services.Held() {
			if _, ok := v.d.services.Subject(f); ok {
				v.sample = f
				break
			}
		}
	}
	f := v.sample
	if s, ok := v.d.services.Subject(f); ok {
		if client, ok := v.clients.of(f.VIP, s.Plan.Allow); ok && client.IsValid() {
			from, to := netip.AddrPortFrom(client, anyPort()), netip.AddrPortFrom(f.VIP, f.Port)
			return opening(lb.Question{Client: from, To: to, Protocol: f.Protocol})
		}
	}
	return nil
}

// look reads the state that results of synthetic packets are compared with. With choose, or for the first time, it
// chooses their clients.
func (v *verifier) look(choose bool) {
	v.view = view{v.d.hooks.View(), v.d.tunnels.Addresses()}
	if choose && v.clients.chosen != v.routes.Since || !v.clients.v4.IsValid() {
		v.clients.choose(v.view, &v.routes)
	}
	if now := time.Now(); v.routers.Due(now) {
		var clients []netip.Addr
		for _, q := range v.d.flows.RecentClients() {
			clients = append(clients, q.Client.Addr())
		}
		v.routers.Look(now, &v.routes, clients, v.toBackends().routers)
	}
	v.failed = map[triedBackend]int{}
	v.warned.notRun = ""
}

// applied verifies frontends that were put. A fault of a frontend that had no backend before is reported at once: its
// VIP may not have been announced yet, or was withdrawn, and its earlier fault is no longer known.
func (v *verifier) applied(updates []*table.Update, removed []lb.Frontend) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, f := range removed {
		v.looked[f.VIP] = true
	}
	if err := route.Shortage(); err != nil {
		v.postpone(route.Changes{Links: true, Routes: true}, err)
		return
	}
	v.backends = nil
	v.d.hooks.Follow(v.d.services.Interfaces(updates))
	v.look(false)
	now := time.Now()
	ofNode := ""
	if !v.node.confirmed && slices.ContainsFunc(updates, func(u *table.Update) bool { return u.Usable() }) {
		ofNode = strings.Join(v.repair(route.Changes{}, false), "; ") // without frontends some checks were skipped
	}
	for _, u := range updates {
		if u.Err != nil {
			continue
		}
		v.check(u.Plan.Frontend, now)
		if ofNode != "" && u.Usable() {
			v.bad.observe(u.Plan.Frontend, ofNode, now)
		}
		if c := v.bad.of(u.Plan.Frontend); c != nil && u.First {
			c.confirmed = true
		}
	}
	v.publish()
}

// check verifies one frontend.
func (v *verifier) check(f lb.Frontend, now time.Time) {
	if f.Decap {
		v.inbound.observe(f, v.inboundFault(f), now)
		return
	}
	fault := ""
	if s, ok := v.d.services.Subject(f); ok {
		fault = v.fault(f, s)
	}
	v.bad.observe(f, fault, now)
	v.looked[f.VIP] = true
}

// publish reports changes of the VIPs that were checked, or of all VIPs if the node is affected.
func (v *verifier) publish() {
	ofNode := ""
	if v.node.confirmed {
		ofNode = v.node.fault
	}
	if ofNode != v.ofNode {
		v.ofNode = ofNode
		for _, f := range v.d.services.Held() {
			v.looked[f.VIP] = true
		}
	}
	changed := map[netip.Addr]string{}
	for addr := range v.looked {
		fault := v.faultOfVIP(addr)
		if fault == v.reported[addr] {
			continue
		}
		changed[addr], v.reported[addr] = fault, fault
		if fault == "" {
			delete(v.reported, addr)
		}
	}
	v.looked = map[netip.Addr]bool{}
	if len(changed) > 0 && v.report != nil {
		v.report(changed)
	}
}

// faultOfVIP returns what prevents packets of a VIP from being forwarded and answered, or "" if nothing is known.
func (v *verifier) faultOfVIP(addr netip.Addr) (fault string) {
	if v.ofNode != "" && v.d.services.Has(addr) {
		return v.ofNode
	}
	for _, c := range v.bad[addr] {
		if c.confirmed && (fault == "" || c.fault < fault) {
			fault = c.fault
		}
	}
	return fault
}

// faults returns the number of VIPs with a fault.
func (v *verifier) faults() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.reported)
}
