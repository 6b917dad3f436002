package bgp

import (
	"context"
	"fmt"
	"net/netip"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

const (
	importPolicy = "accept-nothing"
	exportPolicy = "announce-own"
	allPeers     = "peers"
)

var (
	familyV4 = &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}
	familyV6 = &api.Family{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST}
)

// setPolicies sets the import policy of gobgp (reject all) and its export policy: accept local routes to these peers,
// with their next hops. Peers are named by their address towards gobgp. It replaces the previous policies and does not
// send routes again.
func setPolicies(ctx context.Context, srv *server.BgpServer, peers map[netip.Addr]nextHops) error {
	sets := []*api.DefinedSet{}
	all := []string{}
	var out []*api.Statement
	for peer, n := range peers {
		name := peer.String()
		host := netip.PrefixFrom(peer, peer.BitLen()).String()
		all = append(all, host)
		sets = append(sets, &api.DefinedSet{DefinedType: api.DefinedType_NEIGHBOR, Name: name, List: []string{host}})
		out = append(out, nextHopStatement(name, "ipv4", familyV4, n.addr4),
			nextHopStatement(name, "ipv6", familyV6, n.addr6))
	}
	// An empty neighbour set would match every route, local ones too.
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

// assignPolicies applies the policies. After that, setPolicies replaces them in place.
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

// nextHopStatement sets the next hop of local routes of a family to a peer, or rejects them when addr is zero.
func nextHopStatement(peer, family string, f *api.Family, addr netip.Addr) *api.Statement {
	s := &api.Statement{
		Name: family + " to " + peer,
		Conditions: &api.Conditions{
			NeighborSet: &api.MatchSet{Name: peer}, AfiSafiIn: []*api.Family{f},
			RouteType: api.Conditions_ROUTE_TYPE_LOCAL,
		},
		Actions: &api.Actions{RouteAction: api.RouteAction_REJECT},
	}
	if addr.IsValid() {
		s.Actions = &api.Actions{
			RouteAction: api.RouteAction_ACCEPT, Nexthop: &api.NexthopAction{Address: addr.WithZone("").String()},
		}
	}
	return s
}
