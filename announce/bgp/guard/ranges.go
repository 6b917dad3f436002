package guard

import (
	"net/netip"
	"slices"
)

// Range is a set of addresses whose connections Options.Unknown may accept. The prefix has neither zone nor host bits.
type Range struct {
	Prefix   netip.Prefix
	Password string // of all peers in the range, or ""
	Device   string
}

// SetRanges replaces the ranges. It does not remove peers.
func (g *Guard) SetRanges(list []Range) {
	g.mu.Lock()
	before := g.ranges
	g.ranges = slices.Clone(list)
	for _, r := range before {
		kept := slices.ContainsFunc(list, func(x Range) bool { return x.Prefix == r.Prefix && x.Password != "" })
		if r.Password != "" && !kept {
			g.eachSocket(r.Prefix.Addr(), func(fd int) error { return setRangeKey(fd, r.Prefix, "") })
		}
	}
	for _, r := range list {
		if r.Password != "" && !slices.Contains(before, r) {
			g.eachSocket(r.Prefix.Addr(), func(fd int) error { return setRangeKey(fd, r.Prefix, r.Password) })
		}
	}
	running := g.running
	g.mu.Unlock()
	if running != nil {
		g.relisten(running)
	}
}

// inRange reports whether an address that connects to device's listening socket is in a range for it.
func (g *Guard) inRange(from netip.Addr, device string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.ContainsFunc(g.ranges, func(r Range) bool {
		return r.Prefix.Contains(from) && g.socketOf(r.Device) == device
	})
}

func (g *Guard) peerOf(from netip.Addr) *peer {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.peers[from]
}
