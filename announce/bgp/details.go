package bgp

import (
	"net/netip"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
)

func (s *Speaker) details() map[netip.Addr]*lb.PeerSession {
	var peers []netip.Addr
	s.forEachSession(func(p *session) { peers = append(peers, p.peer.Address) })
	all := map[netip.Addr]*lb.PeerSession{}
	for _, peer := range peers {
		if d, ok := s.guard.Details(peer); ok {
			all[peer] = described(&d)
		}
	}
	return all
}

// described converts a session's details to their public form.
func described(d *guard.Details) *lb.PeerSession {
	s := &lb.PeerSession{
		Local: d.Local, LocalASN: d.LocalASN, RouterID: d.RouterID, Families: []string{},
		Hold: d.HoldTime.Seconds(), Keepalive: d.Keepalive.Seconds(), ExtendedNextHop: d.ExtendedNextHop,
		Restart: d.RestartTime.Seconds(), LongLived: d.LongLived.Seconds(),
		Sent: messages(d.Sent), Received: messages(d.Received),
	}
	if d.V4 {
		s.Families = append(s.Families, "ipv4")
	}
	if d.V6 {
		s.Families = append(s.Families, "ipv6")
	}
	return s
}

func messages(m guard.Messages) lb.PeerMessages {
	return lb.PeerMessages{Messages: m.All, Updates: m.Updates, Last: m.Last}
}
