package verify

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// condition is a fault under repeated observation.
type condition struct {
	fault     string
	since, ok time.Time // when the fault was first observed, and first absent; ok is zero while it is observed
	confirmed bool
}

// observe records the current fault, or "" if there is none.
func (c *condition) observe(fault string, now time.Time) {
	switch {
	case fault != "":
		if c.fault == "" {
			c.since = now
		}
		c.fault, c.ok = fault, time.Time{}
		c.confirmed = c.confirmed || now.Sub(c.since) >= ConfirmAfter
	case c.ok.IsZero() && c.confirmed:
		c.ok = now
	case !c.confirmed || now.Sub(c.ok) >= ClearAfter:
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

// observe records a frontend's current fault, or "" if there is none.
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
