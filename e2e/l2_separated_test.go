package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// TestMembersSeparated: a firewall drops the messages between two members that share the segment. Each address stays
// where it is, every request is answered, and each member names the other one with the addresses that it does not have.
func TestMembersSeparated(t *testing.T) {
	m := newMembers(t, 2)
	before := m.Settled(t, m.Agents...)
	nft := func(text string) {
		t.Helper()
		if out, err := m.Agents[0].Run(t.Context(), "nft", text); err != nil {
			t.Fatal(err, out)
		}
	}
	since := time.Now()
	nft(`table inet cut { chain in { type filter hook input priority 0; th dport 7946 drop; th sport 7946 drop; }; }`)
	labtest.Until(t, 30*time.Second, "the members say that they do not reach each other", func() error {
		for i, a := range m.Agents {
			routes, err := labtest.RoutesOf(t, a)
			if err != nil {
				return err
			}
			for _, r := range routes {
				if err := separated(a.Name(), m.Config[1-i].Name, r, before[r.Address] == a, since); err != nil {
					return err
				}
			}
		}
		return nil
	})
	for _, vip := range m.VIPs {
		if r := m.Load(t, vip, 200); r.Err() != nil {
			t.Errorf("%s: %v", vip, r.Err())
		}
	}
	nft("delete table inet cut")
	for vip, a := range m.Settled(t, m.Agents...) {
		if a != before[vip] {
			t.Errorf("%s has moved from %s to %s", vip, before[vip], a)
		}
	}
}

// separated returns an error unless an owner announces its route, and the other member names the owner.
func separated(member, other string, r lb.RouteStatus, owner bool, since time.Time) error {
	at := fmt.Sprintf("%s at %s: %s, %q", r.Address, member, r.State, r.Reason)
	if owner {
		if !r.Announced {
			return fmt.Errorf("%s; want it announced", at)
		}
		return nil
	}
	_, text, ok := strings.Cut(r.Reason, "which is not reached as a member of [l2], answers for it since ")
	if !ok || !strings.Contains(r.Reason, other+" (") || !strings.Contains(r.Reason, " on eth0)") {
		return fmt.Errorf("%s; want %s named", at, other)
	}
	if begin, err := time.Parse(time.RFC3339, text); err != nil || begin.Before(since.Truncate(time.Second)) {
		return fmt.Errorf("%s; want a time after %s", at, since)
	}
	return nil
}
