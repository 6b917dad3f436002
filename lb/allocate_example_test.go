package lb_test

import (
	"fmt"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// Two services get an address each, one of both families; a third shares the first one's address by another port.
func ExampleAllocator_Assign() {
	addr := netip.MustParseAddr
	allocator := lb.NewAllocator([]lb.Pool{{
		Name: "public", AutoAssign: true, AvoidBuggy: true,
		Ranges: []lb.AddrRange{
			{From: addr("203.0.113.0"), To: addr("203.0.113.2")},
			{From: addr("2001:db8::"), To: addr("2001:db8::ffff:ffff:ffff:ffff")},
		},
	}})
	v4, v6 := lb.FamilyRequest{Family: lb.IPv4}, lb.FamilyRequest{Family: lb.IPv6, Optional: true}
	for _, r := range []lb.Request{
		{
			Holder:   lb.Holder{Service: "web", ShareKey: "site", Ports: []lb.Port{{Port: 443, Protocol: lb.TCP}}},
			Families: []lb.FamilyRequest{v4, v6},
		},
		{
			Holder:   lb.Holder{Service: "mail"},
			Families: []lb.FamilyRequest{v4},
		},
		{
			Holder:   lb.Holder{Service: "dns", ShareKey: "site", Ports: []lb.Port{{Port: 53, Protocol: lb.UDP}}},
			Families: []lb.FamilyRequest{v4},
		},
		{
			Holder:   lb.Holder{Service: "ftp"},
			Families: []lb.FamilyRequest{v4},
		},
	} {
		addrs, err := allocator.Assign(r)
		fmt.Println(r.Service, addrs, err)
	}
	// Output:
	// web [203.0.113.1 2001:db8::] <nil>
	// mail [203.0.113.2] <nil>
	// dns [203.0.113.1] <nil>
	// ftp [] no free IPv4 address in public
}
