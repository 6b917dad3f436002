package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/lb"
)

// conflicts reports the addresses that other hosts answer for by ARP or NDP.
type conflicts struct {
	list    func() []l2.Conflict // nil: l2 is off
	bgp     bool                 // BGP is on, too
	cluster bool                 // another node is expected to have the address
}

// text describes a conflict.
func (conflicts) text(c l2.Conflict) string {
	host := fmt.Sprintf("%s on %s", c.MAC, c.Interface)
	if c.Withheld {
		return fmt.Sprintf("not announced here: %s answers for it since %s", host, c.Since.Format(time.RFC3339))
	}
	return fmt.Sprintf("%s claims it, too, since %s", host, c.Since.Format(time.RFC3339))
}

// problems returns the conflicts for the status.
func (x conflicts) problems() (texts []string) {
	if x.list == nil {
		return nil
	}
	for _, c := range x.list() {
		if !c.Withheld || !x.cluster {
			texts = append(texts, fmt.Sprintf("address conflict: %s: %s", c.VIP, x.text(c)))
		}
	}
	return texts
}

// withheld returns why an address that the engine announces by these announcers is not announced; "": it is.
func (x conflicts) withheld(all []l2.Conflict, r lb.RouteStatus) string {
	if !r.Announced || slices.Contains(r.By, lb.AnnounceBGP) || len(r.By) == 0 && x.bgp {
		return ""
	}
	i := slices.IndexFunc(all, func(c l2.Conflict) bool { return c.VIP == r.Address && c.Withheld })
	if i < 0 {
		return ""
	}
	return x.text(all[i])
}

// status wraps the status of the engine: an address that another host has is not announced. That is intended, because
// one host at a time may answer for it.
func (x conflicts) status(
	engine func(context.Context) (lb.Status, error),
) func(context.Context) (lb.Status, error) {
	if x.list == nil {
		return engine
	}
	return func(ctx context.Context) (lb.Status, error) {
		st, err := engine(ctx)
		all := x.list()
		if err != nil || len(all) == 0 {
			return st, err
		}
		st.Routes, st.Services = slices.Clone(st.Routes), slices.Clone(st.Services)
		for i := range st.Routes {
			r := &st.Routes[i]
			reason := x.withheld(all, *r)
			if reason == "" {
				continue
			}
			r.State, r.Announced, r.Intended, r.Reason = lb.RouteWithheld, false, true, reason
			for k := range st.Services {
				if s := &st.Services[k]; s.Address == r.Address {
					s.Announced, s.Reason = false, reason
				}
			}
		}
		return st, nil
	}
}
