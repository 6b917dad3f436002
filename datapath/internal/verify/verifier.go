package verify

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Intervals and limits of the verification.
const (
	// ConfirmAfter is how long a fault must last before it counts, because a route is briefly missing while it is
	// replaced.
	ConfirmAfter = 200 * time.Millisecond
	// ClearAfter is how long a reported fault must be absent before it ends.
	ClearAfter = time.Second
	// sweepTime is the time in which all frontends are verified once while nothing changes.
	sweepTime = time.Minute
	// calmTicks is the number of ticks between rounds while no fault is known. It is also the number of ticks between
	// checks of the pins, which only the next agent needs.
	calmTicks = 4
	// rareTicks is the number of ticks between checks of state that rarely changes without a notification: settings,
	// and routes to clients and backends.
	rareTicks = 2
	// minChecks is the minimum number of frontends verified per tick.
	minChecks = 16
	// maxPause bounds the pause between verifications while the network keeps changing.
	maxPause = 300 * time.Millisecond
)

// Verifier checks that clients' packets would be forwarded and servers' packets returned. It checks that our programs
// are active on the interfaces, that the kernel permits their lookups, and that a synthetic packet for each frontend
// gets the verdict that its plan implies. It repairs what it can, and reports the rest per VIP. It verifies all
// frontends after each network change, and some of them in each round.
type Verifier struct {
	Deps
	o Options
	// Report receives, for each VIP whose state changes, why its packets are not forwarded or answered, or "".
	Report   func(changed map[netip.Addr]string)
	Overruns atomic.Uint64 // how often the kernel dropped notifications about the network

	Mu       sync.Mutex // guards all below
	node     condition  // fault that affects every VIP
	bad      conditions
	looked   map[netip.Addr]bool // VIPs with a frontend checked since the last report
	ofNode   string              // last fault reported for all VIPs
	reported map[netip.Addr]string
	queue    []lb.Frontend // rest of the sweep
	sweep    int           // length of the queue when the sweep began
	missed   route.Changes // postponed changes
	sample   lb.Frontend   // frontend of the packet that made returns
	Routes   route.Cache
	ruled    time.Time   // route.Cache.Since when the routing rules were read
	backends *toBackends // nil if they must be reread
	Clients  Clients
	Routers  route.Routers
	reroutes reroutes
	warned   warnings
	inbound  conditions // for packets that other nodes send here, by frontend for decapsulated packets
	view     view
	Failed   map[triedBackend]int // number of synthetic packets that failed in this round
	// unreached holds the backends, by id, that synthetic packets do not reach.
	unreached map[uint32]*unreached
	took      time.Duration // duration of the last round after a change
	ticks     int
	verified  int // ticks at the last call of Verify
}

// Options holds the options of the datapath that the verification uses.
type Options struct {
	FollowRoutes, Routers bool
	Reach                 []netip.Addr
	TunnelPort            uint16
	Boundary              *lb.Boundary
}

// Deps holds what is verified and what repairs it.
type Deps struct {
	Objects  *bpf.Objects
	Services *table.Services
	Tunnels  *table.Tunnels
	Flows    *flow.Collector
	Hooks    *hook.Hooks
	Chunks   *table.Chunks // has the traffic of frontends and backends
	Names    bpf.Names
	Meaning  func(reason string) string // a reason's text: what happened, and what to do
	Log      *slog.Logger
}

// New returns a Verifier, which does nothing before Run or Applied.
func New(d Deps, o Options) *Verifier {
	return &Verifier{
		Deps: d, o: o, Routes: route.Cache{Kernel: new(route.Kernel)},
		bad: conditions{}, inbound: conditions{}, looked: map[netip.Addr]bool{},
		reported: map[netip.Addr]string{}, unreached: map[uint32]*unreached{}, Clients: Clients{nics: map[bool]int{}},
	}
}

// Close closes the sockets for requests to routers.
func (v *Verifier) Close() {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	v.Routers.Close()
	v.Routes.Kernel.Close()
}

// Changed verifies all frontends after a network change.
func (v *Verifier) Changed(found route.Changes) {
	start := time.Now()
	if err := route.Shortage(); err != nil {
		v.Mu.Lock()
		defer v.Mu.Unlock()
		v.postpone(found, err)
		return
	}
	if found != (route.Changes{}) { // routes of an interface that is set down vanish without a notification
		v.Services.RefreshSources()
		if err := v.Tunnels.Refresh(); err != nil {
			v.Log.Error("addresses of this node not refreshed", "err", err)
		}
	}
	v.Mu.Lock()
	defer v.Mu.Unlock()
	v.Routes.Forget(start, route.AfterChange)
	v.queue = v.Services.Held()
	v.reroutes.look(start, v.Services.Reroutes())
	v.round(found, len(v.queue))
	v.took = time.Since(start)
}

// Pause returns the time until the next verification after a change.
func (v *Verifier) Pause() time.Duration {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	return min(2*v.took, maxPause)
}

// Tick calls Verify or, while calm, every calmTicks-th tick does.
func (v *Verifier) Tick() {
	v.Mu.Lock()
	v.ticks++
	skip := v.ticks%calmTicks != 0 && v.calm()
	v.Mu.Unlock()
	if !skip {
		v.Verify()
	}
}

// calm reports whether no fault is known, suspected or ending.
func (v *Verifier) calm() bool {
	return v.node.fault == "" && len(v.bad)+len(v.inbound)+len(v.unreached)+len(v.reroutes.probing) == 0 &&
		v.missed == (route.Changes{}) && !v.Routers.Doubtful()
}

// Verify verifies the node and some of the frontends, or all frontends after a postponed change.
func (v *Verifier) Verify() {
	v.Mu.Lock()
	missed := v.missed
	v.missed = route.Changes{}
	v.Mu.Unlock()
	if missed != (route.Changes{}) {
		v.Changed(missed)
		return
	}
	v.Mu.Lock()
	defer v.Mu.Unlock()
	if err := route.Shortage(); err != nil {
		v.postpone(route.Changes{}, err)
		return
	}
	if len(v.queue) == 0 {
		v.queue = v.Services.Held()
		v.sweep = len(v.queue)
	}
	ticks := max(1, v.ticks-v.verified)
	v.verified = v.ticks
	v.round(route.Changes{}, ticks*max(minChecks, v.sweep*int(route.Tick)/int(sweepTime)))
}

// round verifies the node, the frontends with a fault, and the first n frontends of the queue.
func (v *Verifier) round(found route.Changes, n int) {
	now := time.Now()
	v.Routes.Expire(now)
	rare := found != (route.Changes{}) || v.ticks%rareTicks == 0
	if found != (route.Changes{}) || v.ticks%calmTicks == 0 {
		v.repairPins()
	}
	faults := v.repair(found, rare)
	v.node.observe(strings.Join(faults, "; "), now)
	v.Look(rare)
	v.reroutes.probe(v.Services.Accept)
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
		next = nil // all frontends were just verified; one packet for each is enough
	}
	v.tryBackends(next, now)
	v.publish()
	v.Warn(found, now)
}

// repairPins restores the pins. A failure affects no packets.
func (v *Verifier) repairPins() {
	v.warned.notPinned = ""
	if err := v.Hooks.RepairPins(); err != nil {
		v.warned.notPinned = err.Error()
	}
}

// repair restores the programs, and returns faults that it cannot repair. With rare, it also restores kernel settings,
// and attaches the programs to interfaces that routes use.
func (v *Verifier) repair(found route.Changes, rare bool) (faults []string) {
	if err := v.Hooks.RepairChain(); err != nil {
		faults = append(faults, err.Error())
	}
	if v.ruled != v.Routes.Since && v.Services.FollowRules() {
		v.ruled = v.Routes.Since
	}
	if rare {
		v.Hooks.Follow(v.o.Needed(&v.Routes, v.toBackends().interfaces))
		v.Hooks.RepairForwarding()
		v.Hooks.RepairSockets()
	}
	return append(faults, v.Hooks.Repair(found.Links, v.made())...)
}

// made returns a synthetic packet for some frontend with backends, or nil if there is none.
func (v *Verifier) made() []byte {
	if _, ok := v.Services.Subject(v.sample); !ok {
		v.sample = lb.Frontend{}
		for _, f := range v.Services.Held() {
			if _, ok := v.Services.Subject(f); ok {
				v.sample = f
				break
			}
		}
	}
	if s, ok := v.Services.Subject(v.sample); ok {
		if q, ok := v.question(v.sample, s); ok && q.Client.IsValid() {
			return opening(q)
		}
	}
	return nil
}

// Look rereads the state that results of synthetic packets are compared with. With choose, or on the first call, it
// chooses the packets' clients.
func (v *Verifier) Look(choose bool) {
	v.view = view{v.Hooks.View(), v.Tunnels.Addresses()}
	if choose && v.Clients.Chosen != v.Routes.Since || !v.Clients.v4.IsValid() {
		v.Clients.choose(v.view, &v.Routes)
	}
	if now := time.Now(); v.Routers.Due(now) {
		var clients []netip.Addr
		for _, q := range v.Flows.RecentClients() {
			clients = append(clients, q.Client.Addr())
		}
		v.Routers.Look(now, &v.Routes, clients, v.toBackends().routers)
	}
	v.Failed = map[triedBackend]int{}
	v.warned.notRun = ""
}

// Applied verifies frontends whose plans were applied. If a frontend had no backend before, its fault is reported
// immediately, because its VIP may not be announced yet or was withdrawn, and its previous fault is no longer known.
func (v *Verifier) Applied(updates []*table.Update, removed []lb.Frontend) {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	for _, f := range removed {
		v.looked[f.VIP] = true
	}
	if err := route.Shortage(); err != nil {
		v.postpone(route.Changes{Links: true, Routes: true}, err)
		return
	}
	v.backends = nil
	v.Hooks.Follow(v.Services.Interfaces(updates))
	v.Look(false)
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
func (v *Verifier) check(f lb.Frontend, now time.Time) {
	if f.Decap {
		v.inbound.observe(f, v.inboundFault(f), now)
		return
	}
	fault := ""
	if s, ok := v.Services.Subject(f); ok {
		fault = v.Fault(f, s)
	}
	v.bad.observe(f, fault, now)
	v.looked[f.VIP] = true
}

// publish reports changes for the VIPs that were checked, or for all VIPs if the node's fault changed.
func (v *Verifier) publish() {
	ofNode := ""
	if v.node.confirmed {
		ofNode = v.node.fault
	}
	if ofNode != v.ofNode {
		v.ofNode = ofNode
		for _, f := range v.Services.Held() {
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
	if len(changed) > 0 && v.Report != nil {
		v.Report(changed)
	}
}

// faultOfVIP returns why a VIP's packets are not forwarded or answered, or "" if nothing is known.
func (v *Verifier) faultOfVIP(addr netip.Addr) (fault string) {
	if v.ofNode != "" && v.Services.Has(addr) {
		return v.ofNode
	}
	for _, c := range v.bad[addr] {
		if c.confirmed && (fault == "" || c.fault < fault) {
			fault = c.fault
		}
	}
	return fault
}

// Faults returns the number of VIPs with a fault.
func (v *Verifier) Faults() int {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	return len(v.reported)
}
