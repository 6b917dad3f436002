package kube

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/steelyard-lb/steelyard/lb"
)

// Limits of the Events about routes. A router that restarts changes every route of every node: at 1,000 nodes and 5,000
// Services that would be millions of Events. Those beyond the limit are omitted; the log of the agent has them.
const (
	routeEventsEvery = 2 * time.Second
	routeEventsQPS   = 0.1
	routeEventsBurst = 25
)

// The reasons of Events about routes.
const (
	reasonAnnounced    = "Announced"
	reasonNotAnnounced = "NotAnnounced"
)

// RouteEventsOptions are the inputs of RouteEvents. All are required.
type RouteEventsOptions struct {
	Client kubernetes.Interface
	Node   string
	// Service returns the Service of this name in lb; nil: the cluster has none.
	Service func(name string) *core.Service
	// Judge returns the states of routes as their receivers see them, given those of the engine, in the same order.
	Judge func([]lb.RouteStatus) []lb.RouteStatus
}

// RouteEvents emits an Event on a Service when this node begins or ceases to announce one of its addresses. A node that
// has not announced an address emits none about it: of a Service with externalTrafficPolicy Local, only the nodes with
// endpoints do.
type RouteEvents struct {
	o      RouteEventsOptions
	events record.EventRecorder    // of Run
	limit  flowcontrol.RateLimiter // of Run

	mu     sync.Mutex // guards routes
	routes map[netip.Addr]*routeEvent
}

// routeEvent is the state of one address.
type routeEvent struct {
	now       lb.RouteStatus // of the engine
	announced bool           // according to the last Event
	reason    string         // of the last Event, while announced
}

// NewRouteEvents returns RouteEvents that emit nothing until Run.
func NewRouteEvents(o RouteEventsOptions) *RouteEvents {
	return &RouteEvents{
		o: o, limit: flowcontrol.NewTokenBucketRateLimiter(routeEventsQPS, routeEventsBurst),
		routes: map[netip.Addr]*routeEvent{},
	}
}

// Changed is lb.EngineOptions.RouteChanged.
func (e *RouteEvents) Changed(r lb.RouteStatus) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(r.Services) == 0 { // deleted
		delete(e.routes, r.Address)
		return
	}
	x := e.routes[r.Address]
	if x == nil {
		x = &routeEvent{}
		e.routes[r.Address] = x
	}
	x.now = r
}

// Run emits Events until ctx ends.
func (e *RouteEvents) Run(ctx context.Context) error {
	var shutdown func()
	e.events, shutdown = newRecorder(ctx, e.o.Client, e.o.Node)
	defer shutdown()
	tick := time.NewTicker(routeEventsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			e.emit()
		}
	}
}

// emit emits the Events that are due, those about addresses that are no longer announced first.
func (e *RouteEvents) emit() {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]lb.RouteStatus, 0, len(e.routes))
	for _, x := range e.routes {
		all = append(all, x.now)
	}
	all = e.o.Judge(all)
	for _, announced := range []bool{false, true} {
		for _, now := range all {
			x := e.routes[now.Address]
			differs := now.Announced != x.announced || announced && now.Reason != x.reason
			if now.Announced == announced && differs {
				e.emitOne(x, now)
			}
		}
	}
}

// emitOne emits the Event about one address, on each Service that has it.
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
	x.announced, x.reason = now.Announced, now.Reason
	if !e.limit.TryAccept() {
		return
	}
	kind, reason := core.EventTypeNormal, reasonAnnounced
	text := fmt.Sprintf("%s is announced from node %s", now.Address, e.o.Node)
	if !now.Announced {
		reason, text = reasonNotAnnounced, fmt.Sprintf("%s is no longer announced from node %s:", now.Address, e.o.Node)
	}
	if now.Reason != "" {
		text += " " + now.Reason // when announced: with a lower preference, and why
	}
	if !now.Intended && now.Reason != "" {
		kind = core.EventTypeWarning
	}
	for _, s := range services {
		e.events.Event(s, kind, reason, text)
	}
}
