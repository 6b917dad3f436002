package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/steelyard-lb/steelyard/lb"
)

// Limits of the Events about routes. A router that restarts changes every route of every node: at 1,000 nodes and
// 5,000 Services that would be millions of Events. Those beyond the limit are omitted; the log of the agent has them.
// One that corrects an earlier Event is late instead, unless the route is then as that one says.
const (
	routeEventsEvery = 2 * time.Second
	// judgeTicks is how many of these are between two looks at all routes. Whether routers accept a route changes
	// without a call of Changed.
	judgeTicks       = 5
	routeEventsQPS   = 0.1
	routeEventsBurst = 25
	// earlierFor is how long after the start an address that was announced before it may be announced again without an
	// Event.
	earlierFor = time.Minute
)

// The reasons of Events about routes.
const (
	reasonAnnounced    = "Announced"
	reasonNotAnnounced = "NotAnnounced"
)

// RouteEventsOptions are the inputs of RouteEvents. All but Earlier are required.
type RouteEventsOptions struct {
	Client kubernetes.Interface
	Node   string
	// Service returns the Service of this name in lb; nil: the cluster has none.
	Service func(name string) *core.Service
	// Judge returns the states of routes as their receivers see them, given those of the engine, in the same order.
	Judge func([]lb.RouteStatus) []lb.RouteStatus
	// Earlier are the addresses that an earlier run announced.
	Earlier []AnnouncedRoute
	// Keep stores those of this run for the next one. It is called after changes.
	Keep func([]AnnouncedRoute)
}

// AnnouncedRoute is an address that this node announces, according to its Events.
type AnnouncedRoute struct {
	Address  netip.Addr `json:"address"`
	Services []string   `json:"services"`
	Reason   string     `json:"reason,omitempty"`
}

// RouteEvents emits an Event on a Service when this node begins or ceases to announce one of its addresses. A node that
// has not announced an address emits none about it: of a Service with externalTrafficPolicy Local, only the nodes with
// endpoints do. A restart alone emits none: in a rolling restart of all nodes they would be most of the requests.
type RouteEvents struct {
	o      RouteEventsOptions
	events record.EventRecorder    // of Run
	limit  flowcontrol.RateLimiter // of Run
	began  time.Time               // of Run

	mu      sync.Mutex // guards all below
	routes  map[netip.Addr]*routeEvent
	changed map[netip.Addr]bool           // since the last look
	unkept  bool                          // Keep has not what is announced
	earlier map[netip.Addr]AnnouncedRoute // of Options.Earlier, those that the engine has not said anything about
}

// routeEvent is the state of one address.
type routeEvent struct {
	now       lb.RouteStatus // of the engine
	announced bool           // according to the last Event
	reason    string         // of the last Event, while announced
	told      bool           // that Event was not omitted
	earlier   bool           // that Event was of an earlier run, and this one has not announced it yet
}

// NewRouteEvents returns RouteEvents that emit nothing until Run.
func NewRouteEvents(o RouteEventsOptions) *RouteEvents {
	e := &RouteEvents{
		o: o, limit: flowcontrol.NewTokenBucketRateLimiter(routeEventsQPS, routeEventsBurst),
		routes: map[netip.Addr]*routeEvent{}, changed: map[netip.Addr]bool{}, earlier: map[netip.Addr]AnnouncedRoute{},
	}
	for _, r := range o.Earlier {
		e.earlier[r.Address] = r
	}
	return e
}

// Changed is lb.EngineOptions.RouteChanged.
func (e *RouteEvents) Changed(r lb.RouteStatus) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.changed[r.Address], e.unkept = true, true
	if len(r.Services) == 0 { // deleted
		delete(e.routes, r.Address)
		return
	}
	x := e.routes[r.Address]
	if x == nil {
		x = &routeEvent{}
		e.routes[r.Address] = x
	}
	if was, ok := e.earlier[r.Address]; ok {
		same := slices.Equal(was.Services, r.Services) // else another Service has the address now
		x.announced, x.reason, x.earlier = same, was.Reason, same
		delete(e.earlier, r.Address)
	}
	x.now = r
}

// Run emits Events until ctx ends.
func (e *RouteEvents) Run(ctx context.Context) error {
	var shutdown func()
	e.events, shutdown = newRecorder(ctx, e.o.Client, e.o.Node)
	defer shutdown()
	e.began = time.Now()
	tick := time.NewTicker(routeEventsEvery)
	defer tick.Stop()
	for ticks := 1; ; ticks++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			e.emit(ticks%judgeTicks == 0)
			e.keep()
		}
	}
}

// keep stores what is announced, when that has changed.
func (e *RouteEvents) keep() {
	e.mu.Lock()
	if !e.unkept {
		e.mu.Unlock()
		return
	}
	e.unkept = false
	all := make([]AnnouncedRoute, 0, len(e.routes))
	for address, x := range e.routes {
		if x.announced {
			all = append(all, AnnouncedRoute{address, x.now.Services, x.reason})
		}
	}
	for _, r := range e.earlier {
		all = append(all, r)
	}
	e.mu.Unlock()
	slices.SortFunc(all, func(a, b AnnouncedRoute) int { return a.Address.Compare(b.Address) })
	e.o.Keep(all)
}

// emit emits the Events that are due, those about addresses that are no longer announced first. It looks at all routes,
// or at those that have changed.
func (e *RouteEvents) emit(every bool) {
	settling := time.Since(e.began) < earlierFor
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.o.Judge(e.due(every))
	for _, announced := range []bool{false, true} {
		for _, now := range all {
			x := e.routes[now.Address]
			if x.earlier = x.earlier && !now.Announced; x.earlier && settling {
				continue
			}
			differs := now.Announced != x.announced || announced && now.Reason != x.reason
			if now.Announced == announced && differs {
				e.emitOne(x, now)
			}
		}
	}
	if !settling && len(e.earlier) > 0 {
		e.unkept = true
		for _, r := range e.earlier {
			e.emitOne(&routeEvent{}, lb.RouteStatus{Address: r.Address, Services: r.Services})
		}
		clear(e.earlier)
	}
}

// due returns all routes, or those that have changed since the last call.
func (e *RouteEvents) due(every bool) (all []lb.RouteStatus) {
	if every {
		all = make([]lb.RouteStatus, 0, len(e.routes))
		for _, x := range e.routes {
			all = append(all, x.now)
		}
	} else {
		for address := range e.changed {
			if x := e.routes[address]; x != nil { // else it was deleted
				all = append(all, x.now)
			}
		}
	}
	e.changed = map[netip.Addr]bool{}
	return all
}

// emitOne emits the Event about one address, on each Service that has it, or omits it, or leaves it for later.
func (e *RouteEvents) emitOne(x *routeEvent, now lb.RouteStatus) {
	var services []*core.Service
	for _, name := range now.Services {
		if s := e.o.Service(name); s != nil {
			services = append(services, s)
		}
	}
	if len(services) == 0 { // of the file, or the cluster is not known yet
		return
	}
	accepted := e.limit.TryAccept()
	if !accepted && x.told {
		return // the next look at all routes tries again
	}
	x.announced, x.reason, x.told, e.unkept = now.Announced, now.Reason, accepted, true
	if !accepted {
		return
	}
	kind, reason := core.EventTypeNormal, reasonAnnounced
	text := fmt.Sprintf("%s is announced from node %s", now.Address, e.o.Node)
	if !now.Announced {
		reason, text = reasonNotAnnounced, fmt.Sprintf("%s is no longer announced from node %s", now.Address, e.o.Node)
	}
	switch {
	case now.Reason != "" && now.Announced:
		text += " " + now.Reason // with a lower preference, and why
	case now.Reason != "":
		text += ": " + now.Reason
	}
	if !now.Intended && now.Reason != "" {
		kind = core.EventTypeWarning
	}
	for _, s := range services {
		e.events.Event(s, kind, reason, text)
	}
}
