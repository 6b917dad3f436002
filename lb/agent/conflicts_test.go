package agent

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An address that another host answers for is not shown as announced, unless BGP also announces it.
func TestConflictsInStatus(t *testing.T) {
	vip := ip("203.0.113.10")
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	const text = "not announced here: 02:00:00:00:00:bb on eth0 has answered for it since 2026-01-02T03:04:05Z"
	const member = "not announced here: lb2 (02:00:00:00:00:bb on eth0), which is not reachable as a member of [l2], " +
		"has answered for it since 2026-01-02T03:04:05Z"
	const reached = "not announced here: lb2 (02:00:00:00:00:bb on eth0), without telling the other members " +
		"of [l2], has answered for it since 2026-01-02T03:04:05Z"
	standby := l2.Waiting{Reason: "standby: lb2 has it", Intended: true}
	for _, tt := range []struct {
		name                   string
		conflict, withheld     bool
		member                 string
		reached                bool
		waiting                l2.Waiting
		bgp                    bool
		by                     []lb.AnnouncerKind
		announced, hasAProblem bool
		reason                 string
		intended               bool
	}{
		{name: "another host has it", conflict: true, withheld: true, hasAProblem: true, reason: text, intended: true},
		{name: "a member that is not reached has it", conflict: true, withheld: true, member: "lb2", hasAProblem: true,
			reason: member, intended: true},
		{name: "frames of a member that does not have it", conflict: true, withheld: true, member: "lb2", reached: true,
			hasAProblem: true, reason: reached, intended: true},
		{name: "by l2 alone", conflict: true, withheld: true, bgp: true, by: []lb.AnnouncerKind{lb.AnnounceL2},
			hasAProblem: true, reason: text, intended: true},
		{name: "also by BGP", conflict: true, withheld: true, bgp: true, announced: true, hasAProblem: true},
		{name: "by BGP", conflict: true, withheld: true, bgp: true, by: []lb.AnnouncerKind{lb.AnnounceBGP},
			announced: true, hasAProblem: true},
		{name: "both have it", conflict: true, announced: true, hasAProblem: true},
		{name: "a member has it", waiting: standby, reason: standby.Reason, intended: true},
		{name: "a member has it, also by BGP", waiting: standby, bgp: true, announced: true},
		{name: "no interface", waiting: l2.Waiting{Reason: "no interface"}, reason: "no interface"},
	} {
		x := conflicts{
			bgp: tt.bgp,
			list: func() (list []l2.Conflict) {
				if tt.conflict {
					list = append(list, l2.Conflict{
						VIP: vip, MAC: "02:00:00:00:00:bb", Interface: "eth0", Since: since, Withheld: tt.withheld,
						Member: tt.member, Reached: tt.reached,
					})
				}
				return list
			},
			waiting: func() map[netip.Addr]l2.Waiting {
				if tt.waiting == (l2.Waiting{}) {
					return nil
				}
				return map[netip.Addr]l2.Waiting{vip: tt.waiting}
			},
			since: func() map[netip.Addr]time.Time { return map[netip.Addr]time.Time{vip: since} },
		}
		st := lb.Status{
			Routes: []lb.RouteStatus{
				{Address: ip("203.0.113.9"), Announced: true}, {Address: vip, By: tt.by, Announced: true},
			},
			Services: []lb.ServiceStatus{
				{Address: ip("203.0.113.9"), Announced: true}, {Address: vip, Announced: true},
			},
		}
		x.mark(&st)
		must.Need(t, st.Routes[0].Announced && st.Services[0].Announced, "%s: %+v", tt.name, st)
		r, s := st.Routes[1], st.Services[1]
		withheld := r.State == lb.RouteWithheld
		byL2 := tt.announced && !tt.bgp
		must.True(t, r.Since.Equal(since) == byL2 && st.Routes[0].Since.IsZero(),
			"%s: announced since %v and %v", tt.name, st.Routes[0].Since, r.Since)
		must.True(t, r.Announced == tt.announced && withheld != tt.announced && s.Announced == tt.announced &&
			r.Intended == tt.intended && r.Reason == tt.reason && s.Reason == tt.reason, "%s: %+v, %+v", tt.name, r, s)
		got := lbtest.Texts(x.findings())
		must.True(t, (len(got) == 1) == tt.hasAProblem, "%s: problems %q", tt.name, got)
	}
	got := lbtest.Texts((conflicts{}).findings())
	must.True(t, got == nil, "problems %q without l2", got)
	c := l2.Conflict{MAC: "m", Interface: "eth0", Since: since}
	if got := (conflicts{}).text(c); !strings.HasPrefix(got, "m on eth0 has also claimed it") {
		t.Error(got)
	}
}

// Conflicts of several addresses with one host are one finding.
func TestConflictsOfOneHost(t *testing.T) {
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var all []l2.Conflict
	for _, x := range []struct{ vip, mac string }{
		{"203.0.113.1", "m1"}, {"203.0.113.2", "m2"}, {"203.0.113.3", "m1"}, {"203.0.113.4", "m1"},
	} {
		all = append(all, l2.Conflict{VIP: ip(x.vip), MAC: x.mac, Interface: "eth0", Since: since})
	}
	const claims = " on eth0 has also claimed it since 2026-01-02T03:04:05Z"
	want := []string{
		"address conflict: 203.0.113.1, 203.0.113.3, 203.0.113.4: m1" + claims,
		"address conflict: 203.0.113.2: m2" + claims,
	}
	x := conflicts{list: func() []l2.Conflict { return all }}
	must.Equal(t, want, lbtest.Texts(x.findings()))
}

// calls is a lb.Sink that records.
type calls struct{ list []string }

func (c *calls) Put(s *lb.Service) {
	c.list = append(c.list, fmt.Sprintf("put %s %v, %d refused", s.Name, s.VIPs, len(s.Refused)))
}
func (c *calls) Delete(name string)     { c.list = append(c.list, "delete "+name) }
func (c *calls) Complete(source string) { c.list = append(c.list, "complete "+source) }

// A service loses an address that the machine or a node receives, and gets it back afterwards.
func TestRefuser(t *testing.T) {
	having := func(addrs ...string) *machine.Network {
		var list []netlink.Addr
		for _, a := range addrs {
			list = append(list, netlink.Addr{IPNet: netlink.NewIPNet(net.ParseIP(a).To4())})
		}
		return machine.New(nil, list, nil)
	}
	out := &calls{}
	r := newRefuser(out, having("192.0.2.11"), nil, discard)
	change := func(n *machine.Network) { r.network = n; r.again() }
	r.Put(&lb.Service{Name: "web", VIPs: []netip.Addr{ip("203.0.113.10"), ip("192.0.2.11")}})
	r.Put(&lb.Service{Name: "mail", VIPs: []netip.Addr{ip("203.0.113.11")}})
	r.Complete("file")
	change(having("192.0.2.11", "192.0.2.13"))
	change(having("192.0.2.11", "203.0.113.10"))
	change(having())
	r.setNodes([]netip.Addr{ip("203.0.113.11")})
	r.setNodes([]netip.Addr{ip("203.0.113.11")})
	r.Delete("mail")
	r.setNodes(nil)
	want := []string{
		"put web [203.0.113.10], 1 refused", "put mail [203.0.113.11], 0 refused", "complete file",
		"put web [], 2 refused", "put web [203.0.113.10 192.0.2.11], 0 refused",
		"put mail [], 1 refused", "delete mail",
	}
	must.Equal(t, want, out.list)
}
