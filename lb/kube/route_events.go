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

// Limits of the Events about routes. A router that restarts changes every route of every node: with 1,000 nodes and
// 5,000 Services that would be millions of Events. Events beyond the limit are omitted; the agent's log has them. An
// Event that corrects a previous one is delayed instead, unless the route has returned to the reported state by then.
const (
	routeEventsEvery = 2 * time.Second
	// judgeTicks is the number of ticks between checks of all routes. Routers may change their acceptance of a route
	// without a call to Changed.
	judgeTicks       = 5
	routeEventsQPS   = 0.1
	routeEventsBurst = 25
	// earlierFor is how long after the start a previously announced address may be announced again without an Event.
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
	// Service returns the Service with this name in lb, or nil if the cluster has none.
	Service func(name string) *core.Service
	// Judge returns the states of routes as their receivers see them, given the engine's, in the same order.
	Judge func([]lb.RouteStatus) []lb.RouteStatus
	// Earlier lists the addresses that a previous run announced.
	Earlier []AnnouncedRoute
	// Keep stores this run's addresses for the next one. It is called after changes.
	Keep func([]AnnouncedRoute)
}

// AnnouncedRoute is an address that this node announces, according to its Events.
type AnnouncedRoute struct {
	Address  netip.Addr `json:"address"`
	Services []string   `json:"services"`
	Reason   string     `json:"reason,omitempty"`
}

// RouteEvents emits an Event on a Service when this node starts or stops announcing one of its addresses. A node that
// has not announced an address emits none about it: with externalTrafficPolicy Local, only nodes with endpoints do. A
// restart alone emits none, because a rolling restart of all nodes would then cause more Events than all other changes.
type RouteEvents struct {
	o      RouteEventsOptions
	events record.EventRecorder    // of Run
	limit  flowcontrol.RateLimiter // of Run
	began  time.Time               // of Run

	mu      sync.Mutex // guards all below
	routes  map[netip.Addr]*routeEvent
	changed map[netip.Addr]bool           // since the last check
	unkept  bool                          // Keep does not have the announced routes yet
	earlier map[netip.Addr]AnnouncedRoute // Options.Earlier, without the routes that the engine has reported
}

// routeEvent is the state of one address.
type routeEvent struct {
	now       lb.RouteStatus // from the engine
	announced bool           // according to the last Event
	reason    string         // of the last Event, while announced
	told      bool           // that Event was not omitted
	earlier   bool           // that Event is from a previous run, and this run has not announced the address yet
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

// Changed implements lb.EngineOptions.RouteChanged.
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
		same := slices.Equal(was.Services, r.Services) // otherwise another Service has the address now
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

// keep stores the announced routes if they have changed.
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

// emit emits the Events that are due, starting with addresses that are no longer announced. It checks all routes, or
// only those that have changed.
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
			if x := e.routes[address]; x != nil { // otherwise it was deleted
				all = append(all, x.now)
			}
		}
	}
	e.changed = map[netip.Addr]bool{}
	return all
}

// emitOne emits the Event about one address on each Service that has it, omits it, or postpones it.
func (e *RouteEvents) emitOne(x *routeEvent, now lb.RouteStatus) {
	var services []*core.Service
	for _, name := range now.Services {
		if s := e.o.Service(name); s != nil {
			services = append(services, s)
		}
	}
	if len(services) == 0 { // from a file, or the cluster is not known yet
		return
	}
	accepted := e.limit.TryAccept()
	if !accepted && x.told {
		return // the next check of all routes tries again
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
