package agent

import (
	"context"
	"slices"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/doctor"
)

// examiner tells the checks of "steelyard doctor" what they need to know.
type examiner struct {
	announcers announcers
	cfg        *config.Config // at the start
	// Both are nil without a cluster.
	permissions, policies func(context.Context) ([]lb.Finding, error)
}

func (e examiner) examine(ctx context.Context, st lb.Status) []lb.Diagnosis {
	n := &doctor.Node{Status: st, Away: e.announcers.members.away(), Links: e.announcers.l2Links,
		Members: e.announcers.members.status(), Permissions: e.permissions, Policies: e.policies}
	for _, p := range e.announcers.peers() {
		peer := doctor.Peer{PeerStatus: p, Port: e.portOf(p)}
		peer.External = p.Session != nil && p.Session.LocalASN != p.ASN
		peer.Sent, _ = e.announcers.sent(p.Peer)
		n.Peers = append(n.Peers, peer)
	}
	if e.announcers.askOwn != nil {
		n.AskOwn = func(ctx context.Context) []lb.Finding {
			e.announcers.askOwn(ctx)
			return e.announcers.conflicts.findings()
		}
	}
	return doctor.Examine(ctx, n)
}

// portOf returns the TCP port of a peer. An added peer has the usual one.
func (e examiner) portOf(p lb.PeerStatus) uint16 {
	i := slices.IndexFunc(bgpPeers(e.cfg), func(c config.Peer) bool { return c.Address == p.Peer })
	if i < 0 {
		return 179
	}
	return bgpPeers(e.cfg)[i].Port
}
