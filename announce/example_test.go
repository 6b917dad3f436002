package announce_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/steelyard-lb/steelyard/announce"
	"github.com/steelyard-lb/steelyard/lb"
)

// printer is an announcer that prints what it is given.
type printer struct{ name string }

func (p printer) Set(_ context.Context, list []lb.Announcement) error {
	for _, a := range list {
		fmt.Println(p.name, a.VIP)
	}
	return nil
}

// An announcement without By is passed to every announcer, one with By to those in By.
func ExampleMux() {
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{
		lb.AnnounceBGP: printer{"bgp"},
		lb.AnnounceL2:  printer{"l2"},
	})
	err := m.Set(context.Background(), []lb.Announcement{
		{VIP: netip.MustParseAddr("203.0.113.10"), Weight: 1},
		{VIP: netip.MustParseAddr("203.0.113.11"), Weight: 1, By: []lb.AnnouncerKind{lb.AnnounceBGP}},
	})
	fmt.Println(err)
	// Unordered output:
	// bgp 203.0.113.10
	// bgp 203.0.113.11
	// l2 203.0.113.10
	// <nil>
}
