package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// conflicts reports addresses that other hosts answer for by ARP or NDP.
type conflicts struct {
	list    func() []l2.Conflict // nil if l2 is off
	waiting func() map[netip.Addr]l2.Waiting
	since   func() map[netip.Addr]time.Time // VIPs that this machine has taken over
	bgp     bool                            // BGP is on as well
}

func (conflicts) text(c l2.Conflict) string {
	host := fmt.Sprintf("%s on %s", c.MAC, c.Interface)
	switch {
	case c.Reached:
		host = fmt.Sprintf("%s (%s), without telling the other members of [l2],", c.Member, host)
	case c.Member != "":
		host = fmt.Sprintf("%s (%s), which is not reachable as a member of [l2],", c.Member, host)
	}
	if c.Withheld {
		return fmt.Sprintf("not announced here: %s has answered for it since %s", host, c.Since.Format(time.RFC3339))
	}
	return fmt.Sprintf("%s has also claimed it since %s", host, c.Since.Format(time.RFC3339))
}

// findings returns the conflicts for the status, with equal texts merged.
func (x conflicts) findings() (all []lb.Finding) {
	if x.list == nil {
		return nil
	}
	var order []string
	vips := map[string][]string{}
	for _, c := range x.list() {
		text := x.text(c)
		if vips[text] == nil {
			order = append(order, text)
		}
		vips[text] = append(vips[text], c.VIP.String())
	}
	for _, text := range order {
		all = append(all, lb.FoundAddressConflict.About("", "address conflict: %s: %s", admin.List(vips[text]), text))
	}
	return all
}

// onlyL2 reports whether a route is announced by ARP and NDP, and not by BGP as well.
func (x conflicts) onlyL2(r lb.RouteStatus) bool {
	return r.Announced && !slices.Contains(r.By, lb.AnnounceBGP) && (len(r.By) > 0 || !x.bgp)
}

// withheld says why an address that the engine announces is not announced, and whether that is intended, or returns ""
// if it is announced.
func (x conflicts) withheld(
	all []l2.Conflict, waiting map[netip.Addr]l2.Waiting, vip netip.Addr,
) (reason string, intended bool) {
	i := slices.IndexFunc(all, func(c l2.Conflict) bool { return c.VIP == vip && c.Withheld })
	if i >= 0 {
		return x.text(all[i]), true
	}
	w := waiting[vip]
	return w.Reason, w.Intended
}

// mark adjusts a status. An address that another host owns is not announced, which is intended, because only one host
// at a time may answer for it. An address that this machine owns counts as announced since this machine took it over,
// which may be long after the engine asked for that.
func (x conflicts) mark(st *lb.Status) {
	if x.list == nil {
		return
	}
	all, waiting, since := x.list(), x.waiting(), x.since()
	st.Routes, st.Services = slices.Clone(st.Routes), slices.Clone(st.Services)
	withheld := map[netip.Addr]string{}
	for i := range st.Routes {
		r := &st.Routes[i]
		if !x.onlyL2(*r) {
			continue
		}
		reason, intended := x.withheld(all, waiting, r.Address)
		if reason == "" {
			if at, ok := since[r.Address]; ok {
				r.Since = at
			}
			continue
		}
		r.State, r.Announced, r.Intended, r.Reason = lb.RouteWithheld, false, intended, reason
		withheld[r.Address] = reason
	}
	for k := range st.Services {
		s := &st.Services[k]
		if reason := withheld[s.Address]; reason != "" {
			s.Announced, s.Reason = false, reason
		}
	}
}
