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

// Sink is what a Source writes to. Its methods do not block and may be called from any goroutine.
type Sink interface {
	// Put adds s, or replaces the service of that name.
	Put(s *Service)
	// Delete removes the service of that name, if there is one.
	Delete(name string)
	// Complete reports that a source has put every service that existed at its start. Frontends of an earlier run are
	// removed from the kernel only when every source is complete.
	Complete(source string)
}

// Source is an origin of Services.
type Source interface {
	// Run feeds sink until ctx ends; it returns nil then.
	Run(ctx context.Context, sink Sink) error
}

// Datapath forwards packets. Both methods are called from one goroutine at a time.
type Datapath interface {
	// Held returns the frontends of an earlier run that are in the kernel.
	Held() ([]Frontend, error)
	// Apply carries out d. It returns the frontends for which that failed, each with its error; those are unchanged.
	// To put a frontend that exists, and to delete one that does not, is no error. A service without room gets
	// ErrRefused for each of its frontends, before anything of it is written.
	Apply(ctx context.Context, d Delta) map[Frontend]error
}

// Delta is a difference between two states of the datapath.
type Delta struct {
	Put    []*FrontendPlan
	Delete []Frontend
	// Later is about how many targets further deltas put: to make room for all at once saves time.
	Later int
}

// Announcer makes VIPs reachable.
type Announcer interface {
	// Set announces exactly these VIPs. It returns when the updates and withdrawals have been sent to every peer that
	// can be reached. An unreachable peer is no error and never delays Set. After VIPErrors, each VIP in it may be
	// announced as before or as requested, and all others are as requested. After another error, that is so of no VIP.
	Set(ctx context.Context, announcements []Announcement) error
}

// Announcement is a VIP to be made reachable through this node.
type Announcement struct {
	VIP netip.Addr
	// By lists the announcers to use; empty: all.
	By []AnnouncerKind
	// Weight is the number of healthy backends, at least 1: the capacity of this node relative to other nodes.
	Weight int
	// LowerPreference asks routers to prefer the announcements of other nodes.
	LowerPreference bool
	// Local: a backend that may receive new flows runs on this node.
	Local bool
	// Apart are VIPs of one family, this one included, that different nodes should have where one node at a time has a
	// VIP; empty: no matter. All nodes have the same list, whether they announce the others or not.
	Apart []netip.Addr
	// Movable: connections survive when their packets arrive at another node.
	Movable bool
}

// Weighted tells for which VIPs routers learn the weight of each node. A changed weight moves flows to other nodes.
type Weighted int

const (
	WeightedNever   Weighted = iota
	WeightedMovable          // VIPs whose connections survive it
	WeightedAlways           // all, once the weight has not changed for a while
)

// Prober runs checks, and reports results to Engine.Health.
type Prober interface {
	// Put replaces the checks of a service. A check that stays the same keeps its state and its schedule; an empty
	// list ends the checks of the service.
	Put(service string, checks []Check)
}

// VIPErrors are the VIPs for which an Announcer failed, with the error of each.
type VIPErrors map[netip.Addr]error

// Error lists the errors by VIP.
func (e VIPErrors) Error() string {
	var texts []string
	for _, vip := range slices.SortedFunc(maps.Keys(e), netip.Addr.Compare) {
		texts = append(texts, fmt.Sprintf("%s: %v", vip, e[vip]))
	}
	return strings.Join(texts, "; ")
}

// Add adds an error of a VIP.
func (e VIPErrors) Add(vip netip.Addr, err error) { e[vip] = errors.Join(e[vip], err) }

// OrNil returns e as an error; nil without VIPs.
func (e VIPErrors) OrNil() error {
	if len(e) == 0 {
		return nil
	}
	return e
}
