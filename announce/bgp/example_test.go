package bgp_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/lb"
)

// A Speaker opens no session before Run and the first Set.
func ExampleSpeaker() {
	s, err := bgp.New(bgp.Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), Log: slog.New(slog.DiscardHandler),
		Peers: []bgp.Peer{{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = s.Set(context.Background(), []lb.Announcement{{VIP: netip.MustParseAddr("203.0.113.10"), Weight: 1}})
	if err != nil {
		fmt.Println(err)
	}
	for _, p := range s.Peers() {
		fmt.Println(p.Peer, p.ASN, p.State, p.Routes)
	}
	// Output:
	// 192.0.2.1 64500 idle 0
}
