package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

const (
	importPolicy = "accept-nothing"
	exportPolicy = "announce-own"
	allPeers     = "peers"
	// loweredRoutes names the community set for lowered routes.
	loweredRoutes = "graceful-shutdown"
)

var (
	familyV4 = &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}
	familyV6 = &api.Family{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST}
)

// setPolicies sets gobgp's import policy (reject all) and its export policy: accept local routes to these peers, with
// their next hops. It names peers by their address towards gobgp. It replaces the previous policies and does not resend
// routes.
func setPolicies(ctx context.Context, srv *server.BgpServer, peers map[netip.Addr]export) error {
	sets := []*api.DefinedSet{}
	all := []string{}
	var out []*api.Statement
	for peer, n := range peers {
		name := peer.String()
		host := netip.PrefixFrom(peer, peer.BitLen()).String()
		all = append(all, host)
		sets = append(sets, &api.DefinedSet{DefinedType: api.DefinedType_NEIGHBOR, Name: name, List: []string{host}})
		sets = append(sets, n.only.sets(name)...)
		for _, p := range n.pools {
			sets = append(sets, p.routes.sets(name+" from "+p.name)...)
		}
		out = append(out, n.statements(name, "ipv4", familyV4, n.hops.addr4)...)
		out = append(out, n.statements(name, "ipv6", familyV6, n.hops.addr6)...)
	}
	sets = append(sets, &api.DefinedSet{DefinedType: api.DefinedType_COMMUNITY, Name: loweredRoutes,
		List: []string{communityText(gracefulShutdown)}})
	// An empty neighbour set would match every route, including local ones.
	in := []*api.Statement{}
	if len(all) > 0 {
		sets = append(sets, &api.DefinedSet{DefinedType: api.DefinedType_NEIGHBOR, Name: allPeers, List: all})
		in = append(in, &api.Statement{
			Name: importPolicy, Conditions: &api.Conditions{NeighborSet: &api.MatchSet{Name: allPeers}},
			Actions: &api.Actions{RouteAction: api.RouteAction_REJECT},
		})
	}
	err := srv.SetPolicies(ctx, &api.SetPoliciesRequest{DefinedSets: sets, Policies: []*api.Policy{
		{Name: importPolicy, Statements: in}, {Name: exportPolicy, Statements: out},
	}})
	if err != nil {
		return fmt.Errorf("set policies: %w", err)
	}
	return nil
}

// assignPolicies attaches the policies. Later calls of setPolicies replace their content.
func assignPolicies(ctx context.Context, srv *server.BgpServer) error {
	for _, a := range []*api.PolicyAssignment{
		{
			Name: "global", Direction: api.PolicyDirection_IMPORT, DefaultAction: api.RouteAction_ACCEPT,
			Policies: []*api.Policy{{Name: importPolicy}},
		},
		{
			Name: "global", Direction: api.PolicyDirection_EXPORT, DefaultAction: api.RouteAction_REJECT,
			Policies: []*api.Policy{{Name: exportPolicy}},
		},
	} {
		if err := srv.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{Assignment: a}); err != nil {
			return fmt.Errorf("assign policies: %w", err)
		}
	}
	return nil
}

// export is the part of the export policy that differs between peers.
type export struct {
	hops nextHops
	only filter
	asn  uint32 // to prepend
	Attributes
	prepend int
	pools   []prepended
}

// prepended is a pool with its own prepend.
type prepended struct {
	name   string
	routes filter
	times  int
}

// prepends returns the prepends of the pools whose routes the peer receives.
func (o *Options) prepends(p *Peer) (all []prepended) {
	for _, pool := range o.Pools {
		if pool.Prepend > 0 && (len(p.Pools) == 0 || slices.Contains(p.Pools, pool.Name)) {
			all = append(all, prepended{pool.Name, filterOf(pool.Ranges), pool.Prepend})
		}
	}
	return all
}

// statements returns the policy statements that set the next hop and attributes of a family's local routes to a peer.
// They reject the routes if there is no next hop or the peer receives none of the family, and leave the preference of
// lowered routes unchanged.
func (e *export) statements(peer, family string, f *api.Family, hop netip.Addr) (all []*api.Statement) {
	v4 := f.Afi == api.Family_AFI_IP
	only, some := e.only.condition(v4, peer)
	for _, p := range e.pools {
		if in, any := p.routes.condition(v4, peer+" from "+p.name); any && some {
			all = append(all, e.statementsFor(peer, family+" from "+p.name, f, hop, in, p.times)...)
		}
	}
	if !some {
		hop = netip.Addr{}
	}
	return append(all, e.statementsFor(peer, family, f, hop, only, e.prepend)...)
}

// statementsFor returns the statements for routes in a set, or for all routes if in is nil.
func (e *export) statementsFor(
	peer, family string, f *api.Family, hop netip.Addr, in *api.MatchSet, prepend int,
) []*api.Statement {
	if !hop.IsValid() {
		in = nil
	}
	statement := func(name string, actions *api.Actions) *api.Statement {
		return &api.Statement{
			Name: name + family + " to " + peer,
			Conditions: &api.Conditions{
				NeighborSet: &api.MatchSet{Name: peer}, AfiSafiIn: []*api.Family{f},
				RouteType: api.Conditions_ROUTE_TYPE_LOCAL, PrefixSet: in,
			},
			Actions: actions,
		}
	}
	if !hop.IsValid() {
		return []*api.Statement{statement("", &api.Actions{RouteAction: api.RouteAction_REJECT})}
	}
	actions := func() *api.Actions {
		a := &api.Actions{
			RouteAction: api.RouteAction_ACCEPT, Nexthop: &api.NexthopAction{Address: hop.WithZone("").String()},
		}
		if len(e.Communities) > 0 {
			a.Community = &api.CommunityAction{Type: api.CommunityAction_ADD}
			for _, c := range e.Communities {
				a.Community.Communities = append(a.Community.Communities, communityText(c))
			}
		}
		if len(e.LargeCommunities) > 0 {
			a.LargeCommunity = &api.CommunityAction{Type: api.CommunityAction_ADD}
			for _, c := range e.LargeCommunities {
				text := fmt.Sprintf("%d:%d:%d", c[0], c[1], c[2])
				a.LargeCommunity.Communities = append(a.LargeCommunity.Communities, text)
			}
		}
		if len(e.ExtCommunities) > 0 {
			a.ExtCommunity = &api.CommunityAction{Type: api.CommunityAction_ADD}
			for _, c := range e.ExtCommunities {
				a.ExtCommunity.Communities = append(a.ExtCommunity.Communities, extText(c))
			}
		}
		if prepend > 0 {
			a.AsPrepend = &api.AsPrependAction{Asn: e.asn, Repeat: uint32(prepend)}
		}
		return a
	}
	if e.LocalPref == nil && e.MED == nil {
		return []*api.Statement{statement("", actions())}
	}
	low := statement("lowered ", actions())
	low.Conditions.CommunitySet = &api.MatchSet{Name: loweredRoutes}
	normal := statement("", actions())
	if e.LocalPref != nil {
		normal.Actions.LocalPref = &api.LocalPrefAction{Value: *e.LocalPref}
	}
	if e.MED != nil {
		normal.Actions.Med = &api.MedAction{Type: api.MedAction_REPLACE, Value: int64(*e.MED)}
	}
	return []*api.Statement{low, normal}
}

func communityText(c uint32) string { return fmt.Sprintf("%d:%d", c>>16, c&0xffff) }
