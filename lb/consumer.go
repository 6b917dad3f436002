package lb

import (
	"context"
	"net/netip"
)

// Sink is what a Source writes to. Its methods never block for long and may be called from any goroutine.
type Sink interface {
	// Put adds s, or replaces the service of that name.
	Put(s *Service)
	// Delete removes the service of that name, if there is one.
	Delete(name string)
	// Complete says that a source has put everything it had at its start. What earlier runs left in the kernel is
	// removed only when every source is complete.
	Complete(source string)
}

// Source is where Services come from.
type Source interface {
	// Run feeds sink until ctx ends; it returns nil then.
	Run(ctx context.Context, sink Sink) error
}

// Datapath forwards packets. Both methods are called from one goroutine at a time.
type Datapath interface {
	// Held returns the frontends that the kernel already serves, left there by an earlier run.
	Held() ([]Frontend, error)
	// Apply makes d true. It returns the frontends for which it is not, each with its error: those are then as they
	// were before. Putting what is there and deleting what is not are no errors.
	Apply(ctx context.Context, d Delta) map[Frontend]error
}

// Delta is a difference between two states of the datapath.
type Delta struct {
	Put    []*FrontendPlan
	Delete []Frontend
}

// Announcer makes VIPs reachable.
type Announcer interface {
	// Set makes exactly these VIPs announced, and returns when that is so as far as this machine can tell: updates
	// and withdrawals are on their way to every peer that can be reached. An unreachable peer is no error and never
	// delays Set. After an error anything between the old and the new set may be announced.
	Set(ctx context.Context, announcements []Announcement) error
}

// Announcement is a VIP to be made reachable through this machine.
type Announcement struct {
	VIP netip.Addr
	// By names the announcers to use; empty: all.
	By []AnnouncerKind
	// Weight is how much this machine can serve relative to others (its healthy backends); at least 1.
	Weight int
}

// Prober asks backends how they are, and reports to the Engine's Health method.
type Prober interface {
	// Put makes these the checks of a service. A check that stays the same keeps its state and its rhythm; an empty
	// list ends the checks of the service.
	Put(service string, checks []Check)
}
