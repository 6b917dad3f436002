package agent

import (
	"context"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// refusing is an announcer whose neighbours have no route, for a reason.
type refusing string

func (refusing) Set(context.Context, []lb.Announcement) error { return nil }
func (refusing) Carried(netip.Addr) bool                      { return false }
func (r refusing) NotAccepted(netip.Addr) string              { return string(r) }

// The reason of a route that nobody receives names what the neighbours do not accept, if that is known.
func TestNotReceived(t *testing.T) {
	for text, want := range map[refusing]string{
		"":                   "no BGP peer has it: no session that carries it is established",
		"192.0.2.1: no IPv6": "no BGP peer has it: 192.0.2.1: no IPv6",
	} {
		r := lb.RouteStatus{Address: netip.MustParseAddr("2001:db8::10")}
		if got := notReceived(r, map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: text}); got != want {
			t.Errorf("reason %q; want %q", got, want)
		}
	}
}
