package l2_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/lb"
)

// Set may be called before Run. Run, which needs CAP_NET_RAW, then starts with that set.
func ExampleAnnouncer_Set() {
	a, err := l2.New(l2.Options{Interfaces: []string{"eth0"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = a.Set(context.Background(), []lb.Announcement{
		{VIP: netip.MustParseAddr("203.0.113.10"), Weight: 1},
		{VIP: netip.MustParseAddr("224.0.0.1"), Weight: 1},
	})
	fmt.Println(err)
	// Output:
	// 224.0.0.1: not a global unicast address
}
