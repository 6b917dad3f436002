package bgp

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/lb"
)

// Sent returns the routes sent to a peer in its current session, sorted by prefix. ok is false if there is no such
// peer.
func (s *Speaker) Sent(peer netip.Addr) (list []lb.SentRoute, ok bool) {
	s.mu.Lock()
	_, ok = s.sessions[peer]
	s.mu.Unlock()
	for p, w := range s.withdrawals.sentTo(peer) {
		r := lb.SentRoute{Prefix: p, NextHop: w.nextHop, ASPath: []uint32{}, At: w.at}
		addAttributes(&r, w.attributes)
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b lb.SentRoute) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), a.Prefix.Bits()-b.Prefix.Bits())
	})
	return list, ok
}

func (w *withdrawalTracker) sentTo(peer netip.Addr) map[netip.Prefix]*written {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.peers[peer]; r != nil {
		return maps.Clone(r.routes)
	}
	return nil
}

// addAttributes adds an UPDATE's path attributes, b, to r. They come from gobgp, so its decoder is safe here.
func addAttributes(r *lb.SentRoute, b []byte) {
	for len(b) > 0 {
		a, err := bgp.GetPathAttribute(b)
		if err != nil || a.DecodeFromBytes(b) != nil || a.Len() > len(b) {
			return
		}
		b = b[a.Len():]
		switch a := a.(type) {
		case *bgp.PathAttributeAsPath:
			for _, segment := range a.Value {
				r.ASPath = append(r.ASPath, segment.GetAS()...)
			}
		case *bgp.PathAttributeMultiExitDisc:
			r.MED = &a.Value
		case *bgp.PathAttributeLocalPref:
			r.LocalPref = &a.Value
		case *bgp.PathAttributeCommunities:
			for _, c := range a.Value {
				r.Communities = append(r.Communities, communityName(c))
			}
		case *bgp.PathAttributeLargeCommunities:
			for _, c := range a.Values {
				r.LargeCommunities = append(r.LargeCommunities, c.String())
			}
		case *bgp.PathAttributeExtendedCommunities:
			for _, c := range a.Value {
				if link, ok := c.(*bgp.LinkBandwidthExtended); ok {
					r.Bandwidth = float64(link.Bandwidth)
					continue
				}
				r.ExtendedCommunities = append(r.ExtendedCommunities, extendedName(c))
			}
		}
	}
}

// extendedName returns a route target or route origin in the form of config.Community, and other communities in gobgp's
// form.
func extendedName(c bgp.ExtendedCommunityInterface) string {
	b, err := c.Serialize()
	switch {
	case err != nil || len(b) != 8 || b[0] > 2 || b[1] != 2 && b[1] != 3:
		return c.String()
	case b[0] == 2: // four-byte AS number
		kind, _, _ := strings.Cut(extText([8]byte(b)), ":")
		return fmt.Sprintf("%s:%d:%d", kind, binary.BigEndian.Uint32(b[2:]), binary.BigEndian.Uint16(b[6:]))
	}
	return extText([8]byte(b))
}

// communityName returns the name of a well-known community (RFC 1997), or both halves as numbers.
func communityName(c uint32) string {
	if c == gracefulShutdown { // gobgp uses the draft's name
		return "graceful-shutdown"
	}
	if name, ok := bgp.WellKnownCommunityNameMap[bgp.WellKnownCommunity(c)]; ok {
		return name
	}
	return fmt.Sprintf("%d:%d", c>>16, c&0xffff)
}
