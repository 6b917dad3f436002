package lb

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Sink receives the services of a Source. Its methods do not block and may be called from any goroutine.
type Sink interface {
	// Put adds s, or replaces the service with the same name.
	Put(s *Service)
	// Delete removes the service with this name, if any.
	Delete(name string)
	// Complete reports that a source has put every service that existed at its start. Frontends from a previous run are
	// removed from the kernel only once every source is complete.
	Complete(source string)
}

// Source is an origin of Services.
type Source interface {
	// Run feeds sink until ctx ends and then returns nil.
	Run(ctx context.Context, sink Sink) error
}

// Datapath forwards packets. Both methods are called from one goroutine at a time.
type Datapath interface {
	// Held returns the frontends from a previous run that are in the kernel.
	Held() ([]Frontend, error)
	// Apply applies d. It returns an error for each frontend that failed, and leaves that frontend unchanged. Putting a
	// frontend that exists or deleting one that does not is not an error. If the tables lack space for a service, Apply
	// returns ErrRefused for each of its frontends and writes none of them.
	Apply(ctx context.Context, d Delta) map[Frontend]error
}

// Delta is a difference between two states of the datapath.
type Delta struct {
	Put    []*FrontendPlan
	Delete []Frontend
	// Later is the approximate number of targets in later deltas, because reserving space for all of them saves time.
	Later int
}

// Announcer makes VIPs reachable.
type Announcer interface {
	// Set announces exactly these VIPs. It returns once the updates and withdrawals have been sent to every reachable
	// peer. An unreachable peer is not an error and never delays Set. If it returns VIPErrors, each VIP in it is
	// announced as before or as requested, and all others as requested. After any other error, each VIP may be in
	// either state.
	Set(ctx context.Context, announcements []Announcement) error
}

// Announcement is a VIP to be made reachable through this node.
type Announcement struct {
	VIP netip.Addr
	// By lists the announcers to use. Empty means all.
	By []AnnouncerKind
	// Weight is the number of healthy backends, at least 1. It is this node's capacity relative to other nodes.
	Weight int
	// LowerPreference asks routers to prefer the announcements of other nodes.
	LowerPreference bool
	// Local means that a backend on this node may receive new flows.
	Local bool
	// Apart lists VIPs of one family, including this one, that should be on different nodes if only one node at a time
	// has a VIP. Empty means no preference. All nodes have the same list, whether or not they announce the other VIPs.
	Apart []netip.Addr
	// Movable means that connections survive when their packets arrive at another node.
	Movable bool
}

// Weighted says for which VIPs routers learn each node's weight. A changed weight moves flows to other nodes.
type Weighted int

const (
	WeightedNever   Weighted = iota
	WeightedMovable          // VIPs whose connections survive such a move
	WeightedAlways           // all, once the weight has not changed for a while
)

// Prober runs checks and reports results to Engine.Health.
type Prober interface {
	// Put replaces the checks of a service. An unchanged check keeps its state and schedule; an empty list ends the
	// service's checks.
	Put(service string, checks []Check)
}

// VIPErrors maps the VIPs for which an Announcer failed to their errors.
type VIPErrors map[netip.Addr]error

// Error lists the errors by VIP.
func (e VIPErrors) Error() string {
	var texts []string
	for _, vip := range slices.SortedFunc(maps.Keys(e), netip.Addr.Compare) {
		texts = append(texts, fmt.Sprintf("%s: %v", vip, e[vip]))
	}
	return strings.Join(texts, "; ")
}

// Add adds an error for a VIP.
func (e VIPErrors) Add(vip netip.Addr, err error) { e[vip] = errors.Join(e[vip], err) }

// OrNil returns e as an error, or nil if e is empty.
func (e VIPErrors) OrNil() error {
	if len(e) == 0 {
		return nil
	}
	return e
}
