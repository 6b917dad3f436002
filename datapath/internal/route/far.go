package route

import (
	"net/netip"
	"slices"
)

// FarAddrs holds sample addresses behind routers. Nothing is sent to them.
type FarAddrs struct {
	// Public holds addresses, most of which are routed if there is a default route or a full Internet table. A route to
	// a server network may cover one of them.
	Public []netip.Addr
	inner  []netip.Addr // at least one is routed if all clients are in private networks
}

func (f FarAddrs) All() []netip.Addr { return slices.Concat(f.Public, f.inner) }

// Sample addresses behind routers, by family.
var (
	Far4 = FarAddrs{
		addrs("11.0.0.1", "52.0.0.1", "91.0.0.1", "133.0.0.1", "185.0.0.1"),
		addrs("198.51.100.1", "10.0.0.1", "172.16.0.1", "192.168.0.1"),
	}
	Far6 = FarAddrs{
		addrs("2600::1", "2a00::1", "2400::1", "2800::1", "2c00::1"),
		addrs("2001:db8::1", "fd00::1"),
	}
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, t := range texts {
		all = append(all, netip.MustParseAddr(t))
	}
	return all
}
