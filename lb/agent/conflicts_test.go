package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/lb"
)

// An address that another host answers for is not shown as announced, unless BGP announces it, too.
func TestConflictsInStatus(t *testing.T) {
	vip := ip("203.0.113.10")
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	const text = "not announced here: 02:00:00:00:00:bb on eth0 answers for it since 2026-01-02T03:04:05Z"
	for _, tt := range []struct {
		name                   string
		withheld, bgp, cluster bool
		by                     []lb.AnnouncerKind
		announced, hasAProblem bool
	}{
		{"another host has it", true, false, false, nil, false, true},
		{"another node has it", true, false, true, nil, false, false},
		{"by l2 alone", true, true, false, []lb.AnnouncerKind{lb.AnnounceL2}, false, true},
		{"by BGP, too", true, true, false, nil, true, true},
		{"by BGP", true, true, true, []lb.AnnouncerKind{lb.AnnounceBGP}, true, false},
		{"both have it", false, false, true, nil, true, true},
	} {
		x := conflicts{bgp: tt.bgp, cluster: tt.cluster, list: func() []l2.Conflict {
			return []l2.Conflict{{
				VIP: vip, MAC: "02:00:00:00:00:bb", Interface: "eth0", Since: since, Withheld: tt.withheld,
			}}
		}}
		status := x.status(func(context.Context) (lb.Status, error) {
			return lb.Status{
				Routes: []lb.RouteStatus{
					{Address: ip("203.0.113.9"), Announced: true}, {Address: vip, By: tt.by, Announced: true},
				},
				Services: []lb.ServiceStatus{
					{Address: ip("203.0.113.9"), Announced: true}, {Address: vip, Announced: true},
				},
			}, nil
		})
		st, err := status(t.Context())
		if err != nil || !st.Routes[0].Announced || !st.Services[0].Announced {
			t.Fatalf("%s: %v, %+v", tt.name, err, st)
		}
		r, s := st.Routes[1], st.Services[1]
		withheld := r.State == lb.RouteWithheld
		if r.Announced != tt.announced || withheld == tt.announced ||
			s.Announced != tt.announced || r.Intended == tt.announced ||
			!tt.announced && (r.Reason != text || s.Reason != text) {
			t.Errorf("%s: %+v, %+v", tt.name, r, s)
		}
		if got := x.problems(); (len(got) == 1) != tt.hasAProblem {
			t.Errorf("%s: problems %q", tt.name, got)
		}
	}
	broken := errors.New("broken")
	x := conflicts{list: func() []l2.Conflict { return nil }}
	status := x.status(func(context.Context) (lb.Status, error) { return lb.Status{}, broken })
	if _, err := status(t.Context()); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if got := (conflicts{}).problems(); got != nil {
		t.Errorf("problems %q without l2", got)
	}
	c := l2.Conflict{MAC: "m", Interface: "eth0", Since: since}
	if got := x.text(c); !strings.HasPrefix(got, "m on eth0 claims it, too") {
		t.Error(got)
	}
}
