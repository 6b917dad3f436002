package kube

import (
	"net/netip"
	"slices"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Nodes accept every packet to an address that they serve, and no packet from it. So writing a client's or a server's
// address into a status must not make nodes serve that address: it must be in a pool. If the pool was changed, the
// address is still served for a while, to give clients and the Service's owner time.

// GraceDefault is Pool.Grace for addresses whose pool is no longer known, because it was configured before this agent
// started.
const GraceDefault = 10 * time.Minute

// broadcast is the limited broadcast address.
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// refusal says why this node does not serve an address in a Service's status, or returns "" if it does.
func (s *Source) refusal(addr netip.Addr) string {
	switch {
	case !isHost(addr):
		return "is not the address of a host"
	case poolOf(s.o.Pools, addr) != nil || time.Now().Before(s.graceUntil[addr]):
		return ""
	case len(s.o.Pools) > 0:
		return "is in no pool"
	case slices.Contains(s.tunnelSources, addr):
		return "is the address of a node"
	}
	found, _ := s.services.ByIndex(withClusterIP, addr.String()) // the index exists
	if len(found) == 0 {
		return ""
	}
	return "is the ClusterIP of " + nameOf(found[0].(*core.Service))
}

// isHost reports whether a is a possible address of one host.
func isHost(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != broadcast
}

// served returns the addresses in a Service's status that this node may serve.
func (s *Source) served(service *core.Service) []netip.Addr {
	return slices.DeleteFunc(addressesOf(service), func(a netip.Addr) bool { return s.refusal(a) != "" })
}

// withoutVIPs returns a slice without endpoints that are in a pool. Nodes would forward such an endpoint's packets to
// each other until the TTL expires, and open another flow each time.
func (s *Source) withoutVIPs(x *endpointSlice) *endpointSlice {
	isVIP := func(e endpoint) bool { return poolOf(s.o.Pools, e.at.Addr()) != nil }
	i := slices.IndexFunc(x.endpoints, isVIP)
	if i < 0 {
		return x
	}
	out := *x
	out.ignored = x.endpoints[i].at.Addr()
	out.endpoints = slices.DeleteFunc(slices.Clone(x.endpoints), isVIP)
	return &out
}

// ignored names an endpoint of a Service that gets no packets, or returns "".
func ignored(all []*endpointSlice) string {
	for _, x := range all {
		if x.ignored.IsValid() {
			return x.ignored.String() + " gets no packets: it is in a pool, or not the address of a host"
		}
	}
	return ""
}

// SetPools replaces Options.Pools. It may be called from any goroutine.
func (s *Source) SetPools(pools []Pool) {
	s.pools.Store(&pools)
	s.newPools.Store(&pools)
	s.queue.Add(otherPools)
}

// usePools activates other pools. Addresses that this node serves but that are in none of them stay served until their
// grace period ends.
func (s *Source) usePools(pools []Pool) {
	now, until := time.Now(), map[netip.Addr]time.Time{}
	for _, service := range s.put {
		for _, addr := range service.VIPs {
			was := poolOf(s.o.Pools, addr)
			switch {
			case poolOf(pools, addr) != nil:
			case was != nil:
				until[addr] = now.Add(was.Grace)
			case now.Before(s.graceUntil[addr]):
				until[addr] = s.graceUntil[addr]
			}
		}
	}
	s.o.Pools = pools
	s.setGrace(until)
}

// keepHeld gives a grace period to addresses that a previous agent served and that are in no pool.
func (s *Source) keepHeld() {
	until := map[netip.Addr]time.Time{}
	for _, f := range s.o.Held {
		if poolOf(s.o.Pools, f.VIP) == nil {
			until[f.VIP] = time.Now().Add(GraceDefault)
		}
	}
	s.setGrace(until)
}

// setGrace sets until when addresses in no pool are served, and queues their services for then.
func (s *Source) setGrace(until map[netip.Addr]time.Time) {
	s.graceUntil = until
	for _, at := range until {
		s.queue.AddAfter(everything, time.Until(at))
	}
}

// pooled sets each VIP's announcers from its pool. A VIP in no pool is withheld.
func (s *Source) pooled(service *lb.Service) {
	if len(s.o.Pools) == 0 {
		return
	}
	pools := make([]*Pool, len(service.VIPs))
	for i, vip := range service.VIPs {
		pools[i] = poolOf(s.o.Pools, vip)
	}
	if all := slices.Compact(slices.Clone(pools)); len(all) == 1 && all[0] != nil {
		service.Announce = all[0].Announce // for most services; takes less memory than a map
		return
	}
	service.PerVIP = map[netip.Addr]lb.VIPRule{}
	for i, vip := range service.VIPs {
		rule := lb.VIPRule{WithholdReason: vip.String() + " is in no pool"}
		if pools[i] != nil {
			rule = lb.VIPRule{Announce: pools[i].Announce}
		}
		service.PerVIP[vip] = rule
	}
}
